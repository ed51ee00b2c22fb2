"""`slipstream.tree.repair` as device functions, on all nodes of a proposal at once.

What makes a node valid by itself (its token, its parent's index, no earlier equal sibling) is asked
of all nodes together; a node stays when it and all its ancestors are valid, which doubling the
length of the parents' jumps answers in log2(nodes) rounds, as it does depths and ancestor sets.

That no earlier equal sibling is there can be asked before it is known which nodes stay: of equal
siblings the first stays if their parent does, and if it does not, none of them does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _valid_nodes(
    tokens, parents, base, count, VOCAB: tl.constexpr, N: tl.constexpr, T: tl.constexpr
):
    """Nodes valid by themselves: (N,) bool; and their parents, 0 where they are not valid."""
    node = tl.arange(0, N)
    given = (node > 0) & (node < count)
    token = tl.load(tokens + base + node, mask=given, other=-1)
    parent = tl.load(parents + base + node, mask=given, other=-1)
    valid = given & (token >= 0) & (token < VOCAB) & (parent >= 0) & (parent < node)
    twin = tl.zeros((N,), tl.int32)
    first = count * 0
    while first < count:
        other = first + tl.arange(0, T)
        there = (other > 0) & (other < count)
        other_token = tl.load(tokens + base + other, mask=there, other=-1)
        other_parent = tl.load(parents + base + other, mask=there, other=-1)
        # An earlier node with the same parent and token: valid but for a parent behind itself.
        there = there & (other_parent < other)
        same = (token[:, None] == other_token[None, :]) & (parent[:, None] == other_parent[None, :])
        same = same & there[None, :] & (other[None, :] < node[:, None])
        twin = twin | tl.max(same.to(tl.int32), axis=1)
        first += T
    valid = valid & (twin == 0)
    return valid, tl.where(valid, parent, 0), token


@triton.jit
def keep_tree(
    tokens,
    parents,
    base,
    count,
    VOCAB: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Per node of a proposal: token, kept (int32), new index, new parent, depth, old parent."""
    node = tl.arange(0, N)
    valid, jump, token = _valid_nodes(tokens, parents, base, count, VOCAB, N, T)
    parent = jump
    # `kept` covers the ancestors within 2^round of a node; the root's jump stays where it is.
    kept = ((node == 0) | valid).to(tl.int32)
    depth = (node > 0).to(tl.int32)
    for _ in tl.static_range(ROUNDS):
        kept = kept & tl.gather(kept, jump, 0)
        depth = depth + tl.gather(depth, jump, 0)
        jump = tl.gather(jump, jump, 0)
    index = tl.cumsum(kept, 0) - 1
    return token, kept, index, tl.gather(index, parent, 0), depth, parent


@triton.jit
def store_bits(
    bits,
    row,
    node,
    kept,
    index,
    parent,
    padding,
    N: tl.constexpr,
    W: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Ancestor sets in new indices, and the padding rows' own bits."""
    for w in tl.static_range(W):
        one = tl.full(index.shape, 1, tl.int64)
        zero = tl.full(index.shape, 0, tl.int64)
        mine = (kept > 0) & (index >> 6 == w)
        word = tl.where(mine, one << (index & 63).to(tl.int64), zero)
        if w * 64 < N:  # no node reaches the words behind
            jump = parent
            for _ in tl.static_range(ROUNDS):
                word = word | tl.gather(word, jump, 0)
                jump = tl.gather(jump, jump, 0)
        tl.store(bits + (row + index).to(tl.int64) * W + w, word, mask=kept > 0)
        alone = tl.where(node >> 6 == w, one << (node & 63).to(tl.int64), zero)
        tl.store(bits + (row + node).to(tl.int64) * W + w, alone, mask=padding)


@triton.jit
def keep_chain(tokens, parents, base, count, VOCAB: tl.constexpr, N: tl.constexpr):
    """`keep_tree` for a chain: the nodes up to the first that is bad or not the next one."""
    node = tl.arange(0, N)
    given = (node > 0) & (node < count)
    token = tl.load(tokens + base + node, mask=given, other=-1)
    parent = tl.load(parents + base + node, mask=given, other=-1)
    good = (node == 0) | (given & (token >= 0) & (token < VOCAB) & (parent == node - 1))
    end = tl.min(tl.where(good, N, node), 0)
    return token, (node < end).to(tl.int32)
