"""What the gateway tells Prometheus: its own counts, and the scheduler's snapshot when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.counters import Snapshot
from slipstream.metrics import Histogram, LabelledCounter, counter, counters, gauge, gauges

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Finished(Protocol):
    """What is counted of a choice that came to its end."""

    @property
    def steps(self) -> int: ...

    @property
    def tau(self) -> float: ...


class FrontMetrics:
    """Counts taken on the event loop, per request and per chunk."""

    def __init__(self) -> None:
        self.requests = LabelledCounter(
            "requests", "Requests answered, by door and status.", ("endpoint", "status")
        )
        self.unknown_fields = LabelledCounter(
            "unknown_request_fields", "Fields of requests that were ignored.", ("field",)
        )
        self.prompt_tokens = LabelledCounter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.output_tokens = LabelledCounter("output_tokens", "Output tokens of answers.")
        self.first_token = Histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", _SECONDS
        )
        self.inter_token = Histogram(
            "inter_token_latency_seconds",
            "Time between two chunks of a choice over the tokens of the later one.",
            _SECONDS,
        )
        self.tau = Histogram(
            "request_tau",
            "Tokens per verify step of a choice, the one from prefill left out.",
            (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16),
        )
        self.accepted = Histogram(
            "accepted_draft_tokens",
            "Draft tokens accepted by one verify step.",
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 31),
        )

    def finished(self, stats: Finished) -> None:
        """Counts a choice that came to its end."""
        if stats.steps:
            self.tau.observe(stats.tau)

    def collectors(self) -> tuple[Collector, ...]:
        """Everything above, to be registered."""
        return (
            self.requests,
            self.unknown_fields,
            self.prompt_tokens,
            self.output_tokens,
            self.first_token,
            self.inter_token,
            self.tau,
            self.accepted,
        )


_TOTALS = {
    "steps": "Steps, prefill and decode.",
    "prefill_steps": "Prefill steps.",
    "prefill_rows": "Prompt rows computed.",
    "decode_steps": "Decode steps.",
    "drafted_steps": "Decode steps with drafted nodes.",
    "slot_steps": "Verify steps, summed over slots.",
    "drafted_slot_steps": "Verify steps of more than one node, summed over slots.",
    "rows": "Nodes planned for verification.",
    "accepted": "Draft tokens accepted.",
    "tokens": "Tokens the target gave.",
    "admitted": "Requests that took a slot, again after a preemption or a recovery.",
    "finished": "Requests that came to their end.",
    "cancelled": "Requests that were given up.",
    "failed": "Requests that ended with an error.",
    "preemptions": "Requests put back into the queue for want of pages.",
    "recoveries": "Requests taken over a loss of the target.",
    "rejected": "Commands the servers refused.",
    "replayed": "Times that a slot's context was sent to a draft that lacked it.",
    "sessions": "Sessions attached between target and draft.",
}
"""Help of the scheduler's sums; one that is new here is exported under its own name."""


class SchedulerMetrics(Collector):
    """The scheduler's state and sums, as they are when Prometheus asks."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Gauges of the moment, sums by name, and where step time went."""
        now = self._snapshot()
        yield gauge("ready", "Whether a target is connected.", now.ready)
        yield gauge("draft_attached", "Whether a draft takes part.", now.draft_attached)
        yield gauge("queue_length", "Requests that wait for a slot.", now.waiting)
        yield gauge("slots", "Slots of the target.", now.slots)
        yield gauge("running_slots", "Slots that hold a request.", now.running)
        yield gauge("free_slots", "Slots that hold none.", now.slots - now.running)
        yield gauge("pages", "KV pages of the target.", now.pages)
        yield gauge("free_pages", "KV pages not promised to a request.", now.free_pages)
        yield gauge("steps_in_flight", "Steps planned and not yet answered.", now.in_flight)
        yield gauge("ping_pong_groups", "Groups of slots that take turns.", now.groups)
        yield gauge("step_seconds", "Mean time between decode steps of late.", now.step_s)
        yield gauges(
            "plan_latency_seconds",
            "Arrival of a step's result until the next plan is sent, of late.",
            "quantile",
            {"0.5": now.plan_latency_p50_ns / 1e9, "0.99": now.plan_latency_p99_ns / 1e9},
        )
        yield counters(
            "step_part_seconds",
            "Time of all steps by what it went into, as the servers measured it.",
            "part",
            {
                name.removesuffix("_ns"): value / 1e9
                for name, value in now.totals.items()
                if name.endswith("_ns")
            },
        )
        for name, value in now.totals.items():
            if not name.endswith("_ns"):
                yield counter(f"scheduler_{name}", _TOTALS.get(name, name), value)
