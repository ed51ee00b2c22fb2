"""A process of a cell is killed or stopped while answers stream: what their clients notice."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.failure_cases.cell import Cell
from benchmarks.failure_cases.gauges import Sampler, eventually
from benchmarks.failure_cases.streams import PROMPTS, Batch, greedy, run_all

Victim = Literal["draft", "target"]

BAR_S = 0.2
"""Longest gap that the loss of a draft may make, or four steps if they take longer."""

AROUND_S = 10.0
"""Seconds after a strike in which a gap counts as made by it."""


@dataclass(frozen=True)
class Plan:
    """What is asked for, and how long things may take, in seconds.

    Attributes:
        tokens: of each answer.
        again: of each answer that shows drafting afterwards.
        late: what a wait for a draft that says nothing may take before it is given up, where that
            is more than the bar.
    """

    streams: int = 8
    tokens: int = 2000
    again: int = 64
    answer_s: float = 120.0
    back_s: float = 180.0
    late: float = 0.0

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [greedy(PROMPTS[n % len(PROMPTS)], self.tokens) for n in range(self.streams)]

    @property
    def short(self) -> list[dict[str, Any]]:
        return [body | {"max_tokens": self.again} for body in self.bodies]


def undisturbed(cell: Cell, plan: Plan) -> tuple[list[list[int]], dict[str, Any]]:
    """The answers when nothing happens. Raises RuntimeError when they are not right themselves."""
    drafting(cell, plan, None, time.monotonic())
    began = time.monotonic()
    batch = run_all(cell.url, plan.bodies, plan.answer_s)
    if batch.errors:
        raise RuntimeError(f"undisturbed: {batch.errors[:3]}; {cell.tail()}")
    ids = [stream.ids for stream in batch.streams]
    first, last = batch.streams[0].times[0], batch.streams[0].times[-1]
    said = {
        "seconds": round(time.monotonic() - began, 2),
        "drafted": batch.drafted,
        "step_ms": round(1e3 * batch.step(first, last), 2),
        "longest_gap_ms": round(1e3 * max(batch.longest(0, last)), 1),
    }
    return ids, said


def strike(
    cell: Cell,
    plan: Plan,
    wanted: Sequence[Sequence[int]],
    victim: Victim,
    *,
    stopped_s: float = 0.0,
    survives: bool = True,
) -> dict[str, Any]:
    """Kills the victim in the middle of a batch, or stops it for `stopped_s`.

    `survives`: whether nothing but drafting may be lost; else the streams may pause until the cell
    has recovered.
    """
    after = len(cell.lines())
    pids = {name: cell.pid(name) for name in ("target", "draft", "gateway")}
    batch = Batch.start(cell.url, plan.bodies, plan.answer_s + plan.back_s)
    row: dict[str, Any] = {"transports_before": cell.transports()[-1:], "back_s": None}

    def back() -> None:
        row["back_s"] = _rounded(cell.until_back(victim, pids[victim], plan.back_s))

    with Sampler(cell.url) as sampler:
        if not batch.until(int(plan.tokens * random.uniform(0.25, 0.35)), plan.answer_s):
            batch.join(1)
            raise RuntimeError(f"the streams did not come so far: {batch.errors[:3]}")
        began = batch.streams[0].times[0]
        if stopped_s:
            hit = cell.kill(victim, signal.SIGSTOP)
            time.sleep(stopped_s)
            cell.kill(victim, signal.SIGCONT)
        else:
            hit = cell.kill(victim, signal.SIGKILL)
            threading.Thread(target=back, daemon=True).start()
        ended = batch.join(plan.answer_s + plan.back_s)
        row |= _times(batch, began, hit, plan, survives)
        row["all_ended"] = ended
        row["errors"] = batch.errors[:5]
        row["different"] = batch.different(wanted)[:5]
        if not survives:
            eventually(lambda: bool(cell.pid("target") and cell.pid("draft")), plan.back_s)
        row["drafting"] = drafting(cell, plan, wanted, hit)
        time.sleep(2 * sampler.every_s)
    row["drafting_again_s"] = _rounded(sampler.drafting_again(hit))
    row["survived"] = {name: cell.pid(name) == pid for name, pid in pids.items()}
    row["transports_after"] = cell.transports(after)
    row["said"] = [line for line in cell.lines(after) if "session" in line and "end" in line][:4]
    row["wrong_lines"] = cell.wrong_lines(after)[:8]
    row["checks"] = _checks(row, survives, stopped_s > 0, victim)
    return row


def _times(batch: Batch, began: float, hit: float, plan: Plan, survives: bool) -> dict[str, Any]:
    """Steps before and after, and each stream's longest gap after the strike."""
    gaps = batch.longest(hit, hit + (AROUND_S if survives else float("inf")))
    step = batch.step(began, hit)
    plain = batch.step(hit + 1.0, float("inf"))
    bar = max(BAR_S, 4 * max(step, plain), plan.late + 4 * plain if plan.late else 0.0)
    return {
        "tokens_at_strike": [
            sum(n for n, at in zip(s.counts, s.times, strict=True) if at <= hit)
            for s in batch.streams
        ],
        "step_before_ms": round(1e3 * step, 2),
        "step_after_ms": round(1e3 * plain, 2),
        "gaps_ms": [round(1e3 * gap, 1) for gap in gaps],
        "longest_gap_ms": round(1e3 * max(gaps), 1),
        "bar_ms": round(1e3 * bar, 1),
    }


def _checks(row: dict[str, Any], survives: bool, stopped: bool, victim: Victim) -> dict[str, bool]:
    found = {
        "every stream ended, no error": row["all_ended"] and not row["errors"],
        "tokens as undisturbed": not row["different"],
        "drafting resumed": row["drafting"]["drafted"] and not row["drafting"]["different"],
        "a new session": row["drafting_again_s"] is not None or bool(row["transports_after"]),
    }
    if survives:
        found["gap within the bar"] = row["longest_gap_ms"] <= row["bar_ms"]
        found["others survived"] = all(
            same for name, same in row["survived"].items() if name != victim
        )
    if stopped:
        found["the stopped process went on"] = row["survived"][victim]
    return found


def drafting(
    cell: Cell, plan: Plan, wanted: Sequence[Sequence[int]] | None, since: float
) -> dict[str, Any]:
    """Short answers until drafts are verified and accepted again; their tokens are compared."""
    deadline = time.monotonic() + plan.back_s
    rounds, errors, different = 0, list[str](), list[dict[str, Any]]()
    while time.monotonic() < deadline:
        if not cell.alive:
            raise RuntimeError(f"the cell ended: {cell.wrong}")
        batch = run_all(cell.url, plan.short, plan.answer_s)
        rounds += 1
        errors += batch.errors
        if wanted is not None:
            different += batch.different(wanted)
        if batch.drafted and not batch.errors:
            break
        time.sleep(0.1)
    return {
        "drafted": batch.drafted,
        "rounds": rounds,
        "seen_after_s": round(time.monotonic() - since, 2),
        "errors": errors[:3],
        "different": different[:3],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
