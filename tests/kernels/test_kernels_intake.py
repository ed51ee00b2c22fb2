"""Intake: whatever a peer proposes, the rows are those of the tree that `repair` makes of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.intake import (
    StepPlan,
    TreeRows,
    prepare_prefill,
    prepare_rows,
)
from slipstream.kernels.tables import set_starts, update_tables
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.rows import unpack_bits
from slipstream.tree import Tree, ancestor_bits, repair

POISON = -7
VOCAB = 40
WILD = (-(2**31), -5, -1, VOCAB, VOCAB + 1, 2**31 - 1)


@dataclass
class _Entry:
    slot: int
    rows: int
    count: int
    tokens: list[int]
    parents: list[int]


def _ints(values: list[int], device: torch.device, size: int | None = None) -> Tensor:
    padded = values + [POISON] * ((size or len(values)) - len(values))
    return torch.tensor(padded, dtype=torch.int32, device=device)


def _rig(
    rows: int, entries: int, words: int, device: torch.device, slots: int = 4
) -> tuple[DeviceRows, TreeRows]:
    """Poisoned outputs."""
    tables = torch.zeros(slots, 4, dtype=torch.int32, device=device)
    device_rows = DeviceRows.allocate(rows, entries, tables, device, words)
    trees = TreeRows.allocate(rows, entries, device)
    for value in (device_rows, trees):
        for name in value.__slots__:
            if name != "tables":
                getattr(value, name).fill_(POISON)
    return device_rows, trees


def _plan(entries: list[_Entry], rows: int, most: int, device: torch.device) -> StepPlan:
    offsets, tokens, parents = [0], [POISON] * rows, [POISON] * rows
    for entry in entries:
        at = offsets[-1]
        tokens[at : at + entry.rows] = entry.tokens
        parents[at : at + entry.rows] = entry.parents
        offsets.append(at + entry.rows)
    return StepPlan(
        _ints([len(entries), offsets[-1]], device),
        _ints([e.slot for e in entries], device, most),
        _ints(offsets, device, most + 1),
        _ints([e.count for e in entries], device, most),
        _ints(tokens, device),
        _ints(parents, device),
    )


def _expected(entry: _Entry, anchor: int, tree: bool) -> Tree:
    count = entry.count if 1 <= entry.count <= entry.rows else 1
    tokens, parents = entry.tokens[:count], entry.parents[:count]
    if not tree:
        parents = [-1, *(p if p == i else -1 for i, p in enumerate(parents[1:]))]
    nodes = max(1, entry.rows)
    return repair(tokens, parents, nodes=nodes, vocab_size=VOCAB, anchor=anchor)


def _check(
    entries: list[_Entry],
    start: list[int],
    anchor: list[int],
    rows: DeviceRows,
    trees: TreeRows,
    tree: bool,
) -> None:
    total = sum(entry.rows for entry in entries)
    words = unpack_bits(rows.bits.cpu(), rows.most_own_rows)
    ids, parents, depths = (t.tolist() for t in (trees.ids, trees.parents, trees.depths))
    positions, owners = rows.positions.tolist(), rows.entries.tolist()
    at = 0
    for index, entry in enumerate(entries):
        first, wanted = start[entry.slot], _expected(entry, anchor[entry.slot], tree)
        used, pad = len(wanted), entry.rows - len(wanted)
        end = at + entry.rows
        assert trees.used[index] == used
        assert ids[at:end] == wanted.tokens + [0] * pad
        assert parents[at:end] == wanted.parents + [-1] * pad
        assert depths[at:end] == wanted.depths + [0] * pad
        assert positions[at:end] == [first + d for d in wanted.depths] + [first] * pad
        assert owners[at:end] == [index] * entry.rows
        sets = ancestor_bits(wanted.parents) + [1 << i for i in range(used, entry.rows)]
        for node, bits in enumerate(sets if tree else ()):
            seen = words[at + node].nonzero().flatten().tolist()
            assert seen == [j for j in range(rows.most_own_rows) if bits >> j & 1]
        at = end
    if not tree:
        assert (rows.bits == POISON).all()
    assert rows.counts.tolist() == [len(entries), total]
    rest = rows.most_entries - len(entries)
    assert rows.slots.tolist() == [e.slot for e in entries] + [0] * rest
    assert rows.starts.tolist() == [start[e.slot] for e in entries] + [0] * rest
    assert rows.offsets.tolist()[len(entries) + 1 :] == [total] * rest
    assert trees.used.tolist()[len(entries) :] == [0] * rest
    padding = rows.capacity - total
    assert owners[total:] == [-1] * padding == parents[total:]
    assert positions[total:] == [0] * padding == ids[total:] == depths[total:]


def _random_entry(rng: random.Random, slot: int, rows: int) -> _Entry:
    """Mostly sound proposals with some numbers spoilt, or anything at all."""
    kind = rng.random()
    vocab = rng.choice((2, 5, VOCAB))
    tokens = [rng.randrange(vocab) for _ in range(rows)]
    if kind < 0.3:
        parents = list(range(-1, rows - 1))
    else:
        reach = rng.choice((1, 3, rows))
        parents = [max(-1, i - rng.randint(1, reach)) if i else -1 for i in range(rows)]
        parents = [max(0, p) if i else p for i, p in enumerate(parents)]
    for _ in range(rng.choice((0, 0, 1, 3))):
        spoilt = rng.choice((tokens, parents))
        spoilt[rng.randrange(rows)] = rng.choice((*WILD, rng.randrange(rows + 2)))
    if kind > 0.9:
        tokens = [rng.choice((*WILD, *range(VOCAB))) for _ in range(rows)]
        parents = [rng.choice((*WILD, *range(rows))) for _ in range(rows)]
    count = rows if rng.random() < 0.7 else rng.choice((0, 1, rng.randint(1, rows), rows + 1, -3))
    return _Entry(slot, rows, count, tokens, parents)


@pytest.mark.parametrize("tree", [True, False])
def test_any_proposal_becomes_what_repair_makes_of_it(
    device: torch.device, cases: int, tree: bool
) -> None:
    rng = random.Random(5 + tree)
    for _ in range(max(20, cases // 10)):
        capacity, most = rng.choice(((16, 2), (40, 4), (64, 4), (150, 3)))
        entries: list[_Entry] = []
        slots = rng.sample(range(4), 4)
        left = capacity
        while len(entries) < rng.randint(1, most) and left and len(entries) < most:
            size = rng.randint(1, min(left, 130))
            entries.append(_random_entry(rng, slots[len(entries)], size))
            left -= size
        start = [rng.randrange(1000) for _ in range(4)]
        anchor = [rng.randrange(VOCAB) for _ in range(4)]
        rows, trees = _rig(capacity, most, 3, device)
        prepare_rows(
            _plan(entries, capacity, most, device),
            _ints(start, device),
            _ints(anchor, device),
            rows,
            trees,
            vocab_size=VOCAB,
            most_nodes=130,
            tree=tree,
        )
        _check(entries, start, anchor, rows, trees, tree)


def test_known_cases(device: torch.device) -> None:
    cases = (
        # tokens, parents: a repeated sibling takes its own children along
        ([9, 1, 1, 2, 3], [-1, 0, 0, 2, 1]),
        # equal tokens under equal parents, of which the first has its parent behind itself
        ([9, 4, 7, 4, 4], [-1, 3, 0, 2, 2]),
        ([9, 1, 2, 3], [-1, 0, 2, 2]),
        ([9, VOCAB, 2, 3], [-1, 0, 1, 0]),
        ([9, 5], [3, 0]),
    )
    for tokens, parents in cases:
        entries = [_Entry(2, len(tokens), len(tokens), tokens, parents)]
        rows, trees = _rig(8, 1, 1, device)
        start, anchor = [3, 4, 5, 6], [1, 2, 3, 4]
        prepare_rows(
            _plan(entries, 8, 1, device),
            _ints(start, device),
            _ints(anchor, device),
            rows,
            trees,
            vocab_size=VOCAB,
            most_nodes=8,
            tree=True,
        )
        _check(entries, start, anchor, rows, trees, True)


def test_prefill(device: torch.device) -> None:
    counts, firsts, slots = [5, 1200, 1], [0, 7, 300], [3, 0, 1]
    capacity, most, total = 2100, 5, sum(counts)
    known = list(range(1, total + 1))
    offsets = [0, 5, 1205, 1206]
    plan = StepPlan(
        _ints([3, total], device),
        _ints(slots, device, most),
        _ints(offsets, device, most + 1),
        *(_ints([], device, 1) for _ in range(3)),
    )
    rows, trees = _rig(capacity, most, 1, device)
    prepare_prefill(plan, _ints(firsts, device, most), _ints(known, device, capacity), rows, trees)
    padding = capacity - total
    assert trees.ids.tolist() == known + [0] * padding
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    assert rows.entries.tolist() == owners + [-1] * padding
    positions = [f + i for f, count in zip(firsts, counts, strict=True) for i in range(count)]
    assert rows.positions.tolist() == positions + [0] * padding
    assert rows.starts.tolist() == [*firsts, 0, 0]
    assert rows.slots.tolist() == [*slots, 0, 0]
    assert rows.offsets.tolist() == [*offsets, total, total]
    assert rows.counts.tolist() == [3, total]


def test_tables_take_updates_and_ignore_what_lies_outside(device: torch.device) -> None:
    tables = torch.full((3, 5), POISON, dtype=torch.int32, device=device)
    updates = [[0, 4, 11], [2, 0, 12], [3, 0, 13], [1, 5, 14], [-1, 0, 15], [1, 2, 16], [1, 1, 17]]
    stored = torch.tensor(updates, dtype=torch.int32, device=device)
    update_tables(tables, stored, _ints([6], device))
    expected = torch.full((3, 5), POISON, dtype=torch.int32)
    expected[0, 4], expected[2, 0], expected[1, 2] = 11, 12, 16
    assert torch.equal(tables.cpu(), expected)


def test_set_starts(device: torch.device) -> None:
    start = _ints([1, 2, 3, 4, 5], device)
    slots, values = _ints([4, 0, 2], device), _ints([40, 10, 30], device)
    set_starts(start, slots, values, _ints([2, 99], device))
    assert start.tolist() == [10, 2, 3, 4, 40]
