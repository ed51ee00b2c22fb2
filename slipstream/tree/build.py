"""One door to all builders."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.tree.arrays import Tree
from slipstream.tree.chain import build_chain
from slipstream.tree.heap import grow_best_first, grow_by_parent, top2gap_caps
from slipstream.tree.spec import TreeMode, TreeSpec


def candidates_needed(spec: TreeSpec) -> int:
    """How many of the best candidates per depth `build_tree` reads."""
    if spec.is_chain:
        return 1
    if spec.mode is TreeMode.BEST_FIRST:
        return max(1, min(spec.width, spec.budget - 1))
    return spec.width


def build_tree(
    spec: TreeSpec,
    logprobs: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    anchor: int,
    nodes: int | None = None,
    max_depth: int | None = None,
) -> Tree:
    """The tree of `spec` over one block's candidates.

    Args:
        logprobs: (depth, rank) log-probabilities over the full vocabulary, best first; a chain does
            not read them. A rank that is -inf or NaN ends its depth's candidates.
        tokens: (depth, rank) token ids, distinct within a depth.
        anchor: token of node 0.
        nodes: nodes at most, root included, where less than the spec's budget; the spine is cut
            short if it must be.
        max_depth: depths at most.
    """
    budget = spec.budget if nodes is None else min(nodes, spec.budget)
    depth_end = len(tokens) if max_depth is None else min(max_depth, len(tokens))
    if spec.is_chain:
        length = max(0, min(depth_end, budget - 1))
        return build_chain(anchor, [row[0] for row in tokens[:length]])
    lp = [_usable(row) for row in logprobs[: max(0, depth_end)]]
    if spec.mode is TreeMode.BEST_FIRST:
        return grow_best_first(lp, tokens, anchor, budget, spec.width, spec.spine)
    if spec.mode is TreeMode.ACCUM_LOGP:
        caps = [spec.width] * len(lp)
    else:
        caps = top2gap_caps(lp, spec.width, spec.beta, spec.gap0)
    return grow_by_parent(lp, tokens, anchor, budget, caps, spec.spine)


def _usable(row: Sequence[float]) -> Sequence[float]:
    """`row` up to its first -inf or NaN; rows are sorted, so the ends show whether there is one."""
    if row and row[0] == row[0] and row[-1] > -math.inf:
        return row
    length = 0
    while length < len(row) and row[length] > -math.inf:
        length += 1
    return row[:length]
