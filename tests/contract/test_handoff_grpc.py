"""The grpc handoff through a real channel: both ends driven by threads, as engines drive them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from slipstream.errors import PairError, PeerLost
from slipstream.handoff.base import (
    ContextMessage,
    ContextRecord,
    PeerSpec,
    Proposal,
    ProposedTree,
)
from slipstream.handoff.grpc import GrpcAcceptor, GrpcConnector, GrpcDraftEnd, GrpcTargetEnd
from slipstream.serving import Server
from slipstream.v1 import handoff_pb2, handoff_pb2_grpc

pytestmark = pytest.mark.anyio

SPEC = PeerSpec(
    feature_width=576,
    feature_dtype="bfloat16",
    vocab_size=100,
    slots=4,
    fingerprints={"fc": "aa", "hidden_norm": "bb", "embedding": "cc", "lm_head": "dd"},
)
ROW = 576 * 2


class Pair:
    """A serving draft side and a connector."""

    def __init__(self, server: Server, watchdog_ms: int | None) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.acceptor = GrpcAcceptor(loop)
        self.acceptor.add_to(server.grpc)
        self.connector = GrpcConnector(loop, watchdog_ms)
        self.loop = loop

    def _future(self) -> tuple[asyncio.Future, object]:
        future = self.loop.create_future()
        return future, lambda value: future.done() or future.set_result(value)

    async def session(self, number: int = 1, target: PeerSpec = SPEC, draft: PeerSpec = SPEC):
        draft_end, draft_done = self._future()
        target_end, target_done = self._future()
        self.acceptor.expect(number, 7, draft, draft_done)
        self.connector.connect(number, 7, f"127.0.0.1:{self.server.port}", target, target_done)
        return await asyncio.wait_for(asyncio.gather(target_end, draft_end), 10)


@asynccontextmanager
async def serving(watchdog_ms: int | None = None) -> AsyncIterator[Pair]:
    server = Server(["slipstream.v1.HandoffService"])
    pair = Pair(server, watchdog_ms)
    await server.start("127.0.0.1", 0)
    try:
        yield pair
    finally:
        await pair.connector.close()
        await server.stop(0)


async def test_context_and_proposals_cross() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        assert isinstance(target, GrpcTargetEnd) and isinstance(draft, GrpcDraftEnd)
        rows = bytes(range(256)) * (3000 * ROW // 256)
        records = (ContextRecord(2, 9, 0, 2000, 5, False), ContextRecord(0, 3, 4, 1000, 6, True))
        target.publish_context(ContextMessage(7, records, rows))
        target.publish_context(ContextMessage(8))
        got = await asyncio.to_thread(draft.await_context, 7)
        assert got is not None and got.records == records and got.rows == rows
        assert await asyncio.to_thread(draft.await_context, 8) == ContextMessage(8)
        proposal = Proposal(8, (ProposedTree(0, 3, [6, 1, 2], [-1, 0, 0]),), 17)
        draft.publish_proposal(proposal)
        assert await asyncio.to_thread(target.await_proposal, 8, (1, 3)) == proposal


async def test_early_messages_wait_and_old_ones_are_dropped() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        for step in (7, 8, 9):
            draft.publish_proposal(Proposal(step))
        assert await asyncio.to_thread(target.await_proposal, 9, (1, 1)) == Proposal(9)
        for step in (7, 8):
            target.publish_context(ContextMessage(step))
        assert await asyncio.to_thread(draft.await_context, 8) == ContextMessage(8)


async def test_end_releases_waits_on_both_sides_after_what_was_given() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        draft.publish_proposal(Proposal(7))
        draft.end("drained")
        assert await asyncio.to_thread(target.await_proposal, 7, (1, 1)) == Proposal(7)
        assert await asyncio.to_thread(target.await_proposal, 8, (1, 1)) is None
        assert "drained" in target.reason and not target.alive
        target, draft = await pair.session(2)
        target.end("new session")
        assert await asyncio.to_thread(draft.await_context, 7) is None
        assert "new session" in draft.reason


async def test_watchdog_retires_a_session_whose_draft_is_late() -> None:
    async with serving(watchdog_ms=100) as pair:
        target, draft = await pair.session()
        began = time.monotonic()
        assert await asyncio.to_thread(target.await_proposal, 7, (1, 1)) is None
        assert 0.09 < time.monotonic() - began < 2
        assert "step 7" in target.reason
        assert await asyncio.to_thread(draft.await_context, 7) is None


async def test_a_dead_draft_releases_the_target() -> None:
    async with serving() as pair:
        target, _ = await pair.session()
        waiting = asyncio.create_task(asyncio.to_thread(target.await_proposal, 7, (1, 1)))
        await asyncio.sleep(0.05)
        await pair.server.grpc.stop(0)
        assert await asyncio.wait_for(waiting, 5) is None
        assert not target.alive


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"feature_width": 64}, "feature_width: the target has 64, the draft 576"),
        ({"feature_dtype": "float32"}, "feature_dtype: the target has 'float32'"),
        ({"vocab_size": 99}, "vocab_size: the target has 99, the draft 100"),
        ({"slots": 5}, "slots: the target has 5, the draft 4"),
        (
            {"fingerprints": {**SPEC.fingerprints, "embedding": "ff"}},
            "embedding: the target has 'ff', the draft 'cc'",
        ),
    ],
)
async def test_a_pair_that_does_not_fit_is_refused(changed: dict, words: str) -> None:
    async with serving() as pair:
        target, draft = await pair.session(target=replace(SPEC, **changed))
        assert isinstance(target, PairError) and words in str(target)
        assert isinstance(draft, PairError) and words in str(draft)


async def test_unreachable_draft_is_an_error_that_names_the_address() -> None:
    async with serving() as pair:
        future, done = pair._future()
        pair.connector.connect(1, 1, "127.0.0.1:1", SPEC, done)
        error = await asyncio.wait_for(future, 10)
        assert isinstance(error, PeerLost) and "127.0.0.1:1" in str(error)


async def test_a_target_nobody_attached_is_refused_and_a_missing_one_is_reported() -> None:
    async with serving() as pair:
        future, done = pair._future()
        pair.connector.connect(5, 1, f"127.0.0.1:{pair.server.port}", SPEC, done)
        error = await asyncio.wait_for(future, 10)
        assert isinstance(error, PeerLost) and "no gateway attached" in str(error)
        future, done = pair._future()
        pair.acceptor.expect(6, 1, SPEC, done, timeout_s=0.05)
        assert isinstance(await asyncio.wait_for(future, 5), PeerLost)


@pytest.mark.parametrize("bad", ["lengths", "session", "hello", "rows"])
async def test_nonsense_from_a_target_ends_only_its_session(bad: str) -> None:
    async with serving() as pair:
        future, done = pair._future()
        pair.acceptor.expect(1, 7, SPEC, done)
        from slipstream.handoff.frames import hello_frame

        async with grpc.aio.insecure_channel(f"127.0.0.1:{pair.server.port}") as channel:
            call = handoff_pb2_grpc.HandoffServiceStub(channel).Exchange()
            await call.write(hello_frame(1, 7, SPEC))
            await call.read()
            draft = await asyncio.wait_for(future, 5)
            frame = handoff_pb2.ContextFrame(session=1, step=7, dtype=2, last=True)
            if bad == "lengths":
                frame.row_count = 3
            elif bad == "session":
                frame.session = 2
            elif bad == "rows":
                frame.rows, frame.row_count = bytes(ROW), 1
            sent = handoff_pb2.TargetFrame(context=frame)
            await call.write(hello_frame(1, 7, SPEC) if bad == "hello" else sent)
            assert await asyncio.to_thread(draft.await_context, 7) is None
            assert "broke the protocol" in draft.reason
            assert await call.read() is grpc.aio.EOF
        assert (await pair.session(2))[0].alive


async def test_round_trip_is_quick() -> None:
    """Not a benchmark: only that no poll or timer sits on the way."""
    async with serving() as pair:
        target, draft = await pair.session()

        def answer() -> None:
            for step in range(7, 307):
                if draft.await_context(step) is None:
                    return
                draft.publish_proposal(Proposal(step))

        def ask() -> float:
            began = time.perf_counter()
            for step in range(7, 307):
                target.publish_context(ContextMessage(step))
                assert target.await_proposal(step, (1, 1)) is not None
            return (time.perf_counter() - began) / 300

        thread = threading.Thread(target=answer)
        thread.start()
        mean = await asyncio.to_thread(ask)
        thread.join()
        print(f"round trip {mean * 1e6:.0f} us")
        assert mean < 0.02
