"""What the gateway tells Prometheus: its own counts, and the scheduler's snapshot when asked."""

from __future__ import annotations

from typing import Protocol

from prometheus_client.registry import Collector

from slipstream.metrics import Histogram, LabelledCounter

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
            self.prompt_tokens,
            self.output_tokens,
            self.first_token,
            self.inter_token,
            self.tau,
            self.accepted,
        )
