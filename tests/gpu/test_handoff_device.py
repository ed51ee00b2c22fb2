"""Shared memory and flags on GPUs: this process is the target, another one the draft.

With two GPUs the draft takes the second. With one, and no MPS, the rule that refuses such a pair
is tested and then left out: everything works, only slowly.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from slipstream.handoff.cuda_ipc import CudaTargetEnd, Export
from slipstream.handoff.cuda_ipc.memory import driver_of
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.grpc import GrpcConnector, GrpcTargetEnd
from slipstream.handoff.layout import SETS
from tests.fakes.device_steps import LAYOUT, SPEC, Draft, on_stream, target_steps

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

TARGET = torch.device("cuda", 0)
FIRST = 7
ROUNDS = 400


class Target:
    """A connector with an export, and the draft that it meets."""

    def __init__(self) -> None:
        torch.zeros(1, device=TARGET)
        self.two = torch.cuda.device_count() > 1
        self.mps = bool(driver_of(TARGET).attribute("MPS_ENABLED"))
        self.export = Export.create(LAYOUT, TARGET, Times(settle=0.2))
        self.connector = GrpcConnector(asyncio.get_running_loop())
        self.draft = self.new_draft()

    def new_draft(self, unchecked: bool = True) -> Draft:
        return Draft("cuda:1" if self.two else "cuda:0", unchecked)

    async def session(self, number: int, flags: int = 0) -> CudaTargetEnd:
        end = await self.any_session(number, flags)
        assert isinstance(end, CudaTargetEnd), getattr(end, "fallback", end)
        return end

    async def any_session(self, number: int, flags: int = 0) -> object:
        await asyncio.to_thread(self.draft.expect, number, FIRST, flags)
        future = asyncio.get_running_loop().create_future()
        address = f"127.0.0.1:{self.draft.port}"
        self.connector.connect(number, FIRST, address, SPEC, future.set_result, self.export)
        return await asyncio.wait_for(future, 30)

    async def close(self) -> None:
        await self.connector.close()
        self.draft.close()
        await asyncio.to_thread(self.export.close)


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    made = Target()
    try:
        yield made
    finally:
        await made.close()


async def eventually(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.005)


def steps(end: CudaTargetEnd, count: int) -> int:
    with on_stream(TARGET):
        return target_steps(end, FIRST, count)


async def test_messages_cross() -> None:
    async with target() as made:
        end = await made.session(1)
        assert await asyncio.to_thread(steps, end, 300) == 300
        end.end("enough")
        assert "enough" in await asyncio.to_thread(made.draft.says)
        await eventually(lambda: made.export.free == SETS)


async def test_one_gpu_without_mps_is_refused() -> None:
    async with target() as made:
        if made.two or made.mps:
            pytest.skip("needs one GPU and no MPS")
        made.draft.close()
        made.draft = made.new_draft(unchecked=False)
        end = await made.any_session(1)
        assert isinstance(end, GrpcTargetEnd)
        assert end.fallback == "target and draft share a GPU without MPS"


def round_trips(end: CudaTargetEnd) -> float:
    """us of a wait and a write here and a wait and a write there, in a row on both streams."""
    warm = ROUNDS // 4
    with on_stream(TARGET):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for step in range(FIRST, FIRST + ROUNDS):
            if step == FIRST + warm:
                began.record()
            end.await_proposal(step)
            end.publish(step)
        ended.record()
        ended.synchronize()
        for step in range(FIRST, FIRST + ROUNDS):
            end.passed(step, 0)
    return began.elapsed_time(ended) * 1000 / (ROUNDS - warm)


async def test_round_trip_time() -> None:
    async with target() as made:
        for number in (1, 2):  # the first one loads what there is to load
            end = await made.session(number, ROUNDS)
            mean = await asyncio.to_thread(round_trips, end)
            assert end.alive, end.reason
            end.end("enough")
            await eventually(lambda: made.export.free == SETS)
        where = "two GPUs" if made.two else "one GPU, MPS" if made.mps else "one GPU without MPS"
        print(f"round trip {mean:.1f} us, {where}")
        if made.two or made.mps:
            assert mean < (40 if made.two else 30)


def beside_a_parked_stream(end: CudaTargetEnd, values: torch.Tensor, pinned: torch.Tensor) -> float:
    """Parks a stream on a proposal that does not come and drives another one; s it took."""
    other, done = torch.cuda.Stream(TARGET), torch.cuda.Event()
    with on_stream(TARGET):
        end.await_proposal(FIRST + 1000)
        parked = torch.cuda.current_stream()
    began = time.monotonic()
    with torch.cuda.stream(other):
        for _ in range(50):
            values.add_(1.0)
            pinned.copy_(values, non_blocking=True)
            done.record()
            while not done.query():
                time.sleep(0)
    took = time.monotonic() - began
    assert not parked.query()
    end.end("over")
    parked.synchronize()
    end.passed(FIRST + 1000, 0)
    return took


async def test_a_parked_stream_blocks_nothing_else() -> None:
    async with target() as made:
        values = torch.zeros(1000, device=TARGET).add_(1.0)
        pinned = values.cpu().pin_memory()
        torch.cuda.synchronize(TARGET)
        end = await made.session(1)
        assert await asyncio.to_thread(beside_a_parked_stream, end, values, pinned) < 1.0
        await eventually(lambda: end.drained and made.export.free == SETS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_draft_that_dies_or_stands_still(number: int) -> None:
    async with target() as made:
        end = await made.session(1)
        running = asyncio.create_task(asyncio.to_thread(steps, end, 1 << 40))
        await asyncio.sleep(0.5)
        assert end.alive, end.reason
        os.kill(made.draft.process.pid, number)
        killed = time.monotonic()
        assert await asyncio.wait_for(running, 10) > 0
        print(f"released {(time.monotonic() - killed) * 1e3:.0f} ms after the signal: {end.reason}")
        end.end("known")
        await eventually(lambda: end.drained)
        if number == signal.SIGSTOP:
            os.kill(made.draft.process.pid, signal.SIGCONT)
        await eventually(lambda: made.export.free == SETS)
        made.draft.close()
        made.draft = made.new_draft()
        end = await made.session(2)
        assert await asyncio.to_thread(steps, end, 50) == 50
        end.end("enough")
        await eventually(lambda: made.export.free == SETS)


async def test_many_attaches_leave_nothing() -> None:
    async with target() as made:
        before: tuple[int, int, int] | None = None
        for number in range(1, 101):
            end = await made.session(number)
            assert await asyncio.to_thread(steps, end, 3) == 3
            end.end("enough")
            await eventually(lambda: made.export.free == SETS)
            if number == 20:
                before = held()
        after = held()
        print(f"free memory, open files, threads: {before} -> {after}")
        assert before is not None and before[0] - after[0] < 4 << 20
        assert after[1] <= before[1] + 3 and after[2] <= before[2] + 3


def held() -> tuple[int, int, int]:
    """Free bytes of the GPU, which nobody else may use meanwhile; open files; threads but this
    test's own pool."""
    threads = [t for t in threading.enumerate() if not t.name.startswith("asyncio_")]
    return torch.cuda.mem_get_info(TARGET)[0], len(os.listdir("/proc/self/fd")), len(threads)
