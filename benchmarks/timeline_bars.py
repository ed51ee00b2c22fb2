"""The cases of a timeline in a line each, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

ROUND_TRIP_US = {1: 30.0, 2: 40.0}
IDLE_US = 50.0
DELAY_COST = 0.02
BUSY = 0.95

Found = dict[str, Any]


def line(found: dict[str, Any]) -> str:
    """One case in one line."""
    if "cost" in found:
        one, two = found["period"]
        return f"{found['delay_ms']:g} ms: {one} -> {two}, cost {100 * found['cost']:.2f} %"
    if "faster" in found:
        cycles = [found[mode][-1]["period"]["p50"] for mode in ("off", "on")]
        return (
            f"cycle {cycles[0]} -> {cycles[1]}, x {found['faster']}, busy {found['busy_off']} -> "
            f"{found['busy_on']}"
        )
    if "trace" in found:
        trace = found["trace"]
        waits = [
            f"{row['name']} {row['per_step']}" for row in found["python"]["engine"]
            if "ynchronize" in row["name"]
        ]  # fmt: skip
        return (
            f"blocking calls a step {trace.get('blocking_per_step', trace['calls'])}, gpu "
            f"{trace['gpu']}, waits in Python {waits}"
        )
    period, enqueued = found["period"] or {}, found["enqueued"] or {}
    parts = [f"period {period.get('p50')} / p90 {period.get('p90')}"]
    for name in ("computed", "drafted", "round_trip", "handed", "back"):
        if found.get(name):
            parts.append(f"{name} {found[name]['p50']} / {found[name]['p90']}")
    parts.append(f"enqueued {enqueued.get('p50')} / p99 {enqueued.get('p99')}")
    return ", ".join([*parts, f"busy {found['busy']}", f"nodes {found['nodes_mean']}"])


def bars(cases: Mapping[str, Found], gpus: int) -> list[Found]:
    """Every bar that a case can be held against, by medians; for each its value and its limit."""
    found: list[Found] = []
    for name, case in cases.items():
        for what, value, limit, fits in _asked(name, case, gpus):
            found.append(
                {
                    "text": f"{name}: {what} {value} (bar {limit})",
                    "value": value,
                    "limit": limit,
                    "reached": fits(value, limit),
                }
            )
    return found


def _asked(
    name: str, case: Found, gpus: int
) -> Iterator[tuple[str, float, float, Callable[[float, float], bool]]]:
    """What, value, limit, whether it fits."""

    def most(value: float, limit: float) -> bool:
        return value <= limit

    def least(value: float, limit: float) -> bool:
        return value >= limit

    if "cost" in case and "depth 1" in name:
        yield "cost of the delay", case["cost"], DELAY_COST, most
    if "faster" in case:
        yield "busy with ping-pong", case["busy_on"], BUSY, least
        yield "tokens/s against one group", case["faster"], 1.0, least
    if "trace" in case and "blocking_per_step" in case["trace"]:
        yield "blocking calls a step", case["trace"]["blocking_per_step"], 0.0, most
    if case.get("round_trip"):
        yield "round trip us", case["round_trip"]["p50"], ROUND_TRIP_US[gpus], most
    idle = case.get("handed") or case.get("round_trip")
    if idle:
        yield "idle from draft to verify us", idle["p50"], IDLE_US, most
