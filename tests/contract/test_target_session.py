"""Target and draft together over real channels, both with fake runners, driven by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from services.draft.server import DraftServer
from services.target.server import TargetServer
from slipstream import channels, wire
from slipstream.v1 import common_pb2 as pb
from slipstream.v1 import draft_pb2 as dpb
from slipstream.v1 import draft_pb2_grpc, target_pb2_grpc
from slipstream.v1 import target_pb2 as tpb
from tests.fakes import draft as fake_draft
from tests.fakes.draft import FakeDraftRunner
from tests.fakes.target import FakeTargetRunner, expected_output, serve_fake

pytestmark = pytest.mark.anyio
WAIT_S = 5.0
SPEC = dpb.TreeSpec(mode=dpb.TREE_MODE_CHAIN, width=1, budget=8)


class Line:
    """One stream to a server."""

    def __init__(self, stub: Any, command: Any) -> None:
        self.call = stub.Run()
        self._command = command
        self._number = 0

    async def send(self, **command: Any) -> None:
        self._number += 1
        await self.call.write(self._command(number=self._number, **command))

    async def read(self, kind: str) -> Any:
        async with asyncio.timeout(WAIT_S):
            event = await self.call.read()
        assert event is not grpc.aio.EOF
        assert event.WhichOneof("event") == kind, event
        return getattr(event, kind)


class Cell:
    """A gateway's two streams."""

    def __init__(self, target: Line, draft: Line) -> None:
        self.target = target
        self.draft = draft
        self.step = 0

    async def hello(self) -> None:
        for line in (self.target, self.draft):
            await line.send(hello=pb.Hello(protocol=wire.PROTOCOL, gateway="test"))
            await line.read("ready")

    async def attach(self, session: int, draft_port: int) -> None:
        attach = pb.Attach(
            session=session,
            first_step=self.step + 1,
            draft_address=f"127.0.0.1:{draft_port}",
        )
        await self.draft.send(attach=attach)
        await self.target.send(attach=attach)
        assert (await self.target.read("attached")).transport == "grpc"
        await self.draft.read("attached")

    async def admit(self, session: int, slot: int, prompt: list[int], limit: int) -> None:
        await self.target.send(
            admit=tpb.TargetAdmit(slot=slot, epoch=1, prompt_ids=prompt, limit=limit, publish=True)
        )
        await self.draft_admit(session, slot)

    async def draft_admit(self, session: int, slot: int) -> None:
        await self.draft.send(admit=dpb.DraftAdmit(session=session, slot=slot, epoch=1, tree=SPEC))

    async def plan(self, session: int, kind: Any, entries: list[dict[str, Any]]) -> None:
        self.step += 1
        if session:
            await self.draft.send(
                plan=dpb.DraftPlan(
                    step=self.step,
                    session=session,
                    kind=kind,
                    entries=[
                        dpb.DraftPlanEntry(slot=e["slot"], epoch=1, nodes=e.get("nodes", 1))
                        for e in entries
                    ],
                    after=self.step - 1,
                )
            )
        planned = [tpb.TargetPlanEntry(epoch=1, **e) for e in entries]
        await self.target.send(
            plan=tpb.TargetPlan(step=self.step, session=session, kind=kind, entries=planned)
        )

    async def run(self, session: int, kind: Any, *entries: dict[str, Any]) -> Any:
        await self.plan(session, kind, list(entries))
        done = await self.target.read("step_done")
        assert done.step == self.step
        return done

    async def prefill(self, session: int, slot: int, count: int) -> list[int]:
        entry = {"slot": slot, "reserve": count, "from": 0, "count": count, "last": True}
        done = await self.run(session, pb.STEP_KIND_PREFILL, entry)
        return list(done.entries[0].tokens)


@asynccontextmanager
async def cell(
    target: FakeTargetRunner, draft: FakeDraftRunner
) -> AsyncIterator[tuple[Cell, TargetServer, DraftServer]]:
    async with AsyncExitStack() as stack:
        target_server = await stack.enter_async_context(serve_fake(target))
        draft_server = await stack.enter_async_context(fake_draft.serve(draft))
        lines = []
        for port, stub, command in (
            (target_server.port, target_pb2_grpc.TargetServiceStub, tpb.TargetCommand),
            (draft_server.port, draft_pb2_grpc.DraftServiceStub, dpb.DraftCommand),
        ):
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=channels.client_options()
            )
            await stack.enter_async_context(channel)
            lines.append(Line(stub(channel), command))
            stack.callback(lines[-1].call.cancel)
        made = Cell(*lines)
        await made.hello()
        yield made, target_server, draft_server


async def test_drafts_are_verified_and_plans_run_ahead() -> None:
    target = FakeTargetRunner(max_model_len=512)
    prompts = {0: [5, 6, 7], 1: list(range(40)), 2: [1]}
    async with cell(target, FakeDraftRunner(accept=0.8)) as (gw, server, draft):
        await gw.attach(3, draft.port)
        got = {}
        for slot, prompt in prompts.items():
            await gw.admit(3, slot, prompt, limit=len(prompt) + 60)
            got[slot] = await gw.prefill(3, slot, len(prompt))
        finished: set[int] = set()
        accepted, in_flight = 0, 0
        while len(finished) < 3:
            entries = [
                {"slot": slot, "reserve": len(prompts[slot]) + 68, "nodes": 8} for slot in prompts
            ]
            await gw.plan(3, pb.STEP_KIND_DECODE, entries)
            in_flight += 1
            if in_flight < 2:
                continue
            done = await gw.target.read("step_done")
            in_flight -= 1
            for entry in done.entries:
                if entry.slot in finished:
                    assert entry.outcome == tpb.StepEntry.OUTCOME_PADDING and not entry.tokens
                    continue
                got[entry.slot] += entry.tokens
                accepted += entry.accepted
                if entry.finish == pb.FINISH_LIMIT:
                    finished.add(entry.slot)
        for slot, prompt in prompts.items():
            assert got[slot] == expected_output(prompt, len(prompt) + 60, 1000)
        assert accepted > 60, "drafts were taken"
        for slot in prompts:
            await gw.target.send(release=pb.Release(slot=slot, epoch=1))
        while in_flight:
            await gw.target.read("step_done")
            in_flight -= 1
        assert (await gw.run(3, pb.STEP_KIND_DECODE)).free_pages == 256
        server.engine.check()


async def test_a_new_session_is_brought_up_by_replay() -> None:
    prompt = list(range(30))
    async with cell(FakeTargetRunner(), FakeDraftRunner(accept=1.0)) as (gw, _, draft):
        await gw.attach(3, draft.port)
        await gw.admit(3, 0, prompt, limit=200)
        got = await gw.prefill(3, 0, 30)
        for line in (gw.draft, gw.target):
            await line.send(detach=pb.Detach(session=3, reason="test"))
        await gw.target.read("detached")
        await gw.draft.read("detached")
        done = await gw.run(0, pb.STEP_KIND_DECODE, {"slot": 0, "reserve": 40, "nodes": 1})
        got += done.entries[0].tokens
        await gw.attach(4, draft.port)
        await gw.draft_admit(4, 0)
        for replay in (20, 20, 0):  # the draft takes the rows of a step with its next plan
            entry = {"slot": 0, "reserve": 60, "nodes": 1, "replay": replay}
            done = await gw.run(4, pb.STEP_KIND_DECODE, entry)
            got += done.entries[0].tokens
        live = await gw.draft.read("live")
        assert (live.slot, live.rows) == (0, 33)
        done = await gw.run(4, pb.STEP_KIND_DECODE, {"slot": 0, "reserve": 60, "nodes": 8})
        got += done.entries[0].tokens
        assert done.entries[0].accepted == 7
        assert got == expected_output(prompt, 200, 1000)[: len(got)]


async def test_a_draft_that_dies_is_reported_and_decoding_goes_on() -> None:
    prompt = [1, 2, 3]
    async with cell(FakeTargetRunner(), FakeDraftRunner()) as (gw, _, draft):
        await gw.attach(3, draft.port)
        await gw.admit(3, 0, prompt, limit=200)
        got = await gw.prefill(3, 0, 3)
        gw.draft.call.cancel()  # the draft ends the session with the gateway's stream
        detached = await gw.target.read("detached")
        assert detached.session == 3 and detached.reason
        done = await gw.run(0, pb.STEP_KIND_DECODE, {"slot": 0, "reserve": 20, "nodes": 8})
        got += done.entries[0].tokens
        assert got == expected_output(prompt, 200, 1000)[: len(got)]


async def test_step_times_over_real_channels() -> None:
    target = FakeTargetRunner(step_ms=5.0, paranoid=False)
    async with cell(target, FakeDraftRunner(accept=0.5, draft_ms=1.0)) as (gw, _, draft):
        await gw.attach(3, draft.port)
        await gw.admit(3, 0, [1, 2, 3], limit=500)
        await gw.prefill(3, 0, 3)
        waited, took = [], []
        for _ in range(20):
            began = time.perf_counter()
            entry = {"slot": 0, "reserve": 512, "nodes": 8}
            done = await gw.run(3, pb.STEP_KIND_DECODE, entry)
            took.append(time.perf_counter() - began)
            waited.append(done.times.waited / 1e6)
            assert done.times.computed >= 5e6
            assert done.times.drafted >= 1e6
        print(f"step {1e3 * sorted(took)[10]:.2f} ms, waited {sorted(waited)[10]:.2f} ms")


async def test_steps_without_drafts_leave_no_proposals_behind() -> None:
    async with cell(FakeTargetRunner(), FakeDraftRunner()) as (gw, server, draft):
        await gw.attach(3, draft.port)
        await gw.admit(3, 0, [1, 2, 3], limit=200)
        await gw.prefill(3, 0, 3)
        for _ in range(20):
            await gw.run(3, pb.STEP_KIND_DECODE, {"slot": 0, "reserve": 40, "nodes": 1})
        current = server.engine._sessions._current
        assert current is not None and current.end is not None
        assert len(current.end._proposals._messages) <= 1  # type: ignore[attr-defined]
