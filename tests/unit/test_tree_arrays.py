"""Masks, words and links of the tree arrays, by the worked examples of tree verification."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.tree import Tree, ancestor_bits, build_chain, links, split_words

SEVEN = Tree([100, 11, 12, 21, 22, 23, 31], [-1, 0, 0, 1, 1, 2, 3], [0, 1, 1, 2, 2, 2, 3])


@st.composite
def trees(draw: st.DrawFn, most: int = 150) -> Tree:
    tree = Tree([0], [-1], [0])
    for node in range(1, draw(st.integers(1, most))):
        parent = draw(st.integers(0, node - 1))
        tree.tokens.append(node)
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
    return tree


def rows(parents: list[int]) -> list[str]:
    size = len(parents)
    return ["".join(str(bits >> j & 1) for j in range(size)) for bits in ancestor_bits(parents)]


def test_mask_of_seven_nodes() -> None:
    SEVEN.validate()
    assert rows(SEVEN.parents) == [
        "1000000",
        "1100000",
        "1010000",
        "1101000",
        "1100100",
        "1010010",
        "1101001",
    ]
    assert [20 + depth for depth in SEVEN.depths] == [20, 21, 21, 22, 22, 22, 23]


def test_mask_of_four_nodes() -> None:
    assert rows([-1, 0, 0, 1]) == ["1000", "1100", "1010", "1101"]


def test_links_of_seven_nodes() -> None:
    first_child, next_sibling = links(SEVEN)
    assert first_child == [1, 3, 5, 6, -1, -1, -1]
    assert next_sibling == [-1, 2, -1, 4, -1, -1, -1]


@settings(deadline=None)
@given(trees())
def test_mask_is_ancestors_and_self(tree: Tree) -> None:
    tree.validate()
    for node, bits in enumerate(ancestor_bits(tree.parents)):
        assert {j for j in range(len(tree)) if bits >> j & 1} == set(tree.path(node))


@settings(deadline=None)
@given(trees())
def test_links_list_every_child_once_in_order(tree: Tree) -> None:
    first_child, next_sibling = links(tree)
    for node in range(len(tree)):
        children, child = [], first_child[node]
        while child >= 0:
            children.append(child)
            child = next_sibling[child]
        assert children == [c for c in range(len(tree)) if tree.parents[c] == node]


@settings(deadline=None)
@given(st.lists(st.integers(0, (1 << 192) - 1), max_size=8))
def test_words_are_signed_and_hold_every_bit(bits: list[int]) -> None:
    for value, words in zip(bits, split_words(bits, 3), strict=True):
        assert all(-(1 << 63) <= word < 1 << 63 for word in words)
        assert sum((word & (1 << 64) - 1) << 64 * i for i, word in enumerate(words)) == value


def test_words_too_few() -> None:
    with pytest.raises(ValueError, match="1 words of 64 bits"):
        split_words([1 << 64], 1)


def test_path_and_chain() -> None:
    assert SEVEN.path(6) == [0, 1, 3, 6]
    assert not SEVEN.is_chain
    chain = build_chain(9, [1, 2, 3])
    chain.validate()
    assert chain.is_chain
    assert (chain.tokens, chain.parents, chain.depths) == (
        [9, 1, 2, 3],
        [-1, 0, 1, 2],
        [0, 1, 2, 3],
    )
    assert len(build_chain(9, [])) == 1


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (Tree([], [], []), "at least its root"),
        (Tree([1, 2], [-1], [0]), "different lengths"),
        (Tree([1], [0], [0]), "node 0: parent 0"),
        (Tree([1], [-1], [1]), "node 0: parent -1, depth 1"),
        (Tree([1, 2], [-1, 1], [0, 1]), "node 1: parent 1"),
        (Tree([1, 2], [-1, -1], [0, 1]), "node 1: parent -1"),
        (Tree([1, 2], [-1, 0], [0, 2]), "node 1: depth 2"),
        (Tree([1, 2, 2], [-1, 0, 0], [0, 1, 1]), "node 2: token 2 is already a child of 0"),
    ],
)
def test_validate_names_the_node(tree: Tree, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tree.validate()
