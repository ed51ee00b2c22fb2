"""Which sessions use device memory: offers, probes, and the stream where they fail."""

from __future__ import annotations

import asyncio
import threading

import pytest

from slipstream.errors import PeerLost, SlipstreamError
from slipstream.handoff.cuda_ipc import CudaTargetEnd
from slipstream.handoff.cuda_ipc import offer as offers
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.grpc import GrpcDraftEnd, GrpcTargetEnd
from slipstream.handoff.layout import SETS
from tests.fakes.handoff_pair import FIRST, eventually, leave, serving

pytestmark = pytest.mark.anyio


async def test_without_memory_on_either_side_the_stream_is_used() -> None:
    async with serving() as pair:
        target, draft = await pair.session(1, exported=False)
        assert isinstance(target, GrpcTargetEnd) and isinstance(draft, GrpcDraftEnd)
        assert target.fallback == draft.fallback == "" and target.transport == "grpc"
        target, draft = await pair.session(2, mapped=False)
        assert isinstance(target, GrpcTargetEnd) and isinstance(draft, GrpcDraftEnd)
        assert target.fallback == draft.fallback == "the draft maps no device memory"
        assert pair.export.free == SETS


async def test_without_a_free_set_the_stream_is_used() -> None:
    async with serving() as pair:
        pairs = [await pair.session(number) for number in range(1, SETS + 1)]
        assert pair.export.free == 0 and pair.mapper.mapped == 1
        target, _ = await pair.session(9)
        assert target.fallback == "all sets of flags are in use"
        await leave(*pairs[2])
        await eventually(lambda: pair.export.free == 1)
        target, draft = await pair.session(10)
        assert isinstance(target, CudaTargetEnd) and target.which == draft.which == 2
        await leave(target, draft)
        for each in pairs[:2] + pairs[3:]:
            await leave(*each)


async def test_another_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as pair:
        names = iter(["here", "there"])
        monkeypatch.setattr(offers, "boot_id", lambda: next(names))
        target, draft = await pair.session()
        assert target.fallback == draft.fallback == "target and draft run on two nodes"
        assert pair.export.free == SETS


async def test_a_probe_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as pair:
        with monkeypatch.context() as broken:
            broken.setattr(Lane, "answer", lambda lane, address: None)
            target, draft = await pair.session()
        assert isinstance(target, GrpcTargetEnd) and isinstance(draft, GrpcDraftEnd)
        assert target.fallback == draft.fallback == "no answer to the probe within 0.3 s"
        await eventually(lambda: pair.export.free == SETS)
        target, draft = await pair.session(2)
        assert isinstance(target, CudaTargetEnd)
        await leave(target, draft)


@pytest.mark.slow
async def test_a_probe_whose_question_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as pair:
        with monkeypatch.context() as broken:
            broken.setattr(Lane, "ask", lambda lane, number, address: None)
            target, draft = await pair.session()
        assert isinstance(target, GrpcTargetEnd) and isinstance(draft, GrpcDraftEnd)
        await eventually(lambda: pair.export.free == SETS)


async def test_a_target_that_leaves_during_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Times(settle=0.05)) as pair:
        with monkeypatch.context() as broken:
            broken.setattr(Lane, "ask", lambda lane, number, address: None)
            _, draft = pair.begin(1)
            await eventually(lambda: pair.mapper.mapped == 1)
            await asyncio.sleep(0.05)
            await pair.connector.close()
            assert isinstance(await asyncio.wait_for(draft, 5), PeerLost)
        await eventually(lambda: pair.export.free == SETS)
        target, draft = await pair.session(2)
        assert isinstance(target, CudaTargetEnd)
        await leave(target, draft)


async def test_a_target_that_leaves_while_the_draft_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as pair:
        accept, entered, go_on = pair.mapper.accept, threading.Event(), threading.Event()

        def slow(offer, spec):
            entered.set()
            go_on.wait(5)
            return accept(offer, spec)

        with monkeypatch.context() as broken:
            broken.setattr(pair.mapper, "accept", slow)
            _, draft = pair.begin(1)
            await asyncio.to_thread(entered.wait, 5)
            await pair.connector.close()
            assert isinstance(await asyncio.wait_for(draft, 5), PeerLost)
        assert pair.export.free == SETS - 1  # the draft may still begin
        go_on.set()
        await eventually(lambda: pair.export.free == SETS)


@pytest.mark.parametrize("why", ["no export", "no mapper", "no answer"])
async def test_nothing_but_device_memory(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no answer":
        monkeypatch.setattr(Lane, "answer", lambda lane, address: None)
    async with serving(handoff="cuda_ipc") as pair:
        target, draft = await pair.session(
            1, mapped=why != "no mapper", exported=why != "no export"
        )
        assert isinstance(target, PeerLost) and "cuda_ipc: " in str(target)
        assert isinstance(draft, SlipstreamError) or not await lives(draft)
        await eventually(lambda: pair.export.free == SETS)


async def lives(draft: GrpcDraftEnd) -> bool:
    await asyncio.to_thread(draft.await_context, FIRST)
    return draft.alive


async def test_never_device_memory() -> None:
    async with serving(handoff="grpc") as pair:
        target, draft = await pair.session()
        assert isinstance(target, GrpcTargetEnd) and target.fallback == draft.fallback == ""
