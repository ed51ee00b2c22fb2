"""What a peer wrote is input: any arrays become a valid tree; a torn one costs acceptance only."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.tree.arrays import Tree


def repair(
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    nodes: int,
    vocab_size: int,
    anchor: int,
) -> Tree:
    """The valid part of a proposed tree, in its order.

    Node 0 becomes the true `anchor`. A wrong count (none, more than `nodes`, or arrays of two
    lengths) leaves the root alone. A node whose token is outside [0, vocab_size), whose parent is
    not an earlier node that stays, or whose token an earlier child of the same parent has, is
    dropped, and so is all below it. Depths are computed anew.
    """
    tree = Tree([anchor], [-1], [0])
    if len(tokens) != len(parents) or not 1 <= len(tokens) <= nodes:
        return tree
    kept = {0: 0}  # index in the proposal -> index in the tree
    children: set[tuple[int, int]] = set()
    for node in range(1, len(tokens)):
        token, parent = tokens[node], kept.get(parents[node], -1)
        if parent < 0 or not 0 <= token < vocab_size or (parent, token) in children:
            continue
        children.add((parent, token))
        kept[node] = len(tree)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
    return tree
