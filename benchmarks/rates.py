"""What the machine can do at most: bytes copied and operations of a matrix product, per second.

Measured in the run that compares with them: cards of one name differ, and so do their clocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
"""Size of the copied buffer: many times that of the caches on a GPU."""

MATRIX_ROWS = {"cuda": 8192, "cpu": 512}
REPEATS, ROUNDS = 10, 7


def copy_bandwidth(device: torch.device | str = "cuda") -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    place = torch.device(device)
    size = COPY_BYTES[place.type]
    source = torch.zeros(size, dtype=torch.uint8, device=place)
    target = torch.zeros_like(source)
    seconds = _seconds(partial(target.copy_, source), place)
    del source, target
    _give_back(place)
    return 2 * size / seconds


def matrix_rate(device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations per second of a square product, 2 n^3 each; the values are normal."""
    place = torch.device(device)
    rows = MATRIX_ROWS[place.type]
    left, right = (torch.randn(rows, rows, device=place).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _seconds(partial(torch.mm, left, right, out=out), place)
    del left, right, out
    _give_back(place)
    return 2 * rows**3 / seconds


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median over rounds of calls that follow each other without a wait."""
    rounds: list[float] = []
    for _ in range(ROUNDS + 1):  # the first is the warm-up
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        _synchronize(device)
        rounds.append((time.perf_counter() - began) / REPEATS)
    return statistics.median(rounds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _give_back(device: torch.device) -> None:
    """The servers take their shares of what is free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
