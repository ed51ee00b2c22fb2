"""The linear path: the best token of every depth, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.tree.arrays import Tree


def build_chain(anchor: int, drafts: Sequence[int]) -> Tree:
    """The chain `anchor`, `drafts[0]`, `drafts[1]`, ...: len(drafts) + 1 nodes."""
    length = len(drafts) + 1
    return Tree([anchor, *drafts], list(range(-1, length - 1)), list(range(length)))
