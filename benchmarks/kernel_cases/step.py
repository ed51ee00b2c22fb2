"""Both ends of a step: proposals to rows, and from draws to what is committed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cases.bench import (
    BF16,
    PAGE,
    QWEN,
    Bench,
    Case,
    Errors,
    Probe,
    Ragged,
    differences,
    ragged,
    relative_limit,
    unequal,
)
from slipstream.kernels.commit import gather_rows, move_kv, norm_scatter
from slipstream.kernels.intake import StepPlan, TreeRows, prepare_rows
from slipstream.kernels.slot_state import SlotState
from slipstream.kernels.walk import HEADER, Walks, walk
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.norm import RMSNorm
from slipstream.tree import Tree, cut
from slipstream.tree import walk as walk_reference

EPS = 1e-6
LAYERS = 36
ACCEPTED = 6  # depth that the walks reach
ROOM = 1 << 20
SHAPES = {
    "16": (1, 16, False),
    "tree 64": (1, 64, True),
    "tree 128": (1, 128, True),
    "32x16": (32, 16, False),
    "32xtree 64": (32, 64, True),
}


def _rows(bench: Bench, shape: str) -> Ragged:
    entries, count, tree = SHAPES[shape]
    vocab, context = bench.model(QWEN).vocab, bench.size(64)
    return ragged(bench, bench.size(entries), bench.size(count), context, vocab, tree=tree)


def _intake(bench: Bench, shape: str) -> Probe:
    rag, tree, vocab = _rows(bench, shape), SHAPES[shape][2], bench.model(QWEN).vocab
    total, entries = rag.rows.capacity, rag.rows.most_entries
    words = rag.rows.bits.shape[1]
    plan = StepPlan(
        rag.rows.counts, rag.rows.slots, rag.rows.offsets,
        torch.full_like(rag.rows.slots, total // entries), rag.trees.ids, rag.trees.parents,
    )  # fmt: skip
    start = torch.full_like(rag.rows.slots, rag.context)
    anchor = bench.ints([shape.tokens[0] for shape in rag.shapes])
    rows = DeviceRows.allocate(total, entries, rag.rows.tables, bench.device, words)
    trees = TreeRows.allocate(total, entries, bench.device)
    call = partial(
        prepare_rows, plan, start, anchor, rows, trees,
        vocab_size=vocab, most_nodes=total // entries, tree=tree,
    )  # fmt: skip

    def check() -> Errors:
        call()
        names = ["counts", "slots", "offsets", "starts", "entries", "positions"]
        pairs = [(getattr(rows, n), getattr(rag.rows, n)) for n in names + ["bits"] * tree]
        tree_names = ("ids", "parents", "depths", "used")
        return unequal(pairs + [(getattr(trees, n), getattr(rag.trees, n)) for n in tree_names])

    return Probe([call], 4 * total * 7 + 8 * total * words * tree, check)


class _Walked:
    """A step whose draws lead through ACCEPTED nodes of every tree below the root."""

    def __init__(self, bench: Bench, shape: str) -> None:
        self.rag, vocab = _rows(bench, shape), bench.model(QWEN).vocab
        self.drawn = [_draws(tree, vocab) for tree in self.rag.shapes]
        rows = self.rag.rows
        self.tokens = bench.ints([token for drawn in self.drawn for token in drawn])
        self.state = SlotState.allocate(rows.most_entries, vocab, bench.device)
        self.state.limit.fill_(ROOM)
        self.state.finished.zero_()
        most = rows.capacity // rows.most_entries
        self.walks = Walks.allocate(rows.capacity, rows.most_entries, most, bench.device)
        self.paths = [
            cut(
                tree, walk_reference(tree, drawn), drawn,
                stop_ids=(), room=ROOM - self.rag.context - 1, min_left=0,
            )
            for tree, drawn in zip(self.rag.shapes, self.drawn, strict=True)
        ]  # fmt: skip

    def walk(self) -> None:
        rag = self.rag
        walk(rag.rows, rag.trees, self.tokens, self.state, self.walks, full=False)


def _draws(tree: Tree, vocab: int) -> list[int]:
    """Tokens drawn at the nodes: along the path to the last node that is deep enough, no further.

    The last one, as its path has the widest gaps and moves the most.
    """
    depth = min(ACCEPTED, max(tree.depths))
    goal = max(node for node, d in enumerate(tree.depths) if d == depth)
    drawn = []
    for node in range(len(tree)):
        below = {t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == node}
        drawn.append(next(token for token in range(vocab) if token not in below))
    for node in tree.path(goal)[1:]:
        drawn[tree.parents[node]] = tree.tokens[node]
    return drawn


def _walk(bench: Bench, shape: str) -> Probe:
    given = _Walked(bench, shape)
    rows, most = given.rag.rows, given.walks.path.shape[1]

    def check() -> Errors:
        given.walk()
        result, path, dest = [], [], []
        for found in given.paths:
            rest = [-1] * (most - len(found.path))
            result.append([len(found.path), 0, len(found.path) - 1, most, *found.tokens, *rest])
            path.append([*found.path, *rest])
            place = {node: given.rag.context + i for i, node in enumerate(found.path)}
            dest += [place.get(node, -1) for node in range(most)]
        walks = given.walks
        got = (walks.result, walks.path, walks.row_dest)
        want = (bench.ints(result), bench.ints(path), bench.ints(dest))
        return unequal(list(zip(got, want, strict=True)))

    moved = 4 * (4 * rows.capacity + rows.most_entries * (HEADER + most))
    return Probe([given.walk], moved, check)


def _move_kv(bench: Bench, shape: str) -> Probe:
    given, m = _Walked(bench, shape), bench.model(QWEN)
    rag, layers = given.rag, bench.size(LAYERS)
    moves = [sum(node != i for i, node in enumerate(path.path)) for path in given.paths]
    moved = 8 * sum(moves) * layers * m.kv * m.dim + 4 * given.walks.path.numel()
    size = layers * 2 * rag.pages * PAGE * m.kv * m.dim * 2
    caches = [
        bench.randn(layers, 2, rag.pages, PAGE, m.kv, m.dim)
        for _ in range(min(4, bench.sets(size)))
    ]
    given.walk()
    calls = [partial(move_kv, kv, rag.rows, given.walks) for kv in caches]

    def check() -> Errors:
        wanted = caches[0].clone()
        flat, old = (kv.view(layers * 2, -1, m.kv, m.dim) for kv in (wanted, caches[0].clone()))
        places, most = rag.places, given.walks.path.shape[1]
        for entry, found in enumerate(given.paths):
            own = places[entry * most : entry * most + most]
            flat[:, own[: len(found.path)]] = old[:, own[found.path]]
        calls[0]()
        return unequal([(caches[0].view(torch.int16), wanted.view(torch.int16))])

    return Probe(calls, moved, check)


def _norm_scatter(bench: Bench, shape: str) -> Probe:
    given, hidden = _Walked(bench, shape), bench.model(QWEN).hidden
    rag, dest = given.rag, given.walks.row_dest
    given.walk()
    kept = sum(len(path.path) for path in given.paths)
    moved = 4 * kept * hidden
    sets = bench.sets(2 * rag.rows.capacity * hidden)
    xs, weight = bench.randn(sets, rag.rows.capacity, hidden), bench.randn(hidden)
    features = bench.randn(rag.pages * PAGE, hidden)
    calls = [partial(norm_scatter, x, weight, EPS, dest, rag.rows, features, PAGE) for x in xs]

    def check() -> Errors:
        normed = RMSNorm(weight.float(), EPS)(xs[0].float())
        entry = rag.rows.entries.long()
        page = rag.rows.tables[rag.rows.slots[entry].long(), dest.long() // PAGE]
        place, stays = page.long() * PAGE + dest % PAGE, dest >= 0
        calls[0]()
        return differences(features[place[stays]], normed[stays])

    return Probe(calls, moved, check, limit=relative_limit(BF16))


def _gather_rows(bench: Bench, rows: int) -> Probe:
    rows, hidden = bench.size(rows), bench.model(QWEN).hidden
    moved = 4 * rows * hidden
    sets = bench.sets(moved)
    features = bench.randn(bench.size(8192), hidden)
    indices = torch.randint(len(features), (sets, rows), device=bench.device).int()
    outs = bench.empty(sets, rows, hidden)
    calls = [partial(gather_rows, features, indices[i], rows, outs[i]) for i in range(sets)]

    def plain(i: int) -> Tensor:
        return features.index_select(0, indices[i])

    def check() -> Errors:
        calls[0]()
        return unequal([(outs[0], plain(0))])

    return Probe(calls, moved, check, torch=[partial(plain, i) for i in range(sets)])


CASES = [
    *(
        Case(name, "", shape, partial(make, shape=shape))
        for name, make, shapes in (
            ("intake", _intake, ("16", "tree 64", "tree 128", "32x16")),
            ("walk", _walk, ("16", "tree 64", "tree 128", "32x16")),
            ("move_kv", _move_kv, ("16", "tree 64", "32x16", "32xtree 64")),
            ("norm_scatter", _norm_scatter, ("16", "tree 64", "32x16", "32xtree 64")),
        )
        for shape in shapes
    ),
    *(
        Case("gather_rows", "", f"{rows}", partial(_gather_rows, rows=rows))
        for rows in (8, 64, 512)
    ),
]
