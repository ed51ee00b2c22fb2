"""The times that the handoff on devices goes by."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """All in seconds.

    Attributes:
        tick: between two heartbeats, and between two looks at the peer's.
        release: between two stores that release waits.
        stale: age of the draft's heartbeat at which the target retires the session.
        first_beat: the same before the first one.
        lease: the same of the target's, for the draft: as long as a gateway may be silent.
        floor, factor: a proposal may take max(floor, factor * median of the waits).
        unmeasured: the limit before there is a median.
        unplanned: the limit of a step that the draft has not planned: longer than a gateway may be
            silent.
        probe: most for the probe's round trip.
        settle: from the end of a draft's process until its GPU work is surely over.
        untouched: from a failed greeting until the draft surely did not begin.
        vacant: between two looks, of a draft without a session, whether its targets are gone.
    """

    tick: float = 0.01
    release: float = 0.001
    stale: float = 0.1
    first_beat: float = 2.0
    lease: float = 5.0
    floor: float = 0.15
    factor: float = 3.0
    unmeasured: float = 1.0
    unplanned: float = 10.0
    probe: float = 2.0
    settle: float = 1.0
    untouched: float = 30.0
    vacant: float = 0.5


TIMES = Times()


class Waits:
    """How long the streams waited for proposals, and how long the next may take."""

    def __init__(self, times: Times, fixed_ms: int | None = None) -> None:
        self._times = times
        self._fixed = None if fixed_ms is None else fixed_ms / 1000
        self._seen: deque[float] = deque(maxlen=63)
        self._limit = times.unmeasured

    def observe(self, seconds: float) -> None:
        self._seen.append(seconds)
        median = statistics.median(self._seen)
        self._limit = max(self._times.floor, self._times.factor * median)

    @property
    def limit(self) -> float:
        return self._limit if self._fixed is None else self._fixed
