"""What the scheduler counts, and the copy of it that other threads read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Sums since start; only the scheduler's thread writes them.

    Attributes:
        slot_steps: verify steps summed over slots; `drafted_slot_steps` had more than one row.
        step_s: mean time between the results of consecutive decode steps, in seconds.
        finish_interval_s: mean time between two ends of requests.
        replayed: times that a slot's context rows were sent to a draft that lacked them.
        plan_ns: the last times from the arrival of a result until the next plan was sent.
    """

    steps: int = 0
    prefill_steps: int = 0
    prefill_rows: int = 0
    decode_steps: int = 0
    drafted_steps: int = 0
    slot_steps: int = 0
    drafted_slot_steps: int = 0
    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    recoveries: int = 0
    rejected: int = 0
    replayed: int = 0
    sessions: int = 0
    waited_ns: int = 0
    computed_ns: int = 0
    published_ns: int = 0
    drafted_ns: int = 0
    step_s: float = 0.0
    finish_interval_s: float = 0.0
    last_finish: float = 0.0
    plan_ns: deque[int] = field(default_factory=lambda: deque(maxlen=4096))

    def request_ended(self, now: float) -> None:
        """A request came to its end at `now`, in seconds."""
        if self.last_finish:
            gap = now - self.last_finish
            self.finish_interval_s += 0.1 * (gap - self.finish_interval_s)
        self.last_finish = now

    def step_took(self, seconds: float) -> None:
        """A decode step followed the one before it after `seconds`."""
        self.step_s += (seconds - self.step_s) * (0.1 if self.step_s else 1.0)


SUMS = tuple(field.name for field in fields(Counters) if field.type == "int")
"""Names of the sums."""


def percentile(values: list[int], share: float) -> int:
    """The value below which `share` of `values` lie; 0 without any."""
    if not values:
        return 0
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler at one moment, for /metrics.

    `totals` holds the sums of `Counters` by name. Latencies are in ns, from the arrival of a
    step's result to the moment that the next plan was sent.
    """

    ready: bool
    draft_attached: bool
    slots: int
    running: int
    waiting: int
    pages: int
    free_pages: int
    in_flight: int
    groups: int
    step_s: float
    plan_latency_p50_ns: int
    plan_latency_p99_ns: int
    totals: dict[str, int]
