"""Sessions of one pair, again and again, and servers that come back: what stays behind."""

from __future__ import annotations

import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.failure_cases.cell import SERVERS, Cell
from benchmarks.failure_cases.driver import Driver, driver
from benchmarks.failure_cases.gauges import Sight, growth, look

WARM_UP = 10
"""One attach in so many comes before the first look, and so many looks are taken after it."""

LEAST_WARM = 100
"""Attaches after which heaps have their size."""

STEPS_EVERY = 10
DECODES = 4
SETTLE_S = 0.3
BACK_S = 120.0


def attaches(cell: Cell, count: int, limit_s: float, on_devices: bool) -> dict[str, Any]:
    """`count` attaches, every tenth with a few steps; or as many as the time allows."""
    deadline = time.monotonic() + limit_s
    after = len(cell.lines())
    pids = {name: cell.pid(name) for name in SERVERS}
    warm = max(count // WARM_UP, min(LEAST_WARM, count // 2))
    every = max(1, (count - warm) // (2 * WARM_UP))
    sights: list[Sight] = []
    times: list[float] = []
    how: Counter[str] = Counter()
    answers: set[tuple[int, ...]] = set()
    drafts = 0
    with driver(cell.address("target"), cell.address("draft")) as gate:
        for number in range(1, count + 1):
            began = time.perf_counter()
            how[gate.attach()] += 1
            times.append(time.perf_counter() - began)
            if number % STEPS_EVERY == 0:
                tokens, accepted = gate.steps(DECODES)
                answers.add(tuple(tokens))
                drafts += accepted
            gate.detach()
            if number >= warm and (number - warm) % every == 0:
                sights.append(_settled(gate, number, pids))
            if time.monotonic() > deadline:
                break
        sights.append(_settled(gate, number, pids))
    found = growth(sights)
    row = {
        "count": number,
        "transports": dict(how),
        "each_ms": round(1e3 * statistics.median(times), 2),
        "slowest_ms": round(1e3 * max(times), 1),
        "accepted": drafts,
        "different_answers": len(answers) - 1,
        "growth": found,
        "not_flat": _not_flat(found),
        "wrong_lines": cell.wrong_lines(after)[:8],
        "pids_same": {name: cell.pid(name) for name in SERVERS} == pids,
    }
    row["checks"] = {
        "all attaches": number == count,
        "one answer": len(answers) == 1 and drafts > 0,
        "nothing grows": not row["not_flat"],
        "no error in the logs": not row["wrong_lines"],
        "nobody died": row["pids_same"],
        **({"all over cuda_ipc": set(how) == {"cuda_ipc"}} if on_devices else {}),
    }
    return row


def restarts(
    cell: Cell, victim: str, count: int, limit_s: float, *, kill: bool, on_devices: bool
) -> dict[str, Any]:
    """`count` restarts of one server, by signal 9 with `kill`, each in the middle of a session.

    The other one must hold no more than before. On one GPU both servers come back when the target
    ends; then nobody's growth can be said.
    """
    deadline = time.monotonic() + limit_s
    other = "draft" if victim == "target" else "target"
    first = cell.pid(other)
    number = signal.SIGKILL if kill else signal.SIGTERM
    sights: list[Sight] = []
    answers: set[tuple[int, ...]] = set()
    how: Counter[str] = Counter()
    backs: list[float] = []
    done = 0
    with driver(cell.address("target"), cell.address("draft")) as gate:
        _session(gate, how, answers)
        while done < count and time.monotonic() < deadline:
            old = cell.pid(victim)
            gate.attach()
            gate.steps(DECODES)
            cell.kill(victim, number)
            gate.lost()
            back = _back(cell, gate, victim, old)
            backs.append(back)
            _session(gate, how, answers)
            done += 1
            sights.append(_settled(gate, done, {other: cell.pid(other)}))
    survived = cell.pid(other) == first
    found = growth(sights[1:], factor=3.0) if survived else {}
    row = {
        "count": done,
        "back_s": [round(back, 2) for back in backs],
        "transports": dict(how),
        "different_answers": len(answers) - 1,
        "survivor": f"the {other} " + ("lived through all" if survived else "was replaced"),
        "growth": found,
        "not_flat": _not_flat(found),
    }
    row["checks"] = {
        "all restarts": done == count,
        "one answer": len(answers) == 1,
        "nothing grows": not row["not_flat"],
        **({"all over cuda_ipc": set(how) == {"cuda_ipc"}} if on_devices else {}),
        **({"the other one lived": survived} if kill else {}),
    }
    return row


def _session(gate: Driver, how: Counter[str], answers: set[tuple[int, ...]]) -> None:
    """Attach, some steps, detach."""
    how[gate.attach()] += 1
    answers.add(tuple(gate.steps(DECODES)[0]))
    gate.detach()


def _back(cell: Cell, gate: Driver, victim: str, old: int) -> float:
    """Waits for the next life, and whatever of the other one there is; seconds."""
    began = time.monotonic()
    while cell.pid(victim) in (0, old):
        gate.ping()
        if time.monotonic() > began + BACK_S or not cell.alive:
            raise RuntimeError(f"the {victim} did not come back: {cell.wrong or cell.tail()}")
        time.sleep(0.01)
    gate.connect(BACK_S)
    return time.monotonic() - began


def _settled(gate: Driver, at: float, pids: dict[str, int]) -> Sight:
    """A look after a moment in which whatever ends can end."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        gate.ping()
        time.sleep(0.02)
    return look(at, pids)


def _not_flat(found: dict[str, dict[str, Any]]) -> Sequence[str]:
    return [
        f"{name}: {row['first']} -> {row['last']}, {row['slope']} each"
        for name, row in found.items()
        if not row["flat"]
    ]
