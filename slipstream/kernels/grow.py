"""Trees grown on the device, one program for each request.

`slipstream.tree.build_tree` is the reference, and every node is equal to its: sums are in fp64 and
are added in the same order, ties go to the node that was inserted first. The reference's heap is a
vector of values in registers here, whose largest is found by a reduction: a warp does that in about
the time of one memory access, and a node costs one or two of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.drafting import (
    ANCHOR,
    BEST_FIRST,
    BETA,
    BUDGET,
    CHAIN,
    COUNT,
    FIELDS,
    GAP0,
    INTS,
    MODE,
    NODES,
    OUT,
    REALS,
    ROW,
    SLOT,
    SPINE,
    TOP2GAP,
    WIDTH,
    Blocks,
    Specs,
)

NODE_CLASSES = (64, 128, 256)
"""Most nodes of a tree that a compiled kernel is made for."""

NODE_INTS = 3
"""Columns of the nodes that are written."""

_INTS = tl.constexpr(NODE_INTS)
_LATE = tl.constexpr(1 << 30)  # after every order of insertion


def grow(
    tokens: Tensor,
    logprobs: Tensor,
    found: Tensor,
    blocks: Blocks,
    specs: Specs,
    sizes: Tensor,
    nodes: Tensor,
    *,
    most_nodes: int,
    block_size: int,
) -> None:
    """Writes the tree of every block.

    The candidates of the depth below row i of a block are in row i + 1 of its rows; a tree is no
    deeper than its block has such rows, and than its number of nodes allows.

    Args:
        tokens: (R, K) int32, distinct in a row, best first; contiguous.
        logprobs: (R, K) fp32; not read for a chain.
        found: (R,) int32, candidates of each row; all of them have a finite log-probability. Not
            read for a chain, which takes the first of each row.
        blocks: with nodes at most `most_nodes`, a power of two up to 256.
        sizes: (E,) int32, receives the number of nodes of each tree.
        nodes: (N, NODE_INTS) int32 contiguous, receives token, parent and depth of each node, a
            tree's from its OUT field on. Nothing else is written.
        block_size: most rows of a block.
    """
    _grow[(blocks.fields.shape[0],)](
        tokens, logprobs, found, blocks.counts, blocks.fields, specs.ints, specs.reals,
        sizes, nodes, RANKS=tokens.shape[1], MOST=most_nodes,
        DEPTHS=triton.next_power_of_2(max(2, block_size - 1)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _grow(
    tokens, logprobs, found, counts, fields, ints, reals, sizes, nodes,
    RANKS: tl.constexpr, MOST: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    if entry >= tl.load(counts):
        return
    block = fields + entry * FIELDS
    slot = tl.load(block + SLOT)
    spec = ints + slot * INTS
    real = reals + slot * REALS
    most = tl.load(block + NODES)
    depth_end = tl.minimum(most, tl.load(block + COUNT)) - 1
    budget = tl.minimum(tl.minimum(most, tl.load(spec + BUDGET)), MOST)
    row = tl.load(block + ROW).to(tl.int64) + 1
    ids = tokens + row * RANKS
    lp = logprobs + row * RANKS
    found_at = found + row
    out = nodes + tl.load(block + OUT).to(tl.int64) * _INTS
    _add(out, 0, tl.load(block + ANCHOR), -1, 0, True)
    mode = tl.load(spec + MODE)
    width = tl.load(spec + WIDTH)
    spine = tl.load(spec + SPINE)
    if mode == CHAIN:
        size = _chain(ids, depth_end, budget, out, RANKS, DEPTHS)
    else:
        if mode == BEST_FIRST:
            size = _best_first(
                ids, lp, found_at, depth_end, budget, width, spine, out, RANKS, MOST, DEPTHS
            )
        else:
            depth = tl.arange(0, DEPTHS)
            have = tl.load(found_at + depth, mask=depth < depth_end, other=0)
            caps = tl.where(
                mode == TOP2GAP, _caps(lp, have, width, real, RANKS, DEPTHS), width + have * 0
            )
            widths = tl.minimum(caps, have)
            size = _by_parent(
                ids, lp, found_at, widths, depth_end, budget, spine, out, RANKS, MOST, DEPTHS
            )
    tl.store(sizes + entry, size)


@triton.jit
def _add(out, node, token, parent, depth, mask):
    """Writes nodes of the tree at `out`; all but `out` broadcast to the shape of `node`."""
    tl.store(out + node * _INTS, token, mask=mask)
    tl.store(out + node * _INTS + 1, parent, mask=mask)
    tl.store(out + node * _INTS + 2, depth, mask=mask)


@triton.jit
def _chain(ids, depth_end, budget, out, RANKS: tl.constexpr, DEPTHS: tl.constexpr):
    depth = tl.arange(0, DEPTHS)
    length = tl.maximum(tl.minimum(depth_end, budget - 1), 0)
    inside = depth < length
    token = tl.load(ids + depth * RANKS, mask=inside, other=0)
    _add(out, depth + 1, token, depth, depth + 1, inside)
    return length + 1


@triton.jit
def _caps(lp, have, width, real, RANKS: tl.constexpr, DEPTHS: tl.constexpr):
    """(DEPTHS,) most children by depth: `slipstream.tree.heap.top2gap_caps`."""
    depth = tl.arange(0, DEPTHS)
    first = tl.load(lp + depth * RANKS, mask=have > 1, other=0.0).to(tl.float64)
    second = tl.load(lp + depth * RANKS + 1, mask=have > 1, other=0.0).to(tl.float64)
    z = tl.load(real + BETA) * (first - second - tl.load(real + GAP0))
    z = tl.minimum(tl.maximum(z, -700.0), 700.0)
    share = width.to(tl.float64) / (1.0 + tl.exp(z))
    whole = tl.floor(share)
    rest = share - whole
    down = whole.to(tl.int32)
    up = (rest > 0.5) | ((rest == 0.5) & ((down & 1) == 1))  # half to even
    return tl.where(have > 1, tl.maximum(down + up.to(tl.int32), 1), 1)


@triton.jit
def _spine(
    ids, lp, found_at, depth_end, budget, spine, out,
    RANKS: tl.constexpr, MOST: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """Adds the rank-0 path if it is wanted; its last node and the nodes' sums, (MOST,) fp64."""
    depth = tl.arange(0, DEPTHS)
    node = tl.arange(0, MOST)
    length = tl.maximum(tl.minimum(depth_end, budget - 1), 0)
    length = tl.where(spine > 0, length, 0)
    have = tl.load(found_at + depth, mask=depth < length, other=0)
    length = tl.minimum(tl.min(tl.where(have > 0, DEPTHS, depth), 0), length)
    inside = depth < length
    token = tl.load(ids + depth * RANKS, mask=inside)
    _add(out, depth + 1, token, depth, depth + 1, inside)
    cum = tl.zeros((MOST,), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    step = 0
    while step < length:
        total += tl.load(lp + step * RANKS).to(tl.float64)
        step += 1
        cum = tl.where(node == step, total, cum)
    return length, cum


@triton.jit
def _by_parent(
    ids, lp, found_at, widths, depth_end, budget, spine, out,
    RANKS: tl.constexpr, MOST: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """`grow_by_parent`: the best node so far is given all its children."""
    lane = tl.arange(0, DEPTHS)
    node = tl.arange(0, MOST)
    last, cum = _spine(ids, lp, found_at, depth_end, budget, spine, out, RANKS, MOST, DEPTHS)
    size = last + 1
    depth = node  # so it is on the spine
    waiting = tl.where((node <= last) & (node < depth_end), cum, float("-inf"))
    best = tl.max(waiting, 0)
    while (best > float("-inf")) & (size < budget):
        key = tl.min(tl.where(waiting == best, (node << 8) | depth, _LATE), 0)
        parent = key >> 8
        above = key & 255
        first = (parent < last).to(tl.int32)  # rank 0 is on the spine already
        width = tl.sum(tl.where(lane == above, widths, 0), 0)
        more = tl.maximum(tl.minimum(width - first, budget - size), 0)
        fresh = (node >= size) & (node < size + more)
        at = above * RANKS + node - size + first
        value = best + tl.load(lp + at, mask=fresh, other=0.0).to(tl.float64)
        _add(out, node, tl.load(ids + at, mask=fresh), parent, above + 1, fresh)
        waiting = tl.where(node == parent, float("-inf"), waiting)
        waiting = tl.where(fresh & (above + 1 < depth_end), value, waiting)
        depth = tl.where(fresh, above + 1, depth)
        size += more
        best = tl.max(waiting, 0)
    return size


@triton.jit
def _best_first(
    ids, lp, found_at, depth_end, budget, width, spine, out,
    RANKS: tl.constexpr, MOST: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """`grow_best_first`: one node at a time.

    A node of the tree has at most one child waiting, the best that is not in the tree: `offer` is
    its sum, `rank` its rank, `order` when it began to wait.
    """
    node = tl.arange(0, MOST)
    last, cum = _spine(ids, lp, found_at, depth_end, budget, spine, out, RANKS, MOST, DEPTHS)
    size = last + 1
    depth = node  # so it is on the spine
    rank = tl.where(node < last, 1, 0)
    order = node
    have = tl.load(found_at + node, mask=(node <= last) & (node < depth_end), other=0)
    waits = rank < tl.minimum(have, width)
    first = tl.load(lp + node * RANKS + rank, mask=waits, other=0.0).to(tl.float64)
    offer = tl.where(waits, cum + first, float("-inf"))
    best = tl.max(offer, 0)
    while (best > float("-inf")) & (size < budget):
        parent = tl.min(tl.where(offer == best, (order << 8) | node, _LATE), 0) & 255
        chosen = node == parent
        state = tl.sum(tl.where(chosen, (rank << 8) | depth, 0), 0)
        base = tl.sum(tl.where(chosen, cum, 0.0), 0)
        above = state & 255
        taken = state >> 8
        at = above * RANKS + taken
        _add(out, size, tl.load(ids + at), parent, above + 1, True)
        # Its own first child waits from now on, and so does its next sibling.
        deep = above + 1 < depth_end
        child = deep & (tl.load(found_at + above + 1, mask=deep, other=0) > 0) & (width > 0)
        child_lp = tl.load(lp + (above + 1) * RANKS, mask=child, other=0.0).to(tl.float64)
        sibling = taken + 1 < tl.minimum(tl.load(found_at + above), width)
        sibling_lp = tl.load(lp + at + 1, mask=sibling, other=0.0).to(tl.float64)
        offer = tl.where(chosen, tl.where(sibling, base + sibling_lp, float("-inf")), offer)
        rank = tl.where(chosen, taken + 1, rank)
        order = tl.where(chosen, 2 * size + MOST + 1, order)
        fresh = node == size
        offer = tl.where(fresh, tl.where(child, best + child_lp, float("-inf")), offer)
        rank = tl.where(fresh, 0, rank)
        order = tl.where(fresh, 2 * size + MOST, order)
        depth = tl.where(fresh, above + 1, depth)
        cum = tl.where(fresh, best, cum)
        size += 1
        best = tl.max(offer, 0)
    return size
