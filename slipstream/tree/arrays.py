"""The tree as flat arrays, and what its shape alone determines: ancestor bit-sets and links.

Node 0 is the anchor, the last committed token. A node's parent has a smaller index, so every pass
below is one loop over the nodes in order. A node's position is start + depth; its row, and its KV
scratch slot, is start + index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORD = 64
"""Bits of one word of an ancestor bit-set."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Token, parent index and depth of every node; the anchor has parent -1 and depth 0."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it: an ordinary causal mask fits."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def validate(self) -> None:
        """Raises ValueError naming the first node that breaks an invariant of the class."""
        if not len(self.tokens) == len(self.parents) == len(self.depths):
            lengths = (len(self.tokens), len(self.parents), len(self.depths))
            raise ValueError(f"tokens, parents and depths have different lengths: {lengths}")
        if not self.tokens:
            raise ValueError("a tree has at least its root")
        if self.parents[0] != -1 or self.depths[0] != 0:
            raise ValueError(f"node 0: parent {self.parents[0]}, depth {self.depths[0]}")
        siblings = set()
        for node in range(1, len(self.tokens)):
            token, parent = self.tokens[node], self.parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"node {node}: parent {parent} is not in [0, {node})")
            if self.depths[node] != self.depths[parent] + 1:
                raise ValueError(f"node {node}: depth {self.depths[node]} below parent {parent}")
            if (parent, token) in siblings:
                raise ValueError(f"node {node}: token {token} is already a child of {parent}")
            siblings.add((parent, token))


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For every node the set of nodes it sees within the tree, itself included: bit j is node j."""
    bits = [1]
    for node in range(1, len(parents)):
        bits.append(bits[parents[node]] | 1 << node)
    return bits


def split_words(bits: Sequence[int], words: int) -> list[list[int]]:
    """Each bit-set as `words` 64-bit words, lowest first, signed as an int64 tensor takes them."""
    half, full = 1 << (WORD - 1), 1 << WORD
    rows = []
    for value in bits:
        row = []
        for _ in range(words):
            word = value & (full - 1)
            row.append(word - full if word >= half else word)
            value >>= WORD
        if value:
            raise ValueError(f"a node index does not fit {words} words of {WORD} bits")
        rows.append(row)
    return rows


def links(tree: Tree) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, in insertion order; -1 where there is none."""
    first_child = [-1] * len(tree)
    next_sibling = [-1] * len(tree)
    last_child = [-1] * len(tree)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if first_child[parent] < 0:
            first_child[parent] = node
        else:
            next_sibling[last_child[parent]] = node
        last_child[parent] = node
    return first_child, next_sibling
