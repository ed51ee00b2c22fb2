"""How long a kernel takes on a GPU, and how fast the card is at copying and multiplying.

Calls are recorded in a CUDA graph and replayed, as the servers run them: what a host needs to
launch a kernel is not in the result. On a CPU the clock counts every call once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from slipstream.layers.graphs import Graphs

Call = Callable[[], object]

REPLAY_S = 1.5e-3
"""About how long one replay is to take."""

MOST_CALLS = 48
"""Calls of a replay at most, where they are short; more only to go through all inputs."""

REPLAYS = 20
COPIED = 2 << 30
MULTIPLIED = 8192


@dataclass(frozen=True, slots=True)
class Clock:
    """Times calls on one device: the median of `replays` replays."""

    device: torch.device
    replays: int = REPLAYS

    def seconds(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """Seconds of one call; `calls` do the same on inputs of their own, in turn.

        Without `graph` they are launched one by one, which must take less time than they do.
        """
        if self.device.type == "cpu":
            return statistics.median(_host_seconds(call) for call in calls)
        graphs = Graphs(self.device, enabled=graph)
        torch.cuda.synchronize(self.device)  # the inputs were made on another stream
        with graphs.on_stream():
            for call in calls:
                call()
            torch.cuda.synchronize(self.device)
            each = _host_seconds(lambda: _run(calls, 1)) / len(calls)
        wanted = min(MOST_CALLS, REPLAY_S / each)
        rounds = max(1, math.ceil(wanted / len(calls)))
        replay = graphs.capture(lambda: _run(calls, rounds))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.replays + 1)]  # type: ignore[no-untyped-call]
        with graphs.on_stream():
            replay()
            events[0].record()
            for event in events[1:]:
                replay()
                event.record()
            torch.cuda.synchronize(self.device)
        times: list[float] = [first.elapsed_time(last) for first, last in pairwise(events)]
        return 1e-3 * statistics.median(times) / (rounds * len(calls))


@dataclass(frozen=True, slots=True)
class Floor:
    """What the card does at best, measured.

    Attributes:
        copy: bytes/s from memory to memory, read and written bytes both counted.
        matrix: floating point operations/s of a large product, by type.
        node: seconds of a graph's smallest piece of work: no kernel takes less.
    """

    copy: float
    matrix: dict[torch.dtype, float]
    node: float

    @classmethod
    def measure(cls, clock: Clock) -> Floor:
        """A copy of some GB, and products of random matrices; far smaller ones on a CPU."""
        cpu, device = clock.device.type == "cpu", clock.device
        source = torch.randint(
            256, ((1 << 22) if cpu else COPIED,), dtype=torch.uint8, device=device
        )
        target = torch.empty_like(source)
        # A graph's copies go another way than kernels do, at two thirds of the speed.
        copy = 2 * source.numel() / clock.seconds([lambda: target.copy_(source)], graph=False)
        matrix = {
            dtype: _matrix_rate(clock, dtype, 256 if cpu else size)
            for dtype, size in ((torch.bfloat16, MULTIPLIED), (torch.float32, MULTIPLIED // 2))
        }
        one = torch.zeros(1, device=device)
        return cls(copy, matrix, clock.seconds([lambda: one.add_(1)]))

    def seconds(self, bytes_moved: float, flops: float, dtype: torch.dtype) -> float:
        """The time that cannot be gone below."""
        return max(bytes_moved / self.copy, flops / self.matrix[dtype])


def _matrix_rate(clock: Clock, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / clock.seconds([lambda: torch.mm(a, b, out=out)])


def _run(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def _host_seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
