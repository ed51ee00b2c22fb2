"""Runs every shape of draft step once before the draft is ready, and measures it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from services.draft.runner import (
    ContextRows,
    DraftContext,
    DraftCost,
    DraftEntry,
    Drafting,
    DraftRunner,
    DraftSpec,
    NoPages,
)
from slipstream.tree import TreeSpec

PREFIX = 64
"""Context rows of every slot while measuring."""

FRESH = 2
"""Rows that a measured step writes per slot, about what a step commits."""

MOST_ROWS = 256
"""Block rows of a whole step beyond which nothing is measured."""

MOST_S = 8.0
"""No larger step is begun after so many seconds."""


def measure(runner: DraftRunner, tree: TreeSpec) -> list[DraftCost]:
    """Costs by slots and block rows, for trees of `tree`. Leaves every page free."""
    spec = runner.spec
    context = runner.open_context()
    costs: list[DraftCost] = []
    features = _features(spec)
    occupied, began = 0, time.monotonic()
    try:
        for slots in _counts(spec.slots, MOST_ROWS // spec.block_size):
            while occupied < slots:
                if not _occupy(context, occupied, tree, features):
                    return costs
                occupied += 1
            if slots == 1:
                _run_writes(context, spec.block_size + 1, features)
            elif time.monotonic() - began > MOST_S:
                return costs
            for nodes in _nodes(spec, tree):
                entries = [DraftEntry(slot, PREFIX, 1, nodes) for slot in range(slots)]
                rows = (min(nodes, spec.block_size) if spec.causal else spec.block_size) * slots
                costs.append(DraftCost(slots, rows, _time(context, entries, features)))
    finally:
        context.close()
    return costs


def _counts(most: int, fit: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`, and no more than `fit`."""
    count = 1
    while count <= min(most, fit):
        yield count
        count *= 2


def _nodes(spec: DraftSpec, tree: TreeSpec) -> list[int]:
    """Nodes to measure: one per number of rows, the largest tree for a whole block."""
    short = [n for n in (4, 8) if n < min(spec.block_size, tree.budget)] if spec.causal else []
    return [*short, tree.budget]


def _features(spec: DraftSpec) -> memoryview:
    """PREFIX rows of bytes that are finite numbers in every element type."""
    random_bytes = random.Random(0).randbytes(PREFIX * spec.row_bytes)
    # Sign and low exponent bits only: values of either sign with magnitude about 1.
    width = spec.row_bytes // spec.feature_width
    out = bytearray(random_bytes)
    for high in range(width - 1, len(out), width):
        out[high] = (out[high] & 0x80) | 0x3F
    return memoryview(bytes(out))


def _occupy(context: DraftContext, slot: int, tree: TreeSpec, features: memoryview) -> bool:
    """Fills a slot; False when there are no pages for it."""
    context.admit(slot, Drafting(tree))
    try:
        context.reserve(slot, PREFIX)
    except NoPages:
        return False
    context.write([ContextRows(slot, 0, PREFIX, features)])
    return True


def _run_writes(context: DraftContext, most: int, features: memoryview) -> None:
    """Writes 1 .. `most` rows once: a step commits any number, and kernels differ by it."""
    size = len(features) // PREFIX
    for count in range(1, min(most, PREFIX) + 1):
        context.write([ContextRows(0, 0, count, features[: count * size])])


def _time(context: DraftContext, entries: list[DraftEntry], features: memoryview) -> int:
    """Shortest of a few runs of one step, in ns, after one that is not counted."""
    size = len(features) // PREFIX
    fresh = features[: FRESH * size]
    rows = [ContextRows(entry.slot, PREFIX - FRESH, FRESH, fresh) for entry in entries]
    times: list[int] = []
    for _ in range(4):
        began = time.perf_counter_ns()
        context.write(rows)
        context.draft(entries)
        times.append(time.perf_counter_ns() - began)
    return min(times[1:])
