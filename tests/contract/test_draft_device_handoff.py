"""The draft's engine and a target's memory, met through a real channel, on a CPU."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Detach,
    Detached,
    Event,
    Live,
    Plan,
    PlanEntry,
)
from services.draft.device_runner import DeviceRunner
from services.draft.device_step import StepSizes
from services.draft.engine import Engine
from slipstream.handoff.cuda_ipc import CudaTargetEnd, Export, Mapper
from slipstream.handoff.grpc import GrpcAcceptor, GrpcConnector
from slipstream.handoff.layout import SETS, Layout, ring_entry
from slipstream.layers.graphs import Graphs
from slipstream.models import DraftHead
from slipstream.serving import Server
from slipstream.tree import resolve_spec
from tests.kernels.test_draft_device import MAX_LEN, SLOTS, WIDTH, B, pair_of, spec_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CPU = torch.device("cpu")
WAIT_S = 30.0
CHAIN = resolve_spec("chain", block_size=B)
LAYOUT = Layout(SLOTS, pages=8, page_size=8, table_pages=4, width=WIDTH, dtype="float32")


class Cell:
    """A draft's engine with its acceptor, and a target with its memory and its connector."""

    def __init__(self, folder: Path, server: Server) -> None:
        loop = asyncio.get_running_loop()
        pair = pair_of(folder, "dflash")
        head = DraftHead.load(pair.draft, pair.target, torch.float32, CPU)
        spec = spec_of(head)
        self.spec, self.server = spec.peer, server
        self.mapper = Mapper(CPU)
        runner = DeviceRunner(
            head,
            spec,
            max_len=MAX_LEN,
            graphs=Graphs(CPU),
            attention="torch",
            sizes=StepSizes.of(spec, rows=B, write_rows=8),
            mapper=self.mapper,
        )
        acceptor = GrpcAcceptor(loop)
        acceptor.add_to(server.grpc)
        self.connector = GrpcConnector(loop)
        self.export = Export.create(LAYOUT, CPU)
        self.export.features.copy_(torch.randn(self.export.features.shape))
        self.export.tables[1, :2] = torch.tensor([5, 2], dtype=torch.int32)
        self.events: queue.Queue[Event] = queue.Queue()
        self.closed: queue.Queue[BaseException | None] = queue.Queue()
        self.engine = Engine(
            runner, acceptor, CHAIN, threading.Lock(), self.events.put, self.closed.put
        )
        self.engine.start()
        self.number = 1

    def send(self, make: Callable[..., Any], *values: Any) -> None:
        self.number += 1
        self.engine.submit(make(self.number, *values))

    async def event(self) -> Event:
        return await asyncio.to_thread(self.events.get, timeout=WAIT_S)

    async def connect(self, session: int, first_step: int) -> CudaTargetEnd:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(Attach, session, first_step)
        address = f"127.0.0.1:{self.server.port}"
        self.connector.connect(
            session, first_step, address, self.spec, done.set_result, self.export
        )
        end = await asyncio.wait_for(done, WAIT_S)
        assert isinstance(end, CudaTargetEnd), end
        assert await self.event() == Attached(session, "cuda_ipc")
        return end

    def publish(self, end: CudaTargetEnd, step: int, *words: int) -> None:
        """One record of a step."""
        entry = self.export.records[ring_entry(end.which, step)]
        entry[1, : len(words)] = torch.tensor(words)
        entry[0, :2] = torch.tensor([step, 1])
        end.publish(step)

    async def draft(self, session: int, end: CudaTargetEnd, first: int) -> list[int]:
        """A prefill and a decode step of one request; the tokens of its tree."""
        self.send(Admit, session, 1, 9, None, 0.0, 0, 0)
        self.send(Plan, first, session, False, (PlanEntry(1, 9, 0, 10),), first - 1)
        self.send(Plan, first + 1, session, True, (PlanEntry(1, 9, B, B),), first)
        end.await_room(first)
        self.publish(end, first, 1, 9, 0, 10, 77, 1)
        end.passed(first, 0)
        await asyncio.to_thread(end.await_proposal, first + 1)
        entry = ring_entry(end.which, first + 1)
        assert self.export.heads[entry, 0, :2].tolist() == [first + 1, 1]
        assert self.export.heads[entry, 1, :3].tolist() == [1, 9, B]
        end.passed(first + 1, 1000)
        nodes = self.export.nodes[entry, :B].tolist()
        assert [parent for _, parent in nodes] == list(range(-1, B - 1))
        assert await self.event() == Live(session, 1, 9, 10)
        return [token for token, _ in nodes]


@asynccontextmanager
async def cells(folder: Path) -> AsyncIterator[Cell]:
    server = Server(["slipstream.v1.HandoffService"])
    cell = Cell(folder, server)
    await server.start("127.0.0.1", 0)
    try:
        yield cell
    finally:
        cell.engine.close("over")
        cell.engine.interrupt("over")
        failure = await asyncio.to_thread(cell.closed.get, timeout=WAIT_S)
        await cell.connector.close()
        await server.stop(0)
        cell.mapper.close()
        await asyncio.to_thread(cell.export.close)
        assert failure is None


async def all_free(export: Export) -> None:
    """Every set is free again."""
    for _ in range(200):
        if export.free == SETS:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{export.free} sets of {SETS} are free")


async def test_sessions_one_after_the_other(tmp_path: Path) -> None:
    async with cells(tmp_path) as cell:
        drafts = []
        for session in range(1, 8):
            first = 100 * session
            end = await cell.connect(session, first)
            drafts.append(await cell.draft(session, end, first))
            if session % 2:
                cell.send(Detach, session, "enough")
                assert await cell.event() == Detached(session, "enough")
                end.end("enough")
            else:
                end.end("the target had enough")
                ended = await cell.event()
                assert isinstance(ended, Detached) and "had enough" in ended.reason
        assert drafts[0][0] == 77 and drafts == drafts[:1] * len(drafts)
        assert cell.mapper.mapped == 1
        await all_free(cell.export)


@pytest.mark.parametrize("late", [True, False])
async def test_a_session_that_connects_when_the_engine_is_gone(tmp_path: Path, late: bool) -> None:
    """The set comes back, whether its word comes after the end or only lies behind it."""
    async with cells(tmp_path) as cell:
        inside, go_on = threading.Event(), threading.Event()
        accept = cell.mapper.accept

        def slow(*given: Any) -> Any:
            inside.set()
            assert go_on.wait(WAIT_S)
            return accept(*given)

        cell.mapper.accept = slow  # type: ignore[method-assign]
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        cell.send(Attach, 5, 10)
        address = f"127.0.0.1:{cell.server.port}"
        cell.connector.connect(5, 10, address, cell.spec, done.set_result, cell.export)
        assert await asyncio.to_thread(inside.wait, WAIT_S)
        if late:
            cell.engine.close("the gateway left")
            await asyncio.to_thread(cell.engine.join, WAIT_S)
        go_on.set()
        end = await asyncio.wait_for(done, WAIT_S)
        if not late:
            cell.engine.close("the gateway left")
        assert isinstance(end, CudaTargetEnd)
        end.end("the gateway left")
        await all_free(cell.export)


async def test_a_target_that_ends_releases_the_drafts_wait(tmp_path: Path) -> None:
    async with cells(tmp_path) as cell:
        end = await cell.connect(3, 10)
        cell.send(Admit, 3, 1, 9, None, 0.0, 0, 0)
        cell.send(Plan, 10, 3, False, (PlanEntry(1, 9, 0, 10),), 9)
        cell.send(Plan, 11, 3, True, (PlanEntry(1, 9, B, B),), 10)  # its context never comes
        await asyncio.sleep(0.1)
        end.end("the target leaves")
        ended = await cell.event()
        assert isinstance(ended, Detached) and "the target leaves" in ended.reason
        await all_free(cell.export)
