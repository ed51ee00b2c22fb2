"""The nouns of a load test: what is run, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.cli.report import percentile

QUANTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Ramp:
    """Streams that grow from `start` by `step` every `every_s` seconds, to `end` at most."""

    start: int
    step: int
    end: int
    every_s: float

    @property
    def levels(self) -> list[int]:
        """Streams of each stage."""
        return list(range(self.start, self.end + 1, self.step))

    @property
    def seconds(self) -> float:
        """From the first stage to the end of the last, after which no call begins."""
        return self.every_s * len(self.levels)


@dataclass(frozen=True, slots=True)
class Load:
    """One run against one door.

    Attributes:
        streams: calls at once; with a ramp, at its end.
        requests: calls in all; a ramp makes as many as its time allows.
        tokens: every answer has exactly so many, unless it is cut.
        deadline_ms: a call still running then is cancelled by its client.
    """

    name: str
    streams: int
    requests: int
    tokens: int = 0
    ramp: Ramp | None = None
    deadline_ms: int | None = None

    @property
    def levels(self) -> list[int]:
        """Streams of each stage; one stage without a ramp."""
        return self.ramp.levels if self.ramp else [self.streams]

    @property
    def stage_s(self) -> float:
        """Seconds until the next stage."""
        return self.ramp.every_s if self.ramp else 0.0

    def scaled(self, factor: float) -> Load:
        """With `factor` times the requests, but at least one per stream; or the time of a ramp."""
        if self.ramp is not None:
            return replace(self, ramp=replace(self.ramp, every_s=self.ramp.every_s * factor))
        return replace(self, requests=max(self.streams, round(self.requests * factor)))


def plan(tokens: int, factor: float) -> list[Load]:
    """The runs of both doors. `factor` multiplies the requests, or the time, of each."""
    loads = [
        Load("c1", 1, 12, tokens),
        Load("c8", 8, 48, tokens),
        Load("c32", 32, 96, tokens),
        Load("ramp", 32, 0, tokens, Ramp(2, 6, 32, 4.0)),
        # Far more tokens than fit before the deadline, so that every call is cut.
        Load("cancel", 16, 48, max(1000, 8 * tokens), deadline_ms=700),
    ]
    return [load.scaled(factor) for load in loads]


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `status` is "ok", "cut" (by its own deadline), or what went wrong."""

    status: str
    ms: float
    tokens: int = 0
    first_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that is over.

    Attributes:
        door: grpc, rest or health.
        seconds: from the first call's start to the last one's end.
    """

    door: str
    load: Load
    seconds: float
    calls: Sequence[Call]

    @property
    def name(self) -> str:
        return f"{self.door} {self.load.name}"

    def summary(self) -> dict[str, Any]:
        """Everything known of the run, ready for JSON.

        Latencies are those of answered calls, to the last token; in a run that is to be cut, of cut
        calls.
        """
        done = [call for call in self.calls if call.status == "ok"]
        cut = [call for call in self.calls if call.status == "cut"]
        counted = cut if self.load.deadline_ms is not None else done
        known = Counter(call.status for call in self.calls)
        errors = {name: n for name, n in known.items() if name not in ("ok", "cut")}
        first = [call.first_ms for call in done if call.first_ms is not None]
        return {
            "door": self.door,
            "run": self.load.name,
            "streams": self.load.streams,
            "ramp": self.load.ramp is not None,
            "deadline_ms": self.load.deadline_ms,
            "calls": len(self.calls),
            "ok": len(done),
            "cut": len(cut),
            "cut_share": round(len(cut) / len(self.calls), 4) if self.calls else 0.0,
            "errors": sum(errors.values()),
            "error_messages": errors,
            "seconds": round(self.seconds, 3),
            "requests_s": round(len(self.calls) / self.seconds, 3) if self.seconds else 0.0,
            "tokens_s": round(sum(c.tokens for c in done) / self.seconds, 1)
            if self.seconds
            else 0.0,
            **{f"p{q}_ms": _rounded(percentile([c.ms for c in counted], q)) for q in QUANTILES},
            **{f"first_p{q}_ms": _rounded(percentile(first, q)) for q in QUANTILES},
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
