"""What the steps of a split say: periods, the target's share, the handoff's time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.split import Step


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Times in microseconds, p50 and more, of consecutive steps.

    `period` is between the beginnings of two steps of the same requests: with two groups a whole
    cycle. `round_trip` is the target's idle time before a step less what the draft computed in it:
    both ways of the handoff; `handed` is the way to the target and `back` the other, where they can
    be told. `busy` is the target's share of computing.
    """
    ordered = sorted(steps, key=lambda step: step.number)
    first, last = ordered[0], ordered[-1]
    span = last.started + last.computed - first.started
    tokens = sum(step.tokens for step in ordered)
    drafting = [step for step in ordered if step.drafted]
    waited = [step for step in ordered[1:] if step.drafted]
    groups = len({step.slots for step in ordered})
    found: dict[str, Any] = {
        "steps": len(ordered),
        "groups": groups,
        "period": spread(periods(ordered)),
        "computed": spread([step.computed for step in ordered]),
        "waited": spread([step.waited for step in ordered[1:]]),
        "drafted": spread([step.drafted for step in drafting]),
        "enqueued": spread([step.enqueued for step in ordered]),
        "queued": spread([step.queued for step in ordered]),
        "busy": round(sum(step.computed for step in ordered) / span, 4) if span > 0 else None,
        "tokens_s": round(tokens / span * 1e9, 1) if span > 0 else None,
        "accepted_mean": round(statistics.mean(s.accepted / len(s.slots) for s in ordered), 3),
        "nodes_mean": round(statistics.mean(s.nodes / len(s.slots) for s in ordered), 2),
    }
    if groups == 1:  # else the target computes for the other group while it waits
        found["round_trip"] = spread([step.waited - step.drafted for step in waited])
    handed = [step.handed for step in ordered if step.handed]
    if handed:
        found["handed"] = spread(handed)
    if handed and groups == 1:
        found["back"] = spread([s.waited - s.drafted - s.handed for s in waited if s.handed])
    return found


def periods(steps: Sequence[Step]) -> list[int]:
    """ns between the beginnings of consecutive steps of the same slots."""
    before: dict[tuple[int, ...], int] = {}
    found: list[int] = []
    for step in steps:
        if step.slots in before:
            found.append(step.started - before[step.slots])
        before[step.slots] = step.started
    return found


def spread(times: Sequence[int]) -> dict[str, float] | None:
    """Median, 90th and 99th percentile (nearest rank), extremes, of ns in microseconds."""
    if not times:
        return None
    ranked = sorted(times)

    def rank(share: float) -> float:
        return round(ranked[max(math.ceil(share * len(ranked)), 1) - 1] / 1e3, 2)

    return {
        "p50": round(statistics.median(ranked) / 1e3, 2),
        "p90": rank(0.9),
        "p99": rank(0.99),
        "min": round(ranked[0] / 1e3, 2),
        "max": round(ranked[-1] / 1e3, 2),
        "n": len(ranked),
    }
