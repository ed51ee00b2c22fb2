"""Builders that choose among candidates by cumulative log-probability.

All of them read, per depth d, the same candidates for every parent at that depth (the marginals of
one masked block): lp[d][r] and tokens[d][r] for rank r, best first. `cum` of a node is the sum of
lp along its path; the surrogate probability that the target takes the whole path is q = exp(cum).
Ties go to the node that was inserted first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from slipstream.tree.arrays import Tree

Rows = Sequence[Sequence[float]]
Ids = Sequence[Sequence[int]]


class _Growing:
    """A tree under construction, with the cumulative log-probability of each node."""

    __slots__ = ("cum", "depths", "lp", "parents", "tokens", "ids")

    def __init__(self, lp: Rows, ids: Ids, anchor: int) -> None:
        self.lp, self.ids = lp, ids
        self.tokens, self.parents, self.depths, self.cum = [anchor], [-1], [0], [0.0]

    def add(self, parent: int, rank: int) -> int:
        depth = self.depths[parent]
        self.tokens.append(self.ids[depth][rank])
        self.parents.append(parent)
        self.depths.append(depth + 1)
        self.cum.append(self.cum[parent] + self.lp[depth][rank])
        return len(self.tokens) - 1

    def add_spine(self, budget: int) -> int:
        """Adds the rank-0 path as far as depth and budget allow; returns its last node."""
        last = 0
        for depth in range(min(len(self.lp), budget - 1)):
            if not self.lp[depth]:
                break
            last = self.add(last, 0)
        return last

    def finish(self) -> Tree:
        return Tree(self.tokens, self.parents, self.depths)


def top2gap_caps(lp: Rows, width: int, beta: float, gap0: float) -> list[int]:
    """Most children of a node, by its depth: max(1, round(width * sigmoid(-beta * (gap - gap0)))).

    gap is the log-probability of rank 0 minus that of rank 1; round is Python's (half to even). A
    depth with fewer than two candidates has cap 1.
    """
    caps = []
    for row in lp:
        if len(row) < 2:
            caps.append(1)
            continue
        z = beta * (row[0] - row[1] - gap0)
        z = max(-700.0, min(700.0, z))
        caps.append(max(1, round(width / (1.0 + math.exp(z)))))
    return caps


def grow_by_parent(
    lp: Rows, ids: Ids, anchor: int, budget: int, caps: Sequence[int], spine: bool
) -> Tree:
    """Takes the best node so far and adds all its children, best rank first.

    This is accum_logp, and with `caps` per depth from `top2gap_caps` it is top2gap.

    With `spine` the rank-0 path goes in first, so that greedy acceptance is never shorter than the
    chain's; its nodes then go on from rank 1, the last of them from rank 0.
    """
    tree = _Growing(lp, ids, anchor)
    last = tree.add_spine(budget) if spine else 0
    widths = [min(cap, len(row)) for cap, row in zip(caps, lp, strict=True)]
    depth_end = len(lp)
    heap = [(-cum, node) for node, cum in enumerate(tree.cum) if tree.depths[node] < depth_end]
    heapq.heapify(heap)
    size = len(tree.tokens)
    while heap and size < budget:
        parent = heapq.heappop(heap)[1]
        depth = tree.depths[parent]
        for rank in range(1 if parent < last else 0, widths[depth]):
            if size >= budget:
                break
            node = tree.add(parent, rank)
            size += 1
            if depth + 1 < depth_end:
                heapq.heappush(heap, (-tree.cum[node], node))
    return tree.finish()


def grow_best_first(lp: Rows, ids: Ids, anchor: int, budget: int, width: int, spine: bool) -> Tree:
    """Adds one node at a time, always the one of largest q: DDTree's order.

    The result has the largest possible sum of q among prefix-closed sets of its size (with `spine`:
    among those that hold the rank-0 path), and so has each of its beginnings past the spine.
    """
    tree = _Growing(lp, ids, anchor)
    last = tree.add_spine(budget) if spine else 0
    widths = [min(width, len(row)) for row in lp]
    depth_end = len(lp)
    # Entries: (-cum, order of insertion, parent, rank) of nodes whose parent and better siblings
    # are in the tree.
    heap: list[tuple[float, int, int, int]] = []
    order = 0

    def offer(parent: int, rank: int) -> None:
        nonlocal order
        depth = tree.depths[parent]
        if depth < depth_end and rank < widths[depth]:
            heapq.heappush(heap, (-(tree.cum[parent] + lp[depth][rank]), order, parent, rank))
            order += 1

    for node in range(last):
        offer(node, 1)
    offer(last, 0)
    while heap and len(tree.tokens) < budget:
        _, _, parent, rank = heapq.heappop(heap)
        node = tree.add(parent, rank)
        offer(node, 0)
        offer(parent, rank + 1)
    return tree.finish()
