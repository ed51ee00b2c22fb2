"""Walks on a device commit what `slipstream.tree.walk` and `cut` do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch

from slipstream.kernels.intake import TreeRows
from slipstream.kernels.slot_state import (
    FLAGS,
    HAS_STOPS,
    MIN_UNTIL,
    PENALISED,
    SlotState,
)
from slipstream.kernels.walk import (
    FINISH_LIMIT,
    FINISH_NONE,
    FINISH_OVER,
    FINISH_STOP,
    HEADER,
    Walks,
    walk,
)
from slipstream.layers.device_rows import DeviceRows
from slipstream.sampling import NOTHING
from slipstream.tree import Tree, Walk, cut
from slipstream.tree import walk as tree_walk

POISON = -7
VOCAB = 70
SLOTS = 6
CODES = {"none": FINISH_NONE, "stop": FINISH_STOP, "limit": FINISH_LIMIT}


@dataclass
class _Entry:
    slot: int
    start: int
    tree: Tree
    drawn: list[int]
    padding: int
    limit: int
    stop_ids: frozenset[int]
    min_until: int
    penalised: bool
    finished: bool

    @property
    def rows(self) -> int:
        return len(self.tree) + self.padding

    def path(self) -> list[int]:
        """Nodes walked through; at the last of them something is drawn."""
        path = tree_walk(self.tree, self.drawn)
        return path if self.drawn[path[-1]] != NOTHING else path[:-1]

    def expected(self) -> Walk:
        committed = self.start + 1
        return cut(
            self.tree,
            self.path(),
            self.drawn,
            stop_ids=self.stop_ids,
            room=0 if self.finished else self.limit - committed,
            min_left=max(0, self.min_until - committed),
        )


def _random_entry(rng: random.Random, slot: int, most: int) -> _Entry:
    nodes = rng.randint(1, most)
    tree = Tree([rng.randrange(VOCAB)], [-1], [0])
    reach = rng.choice((1, 4))
    for node in range(1, nodes):
        parent = rng.randint(max(0, node - reach), node - 1)
        taken = {t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == parent}
        tree.tokens.append(rng.choice([t for t in range(VOCAB) if t not in taken]))
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
    drawn = [rng.randrange(VOCAB) for _ in range(nodes)]
    for node in range(1, nodes):  # most draws follow the tree
        if rng.random() < 0.8:
            drawn[tree.parents[node]] = tree.tokens[node]
    drawn = [NOTHING if rng.random() < 0.04 else token for token in drawn]
    start = rng.randrange(100)
    stops = rng.sample(range(VOCAB), rng.choice((0, 1, 12)))
    if stops and rng.random() < 0.5:
        stops.append(max(0, rng.choice(drawn)))
    return _Entry(
        slot,
        start,
        tree,
        drawn,
        rng.randint(0, 3),
        start + 1 + rng.choice((-3, 0, 1, 2, 5, 50)),
        frozenset(stops),
        start + rng.randint(-4, 6),
        rng.random() < 0.5,
        rng.random() < 0.1,
    )


def _state(entries: list[_Entry], device: torch.device) -> SlotState:
    state = SlotState.allocate(SLOTS, VOCAB, device)
    for name in ("start", "anchor", "limit"):
        getattr(state, name).fill_(POISON)
    for entry in entries:
        slot = entry.slot
        state.limit[slot], state.finished[slot] = entry.limit, int(entry.finished)
        flags = HAS_STOPS.value * bool(entry.stop_ids) + PENALISED.value * entry.penalised
        state.words[slot, FLAGS.value] = flags
        state.words[slot, MIN_UNTIL.value] = entry.min_until
        for token in entry.stop_ids:
            word = int(state.stop_bits[slot, token // 32]) | 1 << token % 32
            state.stop_bits[slot, token // 32] = word - (1 << 32) if word >> 31 == 1 else word
    return state


def _rows(entries: list[_Entry], capacity: int, device: torch.device) -> DeviceRows:
    tables = torch.zeros(SLOTS, 2, dtype=torch.int32, device=device)
    rows = DeviceRows.allocate(capacity, SLOTS, tables, device, 1)
    total = sum(entry.rows for entry in entries)
    rows.counts.copy_(torch.tensor([len(entries), total]))
    rows.offsets.fill_(total)
    at = 0
    for index, entry in enumerate(entries):
        rows.offsets[index] = at
        rows.slots[index], rows.starts[index] = entry.slot, entry.start
        at += entry.rows
    return rows


def _trees(
    entries: list[_Entry], capacity: int, device: torch.device
) -> tuple[TreeRows, torch.Tensor]:
    trees = TreeRows.allocate(capacity, SLOTS, device)
    tokens = torch.full((capacity,), POISON, dtype=torch.int32, device=device)
    at = 0
    for index, entry in enumerate(entries):
        end = at + len(entry.tree)
        trees.ids[at:end] = torch.tensor(entry.tree.tokens).to(device)
        trees.parents[at:end] = torch.tensor(entry.tree.parents).to(device)
        tokens[at:end] = torch.tensor(entry.drawn).to(device)
        trees.used[index] = len(entry.tree)
        at += entry.rows
    return trees, tokens


def _check(entries: list[_Entry], state: SlotState, before: SlotState, walks: Walks) -> None:
    dest = walks.row_dest.tolist()
    at, most = 0, walks.path.shape[1]
    untouched = set(range(SLOTS)) - {entry.slot for entry in entries}
    for index, entry in enumerate(entries):
        wanted, slot = entry.expected(), entry.slot
        count = len(wanted.tokens)
        accepted = max(0, len(entry.path()) - 1)
        finish = FINISH_OVER if entry.finished else CODES[wanted.finish]
        result, path = walks.result[index].tolist(), walks.path[index].tolist()
        assert result[:HEADER] == [count, finish, accepted, len(entry.tree)]
        assert result[HEADER:] == wanted.tokens + [-1] * (most - count)
        assert path == wanted.path + [-1] * (most - count)
        places = [-1] * entry.rows
        for i, node in enumerate(wanted.path):
            places[node] = entry.start + i
        assert dest[at : at + entry.rows] == places
        at += entry.rows
        if count:
            assert state.start[slot] == entry.start + count
            assert state.anchor[slot] == wanted.tokens[-1]
        else:
            untouched.add(slot)
        assert state.finished[slot] == int(finish != FINISH_NONE)
        counted = Counter(wanted.tokens) if entry.penalised else Counter()
        assert state.counts[slot].tolist() == [counted[token] for token in range(VOCAB)]
    assert dest[at:] == [-1] * (len(dest) - at)
    for slot in untouched:
        assert state.start[slot] == before.start[slot]
        assert state.anchor[slot] == before.anchor[slot]


def test_any_walk(device: torch.device, cases: int) -> None:
    rng = random.Random(3)
    for _ in range(max(40, cases // 10)):
        count = rng.randint(1, SLOTS - 1)
        slots = rng.sample(range(SLOTS), count)
        entries = [_random_entry(rng, slot, rng.choice((3, 20))) for slot in slots]
        capacity = sum(entry.rows for entry in entries) + rng.randint(0, 9)
        capacity = max(capacity, 23)
        rows = _rows(entries, capacity, device)
        trees, tokens = _trees(entries, capacity, device)
        state, before = _state(entries, device), _state(entries, device)
        walks = Walks.allocate(capacity, SLOTS, 23, device)
        for tensor in (walks.result, walks.path, walks.row_dest):
            tensor.fill_(POISON)
        walk(rows, trees, tokens, state, walks)
        _check(entries, state, before, walks)
        assert (walks.result[count:] == POISON).all()


def test_steps_follow_one_another(device: torch.device) -> None:
    """A finished slot commits nothing more; equal tokens of a step are all counted."""
    chain = Tree([5, 6, 6, 6], [-1, 0, 1, 2], [0, 1, 2, 3])
    drawn = [6, 6, 6, 9]
    entry = _Entry(2, 10, chain, drawn, 0, 100, frozenset((9,)), 0, True, False)
    rows = _rows([entry], 8, device)
    trees, tokens = _trees([entry], 8, device)
    state, walks = _state([entry], device), Walks.allocate(8, SLOTS, 8, device)
    walk(rows, trees, tokens, state, walks)
    assert walks.result[0].tolist() == [4, FINISH_STOP, 3, 4, *drawn, *[-1] * 4]
    assert state.counts[2, [6, 9]].tolist() == [3, 1]
    assert (int(state.start[2]), int(state.anchor[2])) == (14, 9)
    walk(rows, trees, tokens, state, walks)
    assert walks.result[0, :HEADER].tolist() == [0, FINISH_OVER, 3, 4]
    assert walks.row_dest.tolist() == [-1] * 8
    assert (int(state.start[2]), int(state.anchor[2])) == (14, 9)


def test_no_counts_without_penalties(device: torch.device) -> None:
    entry = _Entry(1, 3, Tree([5], [-1], [0]), [8], 0, 90, frozenset(), 0, True, False)
    rows = _rows([entry], 1, device).first(1)
    trees, tokens = _trees([entry], 1, device)
    state, walks = _state([entry], device), Walks.allocate(4, SLOTS, 4, device)
    walk(rows, trees.first(1), tokens, state, walks, full=False)
    assert walks.result[0, :5].tolist() == [1, FINISH_NONE, 0, 1, 8]
    assert int(state.counts.sum()) == 0
