"""Trees grown by the kernel equal those of the reference builders, node for node."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from slipstream.kernels.drafting import BLOCK_INTS, SPEC_INTS, SPEC_REALS, Blocks, Specs, spec_row
from slipstream.kernels.grow import NODE_INTS, grow
from slipstream.tree import Tree, TreeMode, TreeSpec, build_tree, candidates_needed

RANKS = 32
STEP = 16  # requests of one launch
SPARE = 8  # values past the last tree, which must stay as they were


@dataclass(frozen=True, slots=True)
class Case:
    """One request: its candidates by depth, as many as the block has rows after the anchor's."""

    spec: TreeSpec
    logprobs: list[list[float]]
    tokens: list[list[int]]
    anchor: int
    nodes: int

    @property
    def rows(self) -> int:
        return len(self.tokens) + 1

    @property
    def needed(self) -> int:
        return min(RANKS, candidates_needed(self.spec))

    def reference(self) -> Tree:
        lp = [row[: self.needed] for row in self.logprobs]
        depths = min(self.nodes, self.rows) - 1
        return build_tree(self.spec, lp, self.tokens, self.anchor, self.nodes, depths)


def run(
    cases: list[Case], device: torch.device, most_nodes: int, block: int, ranks: int = RANKS
) -> list[Tree]:
    """Every case's tree, from one launch over poisoned buffers."""
    entries, slots = len(cases) + 2, len(cases) + 3  # some programs have nothing to do
    rows = sum(case.rows for case in cases)
    tokens = torch.full((rows + 3, ranks), -7, dtype=torch.int32)
    logprobs = torch.full((rows + 3, ranks), math.nan)
    found = torch.full((rows + 3,), -7, dtype=torch.int32)
    fields = torch.full((entries, BLOCK_INTS), -7, dtype=torch.int32)
    ints = torch.full((slots, SPEC_INTS), -7, dtype=torch.int32)
    reals = torch.full((slots, SPEC_REALS), math.nan, dtype=torch.float64)
    row = out = 0
    for index, case in enumerate(cases):
        slot = slots - 1 - index
        spec_ints, spec_reals = spec_row(case.spec, looked_at=case.needed, noisy=False)
        ints[slot], reals[slot] = torch.tensor(spec_ints), torch.tensor(spec_reals).double()
        values = [slot, 40, case.anchor, case.nodes, case.rows, row, out, 0]
        fields[index] = torch.tensor(values)
        for depth, (lp, ids) in enumerate(zip(case.logprobs, case.tokens, strict=True)):
            at = row + 1 + depth
            tokens[at, : len(ids)] = torch.tensor(ids)
            logprobs[at, : len(lp)] = torch.tensor(lp)
            usable = [i for i, x in enumerate(lp[: case.needed]) if not x > -math.inf]
            found[at] = usable[0] if usable else min(len(lp), case.needed)
        row += case.rows
        out += case.nodes
    counts = torch.tensor([len(cases), rows], dtype=torch.int32)
    sizes = torch.full((entries,), -7, dtype=torch.int32, device=device)
    nodes = torch.full((out + SPARE, NODE_INTS), -7, dtype=torch.int32, device=device)
    grow(
        tokens.to(device),
        logprobs.to(device),
        found.to(device),
        Blocks(counts.to(device), fields.to(device)),
        Specs(ints.to(device), reals.to(device)),
        sizes,
        nodes,
        most_nodes=most_nodes,
        block_size=block,
    )
    trees, at, got, listed = [], 0, sizes.tolist(), nodes.tolist()
    assert got[len(cases) :] == [-7] * (entries - len(cases))
    for case, size in zip(cases, got, strict=False):
        part = listed[at : at + size]
        assert listed[at + size : at + case.nodes] == [[-7] * NODE_INTS] * (case.nodes - size)
        trees.append(Tree(*([node[i] for node in part] for i in range(NODE_INTS))))
        at += case.nodes
    assert listed[at:] == [[-7] * NODE_INTS] * SPARE
    return trees


def check(cases: list[Case], device: torch.device, most_nodes: int, block: int) -> None:
    for case, tree in zip(cases, run(cases, device, most_nodes, block), strict=True):
        assert tree == case.reference(), case


def random_case(rng: random.Random, most_nodes: int, block: int) -> Case:
    mode = rng.choice([m for m in TreeMode if m is not TreeMode.CHAIN] * 3 + [TreeMode.CHAIN])
    spec = TreeSpec(
        mode,
        1 if mode is TreeMode.CHAIN else rng.choice([1, 2, 3, 4, 4, 7, 8, 31, 32]),
        rng.choice([2, 5, 16, most_nodes, most_nodes, rng.randint(2, most_nodes)]),
        beta=rng.choice([0.0, 0.5, 1.0, 2.0]),
        gap0=rng.choice([0.0, 0.5, 1.0, 4.0]),
        spine=rng.random() < 0.5,
    )
    step = rng.choice([None, None, 0.25, 0.5, 1.0])  # quantised: ties
    rows, ids = [], []
    for depth in range(rng.randint(1, block) - 1 or 1):
        scale = rng.choice([0.5, 2.0, 6.0])
        values = sorted((-rng.expovariate(1 / scale) for _ in range(RANKS)), reverse=True)
        if step is not None:
            values = [math.floor(x / step) * step for x in values]
        values = torch.tensor(values).tolist()  # fp32
        if rng.random() < 0.15:
            first = rng.randint(0, RANKS - 1)
            values[first:] = [rng.choice([-math.inf, math.nan])] * (RANKS - first)
        rows.append(values)
        ids.append([1000 * (depth + 1) + i for i in rng.sample(range(1000), RANKS)])
    nodes = rng.choice([spec.budget, spec.budget, rng.randint(2, spec.budget)])
    return Case(spec, rows, ids, rng.randrange(1000), nodes)


@pytest.mark.parametrize("most_nodes", [64, 128, 256])
def test_random_trees(most_nodes: int, device: torch.device, cases: int) -> None:
    rng = random.Random(most_nodes)
    for _ in range(max(1, cases // 2 // STEP)):
        check([random_case(rng, most_nodes, 16) for _ in range(STEP)], device, most_nodes, 16)


@pytest.mark.parametrize("block", [2, 3, 33, 256])
def test_other_block_sizes(block: int, device: torch.device) -> None:
    rng = random.Random(block)
    check([random_case(rng, 256, block) for _ in range(6)], device, 256, block)


@pytest.mark.parametrize("mode", ["accum_logp", "top2gap", "best_first"])
@pytest.mark.parametrize("spine", [False, True])
def test_everything_ties(mode: str, spine: bool, device: torch.device) -> None:
    spec = TreeSpec(TreeMode(mode), 7, 64, beta=0.0, spine=spine)
    ids = [[100 * depth + rank for rank in range(RANKS)] for depth in range(15)]
    flat = [[-2.0] * RANKS] * 15
    free = [[0.0] * RANKS] * 15  # a child is worth what its parent is
    check([Case(spec, flat, ids, 5, 64), Case(spec, free, ids, 5, 64)], device, 64, 16)


def test_caps_round_half_to_even(device: torch.device) -> None:
    """At gap0 half of the width is kept: 0.5, 1.5, 2.5, 3.5 ... of odd ones."""
    ids = [[100 * depth + rank for rank in range(RANKS)] for depth in range(3)]
    lp = [[-1.0 - rank for rank in range(RANKS)]] * 3
    cases = [
        Case(TreeSpec(TreeMode.TOP2GAP, width, 64, spine=False), lp, ids, 5, 64)
        for width in (2, 3, 5, 7, 9, 11)
    ]
    check(cases, device, 64, 4)


def test_depths_that_have_no_candidates(device: torch.device) -> None:
    ids = [[100 * depth + rank for rank in range(RANKS)] for depth in range(4)]
    good, none = [-0.25 - rank for rank in range(RANKS)], [math.nan] * RANKS
    cases = [
        Case(
            TreeSpec(mode, 4, 32, spine=spine), [*[good] * depth, none, *[good] * 3][:4], ids, 5, 32
        )
        for mode in (TreeMode.ACCUM_LOGP, TreeMode.TOP2GAP, TreeMode.BEST_FIRST)
        for spine in (False, True)
        for depth in (0, 1, 3)
    ]
    check(cases, device, 64, 5)
