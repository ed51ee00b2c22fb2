"""The builders: worked examples, slow oracles, and what must hold for every tree."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.tree import (
    Tree,
    TreeMode,
    TreeSpec,
    build_tree,
    candidates_needed,
    resolve_spec,
)
from slipstream.tree.heap import top2gap_caps

Rows = list[list[float]]
Node = tuple[int, ...]  # ranks from the root

TOY = [[0.60, 0.25, 0.10, 0.05], [0.50, 0.40, 0.06, 0.04], [0.90, 0.05, 0.03, 0.02]]
TOY_LP = [[math.log(p) for p in row] for row in TOY]
TOY_IDS = [[10 * depth + rank for rank in range(4)] for depth in range(3)]


def ranks(tree: Tree) -> list[Node]:
    """The rank path of every node; tokens are 10 * depth + rank."""
    return [tuple(tree.tokens[n] % 10 for n in tree.path(node)[1:]) for node in range(len(tree))]


def mass(nodes: list[Node], probabilities: Rows) -> float:
    """Sum over nodes, root apart, of the product of probabilities along the path."""
    return sum(math.prod(probabilities[d][r] for d, r in enumerate(node)) for node in nodes if node)


def toy(mode: TreeMode, width: int, budget: int, spine: bool, **more: float) -> Tree:
    return build_tree(
        TreeSpec(mode, width, budget, spine=spine, **more), TOY_LP, TOY_IDS, anchor=99
    )


@pytest.mark.parametrize(
    ("mode", "width", "budget", "spine", "parents", "last_ranks", "total", "depth"),
    [
        ("chain", 1, 4, True, [-1, 0, 1, 2], "000", 1.170, 3),
        ("top2gap", 4, 4, False, [-1, 0, 0, 1], "010", 1.150, 2),
        ("top2gap", 4, 4, True, [-1, 0, 1, 2], "000", 1.170, 3),
        ("top2gap", 4, 6, False, [-1, 0, 0, 1, 1, 1], "01012", 1.426, 2),
        ("top2gap", 4, 6, True, [-1, 0, 1, 2, 0, 1], "00011", 1.660, 3),
        ("accum_logp", 2, 6, False, [-1, 0, 0, 1, 1, 3], "01010", 1.660, 3),
        ("top2gap", 4, 8, False, [-1, 0, 0, 1, 1, 1, 3, 2], "0101200", 1.821, 3),
    ],
)
def test_worked_comparison(
    mode: str,
    width: int,
    budget: int,
    spine: bool,
    parents: list[int],
    last_ranks: str,
    total: float,
    depth: int,
) -> None:
    tree = toy(TreeMode(mode), width, budget, spine)
    tree.validate()
    assert tree.parents == parents
    assert "".join(str(node[-1]) for node in ranks(tree)[1:]) == last_ranks
    assert mass(ranks(tree), TOY) == pytest.approx(total, abs=6e-4)
    assert max(tree.depths) == depth


def test_worked_best_first() -> None:
    seven = ranks(toy(TreeMode.BEST_FIRST, 7, 8, False))
    assert seven == [(), (0,), (0, 0), (0, 0, 0), (1,), (0, 1), (0, 1, 0), (1, 0)]
    assert mass(seven, TOY) == pytest.approx(2.001, abs=6e-4)
    five = ranks(toy(TreeMode.BEST_FIRST, 5, 6, False))
    assert five == seven[:6]
    assert mass(five, TOY) == pytest.approx(1.660, abs=6e-4)


def test_best_first_may_leave_the_chain_unless_told() -> None:
    lp = [[math.log(p) for p in (0.30, 0.28, 0.22, 0.20)]] * 3
    free = build_tree(TreeSpec(TreeMode.BEST_FIRST, 3, 4, spine=False), lp, TOY_IDS, 99)
    assert ranks(free) == [(), (0,), (1,), (2,)]
    forced = build_tree(TreeSpec(TreeMode.BEST_FIRST, 3, 4, spine=True), lp, TOY_IDS, 99)
    assert ranks(forced) == [(), (0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("width", "beta", "gap0", "caps"),
    [
        (4, 1, 1, [3, 2, 2, 1, 1, 1]),
        (8, 1, 1, [6, 5, 4, 2, 1, 1]),
        (8, 2, 1, [7, 6, 4, 1, 1, 1]),
        (8, 2, 0.5, [6, 4, 2, 1, 1, 1]),
        (7, 2, 1, [6, 5, 4, 1, 1, 1]),
    ],
)
def test_worked_caps(width: int, beta: float, gap0: float, caps: list[int]) -> None:
    lp = [[-0.1, -0.1 - gap] for gap in (0, 0.5, 1, 2, 3, 5)]
    exact = [[0.0, -gap] for gap in (0, 0.5, 1, 2, 3, 5)]
    assert top2gap_caps(exact, width, beta, gap0) == caps
    assert top2gap_caps(lp, width, beta, gap0) == caps


def test_toy_caps_and_their_limits() -> None:
    assert top2gap_caps(TOY_LP, 4, 1, 1) == [2, 3, 1]
    assert top2gap_caps(TOY_LP, 4, 1, 1e9) == [4, 4, 4]
    assert top2gap_caps(TOY_LP, 4, 0, 1) == [2, 2, 2]
    assert top2gap_caps([[0.0, -1e30]], 4, 1e3, 1) == [1]
    assert top2gap_caps([[0.0], []], 4, 1, 1) == [1, 1]


@st.composite
def marginals(draw: st.DrawFn, depths: int = 6, most: int = 6) -> tuple[Rows, list[list[int]]]:
    """Sorted log-probabilities of distinct tokens, with many ties; ids are 10 * depth + rank."""
    value = st.sampled_from([0.0, 0.5, 1.0, 3.0]) | st.floats(0, 8)
    rows = []
    for _ in range(draw(st.integers(1, depths))):
        logits = sorted(draw(st.lists(value, min_size=2, max_size=most)), reverse=True)
        total = math.log(sum(map(math.exp, logits)) + draw(st.sampled_from([0.0, 1.0])))
        rows.append([x - total for x in logits])
    return rows, [[10 * d + r for r in range(len(row))] for d, row in enumerate(rows)]


SPECS = st.builds(
    TreeSpec,
    st.sampled_from(list(TreeMode)),
    st.integers(1, 8),
    st.integers(1, 40),
    beta=st.sampled_from([0.5, 1.0, 2.0]),
    gap0=st.sampled_from([0.5, 1.0, 4.0]),
    spine=st.booleans(),
)


@settings(deadline=None)
@given(marginals(), SPECS, st.integers(1, 50), st.integers(0, 8))
def test_every_tree(
    candidates: tuple[Rows, list[list[int]]], spec: TreeSpec, nodes: int, max_depth: int
) -> None:
    lp, ids = candidates
    tree = build_tree(spec, lp, ids, 99, nodes=nodes, max_depth=max_depth)
    tree.validate()
    assert tree.tokens[0] == 99
    assert len(tree) <= min(spec.budget, nodes)
    assert max(tree.depths) <= min(max_depth, len(lp))
    assert all(token in ids[d - 1] for token, d in zip(tree.tokens, tree.depths, strict=True) if d)
    if spec.spine or spec.is_chain:
        spine = min(spec.budget, nodes, min(max_depth, len(lp)) + 1)
        assert ranks(tree)[:spine] == [(0,) * d for d in range(spine)]
    if spec.is_chain:
        assert tree.is_chain
    children = [tree.parents.count(node) for node in range(len(tree))]
    assert max(children) <= spec.width


@settings(deadline=None)
@given(marginals(), SPECS)
def test_a_tree_uses_its_budget(candidates: tuple[Rows, list[list[int]]], spec: TreeSpec) -> None:
    lp, ids = candidates
    tree = build_tree(spec, lp, ids, 99)
    if spec.mode in (TreeMode.ACCUM_LOGP, TreeMode.BEST_FIRST) and not spec.is_chain:
        full, level = 1, 1
        for row in lp:
            level *= min(spec.width, len(row))
            full += level
        assert len(tree) == min(spec.budget, full)


@settings(deadline=None)
@given(marginals(), SPECS, st.integers(1, 39))
def test_fewer_nodes_are_a_smaller_budget(
    candidates: tuple[Rows, list[list[int]]], spec: TreeSpec, nodes: int
) -> None:
    lp, ids = candidates
    small = TreeSpec(
        spec.mode, spec.width, min(nodes, spec.budget), spec.beta, spec.gap0, spec.spine
    )
    assert build_tree(spec, lp, ids, 99, nodes=nodes) == build_tree(small, lp, ids, 99)


def slow_by_parent(lp: Rows, caps: list[int], budget: int, spine: bool) -> list[Node]:
    """Pop the likeliest unexpanded node, the earliest of equals; give it all its children."""
    nodes: list[tuple[Node, float]] = [((), 0.0)]
    if spine:
        while len(nodes) < budget and len(nodes) <= len(lp):
            above, cum = nodes[-1]
            nodes.append(((*above, 0), cum + lp[len(above)][0]))
    on_spine = {node for node, _ in nodes[:-1]}
    expanded: set[Node] = set()
    while len(nodes) < budget:
        open_nodes = [n for n in nodes if n[0] not in expanded and len(n[0]) < len(lp)]
        if not open_nodes:
            break
        node, cum = max(open_nodes, key=lambda n: n[1])  # max keeps the first of equals
        expanded.add(node)
        depth = len(node)
        for rank in range(node in on_spine, min(caps[depth], len(lp[depth]))):
            if len(nodes) < budget:
                nodes.append(((*node, rank), cum + lp[depth][rank]))
    return [node for node, _ in nodes]


@settings(deadline=None)
@given(marginals(), st.integers(2, 6), st.integers(2, 30), st.booleans(), st.booleans())
def test_by_parent_order(
    candidates: tuple[Rows, list[list[int]]], width: int, budget: int, spine: bool, capped: bool
) -> None:
    lp, ids = candidates
    mode = TreeMode.TOP2GAP if capped else TreeMode.ACCUM_LOGP
    caps = top2gap_caps(lp, width, 1.0, 1.0) if capped else [width] * len(lp)
    tree = build_tree(TreeSpec(mode, width, budget, spine=spine), lp, ids, 99)
    assert ranks(tree) == slow_by_parent(lp, caps, budget, spine)


def prefix_closed_sets(lp: Rows, base: list[Node], size: int) -> Iterator[list[Node]]:
    """Every prefix-closed set of `size` nodes that holds `base`."""

    def children(node: Node) -> list[Node]:
        depth = len(node)
        return [(*node, r) for r in range(len(lp[depth]))] if depth < len(lp) else []

    def grow(chosen: list[Node], frontier: list[Node]) -> Iterator[list[Node]]:
        if len(chosen) == size:
            yield chosen
            return
        for i, node in enumerate(frontier):  # later picks only from behind: each set once
            yield from grow([*chosen, node], frontier[i + 1 :] + children(node))

    frontier = [c for node in base for c in children(node) if c not in base]
    yield from grow(base, frontier)


@settings(deadline=None, max_examples=40)
@given(marginals(depths=3, most=3), st.integers(2, 6), st.booleans())
def test_best_first_is_the_optimum(
    candidates: tuple[Rows, list[list[int]]], budget: int, spine: bool
) -> None:
    lp, ids = candidates
    probabilities = [[math.exp(x) for x in row] for row in lp]
    tree = build_tree(TreeSpec(TreeMode.BEST_FIRST, 3, budget, spine=spine), lp, ids, 99)
    base: list[Node] = [()]
    if spine:
        base = [(0,) * d for d in range(min(len(lp), budget - 1) + 1)]
    best = max(
        (mass(nodes, probabilities) for nodes in prefix_closed_sets(lp, base, len(tree))),
        default=mass(base, probabilities),
    )
    assert set(base) <= set(ranks(tree))
    assert mass(ranks(tree), probabilities) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("mode", [TreeMode.TOP2GAP, TreeMode.ACCUM_LOGP, TreeMode.BEST_FIRST])
@pytest.mark.parametrize("spine", [True, False])
def test_impossible_candidates_are_dropped(mode: TreeMode, bad: float, spine: bool) -> None:
    lp = [[-0.1, -3.0, bad, bad], [-0.7, bad], [-0.2, -2.0]]
    ids = [[0, 1, 2, 3], [10, 11], [20, 21]]
    spec = TreeSpec(mode, 4, 30, gap0=9.0, spine=spine)
    tree = build_tree(spec, lp, ids, 99)
    tree.validate()
    assert set(tree.tokens) == {99, 0, 1, 10, 20, 21}
    ended = build_tree(spec, [lp[0], [bad, bad], lp[2]], ids, 99)
    ended.validate()
    assert set(ended.tokens) == {99, 0, 1}


def test_edges() -> None:
    for mode in TreeMode:
        spec = TreeSpec(mode, 1 if mode is TreeMode.CHAIN else 4, 6)
        root = Tree([99], [-1], [0])
        assert build_tree(spec, TOY_LP, TOY_IDS, 99, nodes=1) == root
        assert build_tree(spec, TOY_LP, TOY_IDS, 99, max_depth=0) == root
        assert build_tree(spec, [], [], 99) == root
    star = build_tree(TreeSpec(TreeMode.BEST_FIRST, 5, 6), TOY_LP[:1], TOY_IDS[:1], 99)
    assert star.parents == [-1, 0, 0, 0, 0]


def test_width_one_runs_no_tree_code() -> None:
    def fail(*_: object) -> None:
        raise AssertionError("tree code ran")

    names = ("grow_by_parent", "grow_best_first", "top2gap_caps")
    with mock.patch.multiple("slipstream.tree.build", **dict.fromkeys(names, fail)):
        for mode in TreeMode:
            spec = TreeSpec(mode, 1, 4)
            assert candidates_needed(spec) == 1
            tree = build_tree(spec, [], TOY_IDS, 99)
            assert tree.tokens == [99, 0, 10, 20]


def test_candidates_needed() -> None:
    assert candidates_needed(TreeSpec(TreeMode.TOP2GAP, 7, 64)) == 7
    assert candidates_needed(TreeSpec(TreeMode.ACCUM_LOGP, 4, 3)) == 4
    assert candidates_needed(resolve_spec("best_first", budget=32, block_size=16)) == 31
    assert candidates_needed(resolve_spec("best_first", 4, 32, block_size=16)) == 4


@pytest.mark.parametrize("mode", [TreeMode.TOP2GAP, TreeMode.ACCUM_LOGP, TreeMode.BEST_FIRST])
def test_a_wide_tree_takes_well_under_a_millisecond(mode: TreeMode) -> None:
    lp = [[-0.3 - 0.05 * d - 1.1 * r for r in range(7)] for d in range(15)]
    ids = [[10 * d + r for r in range(7)] for d in range(15)]
    spec = TreeSpec(mode, 7, 64)
    best = math.inf
    for _ in range(20):
        started = time.perf_counter()
        tree = build_tree(spec, lp, ids, 99)
        best = min(best, time.perf_counter() - started)
    assert len(tree) == 64
    assert best < 0.5e-3


def test_trees_and_parameters_import_no_torch() -> None:
    code = "import sys, slipstream.tree, slipstream.params; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
