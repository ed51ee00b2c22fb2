"""Runs decode steps of many shapes before the target is ready, and measures them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from services.target.pages import BlockTable, PagePool
from services.target.runner import (
    CostPoint,
    DecodeEntry,
    PrefillEntry,
    SlotAdmit,
    TargetRunner,
)
from slipstream.params import SamplingParams
from slipstream.tree import Tree

log = logging.getLogger(__name__)

ROWS = (1, 4, 8, 16, 32, 64)
"""Rows of one slot that are measured."""

PREFIX = 32
"""Tokens before the anchor while measuring."""

CHAIN = 16
"""Rows up to which a measured tree is a chain, as long as a block; more rows fan out."""

MOST_ROWS = 512
"""Rows of a whole step beyond which nothing is measured."""

BUDGET_S = 10.0
"""Time after which the larger shapes are left out."""


def measure(runner: TargetRunner, budget_s: float = BUDGET_S) -> tuple[CostPoint, ...]:
    """Decode costs by slots and rows, cheap shapes first. Leaves no slot occupied."""
    spec = runner.spec
    prefix = min(PREFIX, spec.max_model_len // 2)
    pool = PagePool(spec.pages, spec.page_size)
    tables: list[BlockTable] = []
    points: list[CostPoint] = []
    until = time.monotonic() + budget_s
    try:
        while len(tables) < spec.slots and pool.pages_for(prefix) <= pool.free:
            tables.append(_occupy(runner, pool, len(tables), prefix))
        for slots, rows in _shapes(len(tables), spec.max_nodes):
            if points and time.monotonic() > until:
                log.warning("warm-up took %g s: larger steps are not measured", budget_s)
                break
            if _room(pool, tables[:slots], prefix + rows):
                ns = _time(runner, tables[:slots], prefix, rows)
                points.append(CostPoint(slots, slots * rows, ns))
    finally:
        for slot in range(len(tables)):
            runner.release(slot)
    return tuple(points)


def _shapes(slots: int, max_nodes: int) -> Sequence[tuple[int, int]]:
    """(slots, rows of one slot), by the rows of the whole step."""
    shapes = [
        (count, rows)
        for count in _counts(slots)
        for rows in ROWS
        if rows <= max_nodes and (rows == 1 or count * rows <= MOST_ROWS)
    ]
    return sorted(shapes, key=lambda shape: shape[0] * shape[1])


def _counts(most: int) -> Iterator[int]:
    """1, 2, 4, ... and the number of slots itself."""
    count = 1
    while count < most:
        yield count
        count *= 2
    if most:
        yield most


def _occupy(runner: TargetRunner, pool: PagePool, slot: int, prefix: int) -> BlockTable:
    spec = runner.spec
    ids = [(7 * i + 11) % spec.vocab_size for i in range(prefix)]
    table = BlockTable(pool)
    table.reserve(prefix)
    request = SlotAdmit(ids, (), spec.max_model_len, 0, frozenset(), SamplingParams(), None, False)
    runner.admit(slot, request)
    runner.prefill([PrefillEntry(slot, 0, prefix, True, table.pages)])
    return table


def _room(pool: PagePool, tables: Sequence[BlockTable], positions: int) -> bool:
    """Reserves `positions` for every slot; False when the pages do not suffice."""
    missing = sum(max(0, pool.pages_for(positions) - len(t.pages)) for t in tables)
    if missing > pool.free:
        return False
    for table in tables:
        table.reserve(positions)
    return True


def _time(runner: TargetRunner, tables: Sequence[BlockTable], prefix: int, rows: int) -> int:
    """Shortest of two runs of one step, in ns, after one that is not counted."""
    tree = _tree(rows, runner.spec.vocab_size)
    proposed = (tree.tokens, tree.parents) if rows > 1 else None
    entries = [
        DecodeEntry(slot, prefix, 1, rows, proposed, table.pages)
        for slot, table in enumerate(tables)
    ]
    times: list[int] = []
    for _ in range(3):
        began = time.perf_counter_ns()
        runner.decode(entries)
        times.append(time.perf_counter_ns() - began)
    return min(times[1:])


def _tree(rows: int, vocab_size: int) -> Tree:
    """A chain of at most CHAIN nodes, then siblings beside it, depth after depth."""
    parents = list(range(-1, min(rows, CHAIN) - 1))
    parents += [node % (CHAIN - 1) for node in range(rows - len(parents))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Tree([1 + node % (vocab_size - 1) for node in range(rows)], parents, depths)
