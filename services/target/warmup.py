"""Runs every shape of step once before the target is ready, and measures decode steps."""

from __future__ import annotations

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

ROWS = (1, 4, 8, 16, 32, 64)
"""Rows of one slot that are measured."""

PREFIX = 64
"""Tokens before the anchor while measuring."""

CHAIN = 16
"""Rows up to which a measured tree is a chain, as long as a block; more rows fan out."""

MOST_ROWS = 512
"""Rows of a whole step beyond which nothing is measured."""


def measure(runner: TargetRunner) -> tuple[CostPoint, ...]:
    """Decode costs by slots and rows, each shape run once beforehand. Leaves no slot occupied."""
    spec = runner.spec
    prefix = min(PREFIX, spec.max_model_len // 2)
    pool = PagePool(spec.pages, spec.page_size)
    points: list[CostPoint] = []
    tables: list[BlockTable] = []
    try:
        for slots in _counts(spec.slots):
            _occupy(runner, pool, tables, slots, prefix)
            for rows in ROWS:
                if rows > spec.max_nodes or slots * rows > max(MOST_ROWS, slots):
                    continue
                if not _room(pool, tables, prefix + rows + 2):
                    continue
                points.append(CostPoint(slots, slots * rows, _time(runner, tables, prefix, rows)))
    finally:
        for slot in range(len(tables)):
            runner.release(slot)
    return tuple(points)


def _counts(most: int) -> Iterator[int]:
    """1, 2, 4, ... and the number of slots itself."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def _occupy(
    runner: TargetRunner, pool: PagePool, tables: list[BlockTable], slots: int, prefix: int
) -> None:
    """Prefills slots until there are `slots`, or no pages are left for more."""
    spec = runner.spec
    while len(tables) < slots and pool.pages_for(prefix) <= pool.free:
        slot, table = len(tables), BlockTable(pool)
        table.reserve(prefix)
        tables.append(table)
        runner.admit(slot, _request(prefix, spec.max_model_len, spec.vocab_size))
        runner.prefill([PrefillEntry(slot, 0, prefix, True, table.pages)])


def _request(prefix: int, limit: int, vocab: int) -> SlotAdmit:
    ids = [(7 * i + 11) % vocab for i in range(prefix)]
    return SlotAdmit(ids, (), limit, 0, frozenset(), SamplingParams(), None, False)


def _room(pool: PagePool, tables: Sequence[BlockTable], positions: int) -> bool:
    """Reserves `positions` for every slot; False when the pages do not suffice."""
    missing = sum(max(0, pool.pages_for(positions) - len(t.pages)) for t in tables)
    if missing > pool.free:
        return False
    for table in tables:
        table.reserve(positions)
    return True


def _time(runner: TargetRunner, tables: Sequence[BlockTable], prefix: int, rows: int) -> int:
    """Shortest of a few runs of one step, in ns, after one that is not counted."""
    tree = _tree(rows) if rows > 1 else None
    entries = [
        DecodeEntry(slot, prefix, 11, tree, table.pages) for slot, table in enumerate(tables)
    ]
    times: list[int] = []
    for _ in range(3 if rows * len(tables) <= 128 else 2):
        began = time.perf_counter_ns()
        runner.decode(entries)
        times.append(time.perf_counter_ns() - began)
    return min(times[1:])


def _tree(rows: int) -> Tree:
    """A chain of at most CHAIN nodes, then siblings beside it, depth after depth."""
    parents = list(range(-1, min(rows, CHAIN) - 1))
    parents += [node % (CHAIN - 1) for node in range(rows - len(parents))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Tree([11, *range(12, 11 + rows)], parents, depths)
