"""A target's and a draft's side of sessions over shared memory, met through a real channel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from slipstream.handoff.cuda_ipc import CudaDraftEnd, CudaTargetEnd, Export, Mapper
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.grpc import GrpcAcceptor, GrpcConnector
from slipstream.serving import Server
from tests.fakes.device_steps import LAYOUT, SPEC, finish

CPU = torch.device("cpu")
QUICK = Times(settle=0.05, probe=0.3, unmeasured=0.4, stale=1.0)
FIRST = 7


class Pair:
    """Both sides in one process; each has its own mapping of the memory."""

    def __init__(self, server: Server, times: Times, handoff: str, watchdog_ms: int | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = server
        self.acceptor = GrpcAcceptor(self.loop)
        self.acceptor.add_to(server.grpc)
        self.connector = GrpcConnector(self.loop, watchdog_ms, handoff)
        self.export = Export.create(LAYOUT, CPU, times)
        self.mapper = Mapper(CPU, times)

    def begin(self, number: int, mapped: bool = True, exported: bool = True):
        """The coming results of both sides."""
        futures = [self.loop.create_future() for _ in range(2)]
        set_target, set_draft = (
            lambda value, future=future: future.done() or future.set_result(value)
            for future in futures
        )
        mapper = self.mapper if mapped else None
        export = self.export if exported else None
        self.acceptor.expect(number, FIRST, SPEC, set_draft, mapper=mapper)
        address = f"127.0.0.1:{self.server.port}"
        self.connector.connect(number, FIRST, address, SPEC, set_target, export)
        return futures

    async def session(self, number: int = 1, mapped: bool = True, exported: bool = True):
        return await asyncio.wait_for(asyncio.gather(*self.begin(number, mapped, exported)), 15)


@asynccontextmanager
async def serving(
    times: Times = QUICK, handoff: str = "auto", watchdog_ms: int | None = None
) -> AsyncIterator[Pair]:
    server = Server(["slipstream.v1.HandoffService"])
    pair = Pair(server, times, handoff, watchdog_ms)
    await server.start("127.0.0.1", 0)
    try:
        yield pair
    finally:
        await pair.connector.close()
        await server.stop(0)
        pair.mapper.close()
        await asyncio.to_thread(pair.export.close)
        assert not segments(pair)


def segments(pair: Pair) -> int:
    """Files that the target's segments have."""
    return len(list(Path("/dev/shm").glob(f"slipstream-{pair.export._id:016x}-*")))


async def eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.005)


async def leave(target: CudaTargetEnd, draft: CudaDraftEnd) -> None:
    target.end("done")
    await asyncio.to_thread(finish, draft)
