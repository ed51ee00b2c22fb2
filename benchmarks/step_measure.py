"""Repetitions of one step: its times by the host's clock, then by the GPU's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.step_rig import PieceClock


@dataclass(frozen=True, slots=True)
class Reps:
    """Repetitions: not counted, by the host's clock, with events on the GPU."""

    warm: int
    wall: int
    gpu: int


class Clocks:
    """The clocks of the servers that take part; None, or none, where there is no GPU."""

    def __init__(self, target: PieceClock | None = None, draft: PieceClock | None = None) -> None:
        pairs = (("target", target), ("draft", draft))
        self.all = {name: clock for name, clock in pairs if clock is not None}


def measure(
    step: Callable[[], dict[str, float]], reps: Reps, clocks: Clocks | None = None
) -> dict[str, Any]:
    """Runs `step`, which returns seconds by part.

    Returns summaries in ms: `wall` by part, and with clocks `gpu` by server and recorded piece.
    The events are not there while the wall time is taken.
    """
    for _ in range(reps.warm):
        step()
    found: dict[str, Any] = {"wall": _by_name([_ms(step()) for _ in range(reps.wall)])}
    clocks = clocks or Clocks()
    if not clocks.all:
        return found
    times: list[dict[str, float]] = []
    with ExitStack() as on:
        for clock in clocks.all.values():
            clock.read()
            on.enter_context(clock.on())
        for _ in range(reps.gpu):
            step()
            times.append(
                {
                    f"{server} {piece}": ms
                    for server, clock in clocks.all.items()
                    for piece, ms in clock.read().items()
                    if piece != "span" or len(clocks.all) == 1  # one has the other's work in it
                }
            )
    found["gpu"] = _by_name(times)
    return found


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median, least and 90th percentile (nearest rank) of times in ms."""
    ranked = sorted(times)
    return {
        "median_ms": round(statistics.median(ranked), 4),
        "min_ms": round(ranked[0], 4),
        "p90_ms": round(ranked[math.ceil(0.9 * len(ranked)) - 1], 4),
        "n": len(ranked),
    }


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in seconds.items()}


def _by_name(times: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """A part that is not in every repetition is summed up over those that have it."""
    names = dict.fromkeys(name for one in times for name in one)
    return {name: summary([one[name] for one in times if name in one]) for name in names}
