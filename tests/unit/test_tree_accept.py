"""Walking a tree, cutting the walk, and repairing what a peer sent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.tree import Tree, build_chain, cut, repair, walk

SEVEN = Tree([100, 11, 12, 21, 22, 23, 31], [-1, 0, 0, 1, 1, 2, 3], [0, 1, 1, 2, 2, 2, 3])
NO_STOP = {"stop_ids": frozenset[int](), "room": 100, "min_left": 0}


def test_greedy_chain_step() -> None:
    chain = build_chain(10, [5, 7, 9, 4])
    drawn = [5, 7, 8, 99, 42]
    result = cut(chain, walk(chain, drawn), drawn, **NO_STOP)
    assert (result.path, result.tokens, result.finish) == ([0, 1, 2], [5, 7, 8], "none")


def test_whole_chain_accepted() -> None:
    chain = build_chain(10, [5, 7])
    assert walk(chain, [5, 7, 8]) == [0, 1, 2]


def test_seven_node_tree() -> None:
    drawn = [11, 22, 0, 0, 77, 0, 0]
    path = walk(SEVEN, drawn)
    assert path == [0, 1, 4]
    assert cut(SEVEN, path, drawn, **NO_STOP).tokens == [11, 22, 77]


def test_four_node_tree() -> None:
    tree = Tree([4, 5, 6, 7], [-1, 0, 0, 1], [0, 1, 1, 2])
    drawn = [5, 7, 99, 42]
    assert walk(tree, drawn) == [0, 1, 3]
    assert cut(tree, [0, 1, 3], drawn, **NO_STOP).tokens[-1] == 42


def test_first_of_equal_siblings_is_followed() -> None:
    tree = Tree([4, 5, 5, 7, 8], [-1, 0, 0, 1, 2], [0, 1, 1, 2, 2])
    assert walk(tree, [5, 7, 8, 99, 42]) == [0, 1, 3]


@pytest.mark.parametrize(
    ("stop_ids", "room", "min_left", "tokens", "finish"),
    [
        ({8}, 9, 0, [5, 7, 8], "stop"),
        ({7}, 9, 0, [5, 7], "stop"),
        ({5}, 9, 0, [5], "stop"),
        ({5, 7}, 9, 1, [5, 7], "stop"),  # below min_tokens a stop id is a token like others
        ({5}, 9, 1, [5, 7, 8], "none"),
        (set(), 3, 0, [5, 7, 8], "limit"),
        (set(), 2, 0, [5, 7], "limit"),
        ({8}, 3, 0, [5, 7, 8], "stop"),  # a stop wins over the limit reached with it
        ({8}, 2, 0, [5, 7], "limit"),  # a stop beyond the room was never emitted
        ({7}, 1, 0, [5], "limit"),
        ({5}, 0, 0, [], "limit"),
        ({5}, -3, 0, [], "limit"),
    ],
)
def test_cut(stop_ids: set[int], room: int, min_left: int, tokens: list[int], finish: str) -> None:
    chain = build_chain(10, [5, 7, 9, 4])
    drawn = [5, 7, 8, 99, 42]
    result = cut(chain, [0, 1, 2], drawn, stop_ids=stop_ids, room=room, min_left=min_left)
    assert (result.tokens, result.finish) == (tokens, finish)
    assert result.path == [0, 1, 2][: len(tokens)]


def test_cut_wants_one_draw_per_node() -> None:
    with pytest.raises(ValueError, match="2 drawn tokens for 3 nodes"):
        cut(build_chain(1, [2, 3]), [0], [1, 2], **NO_STOP)


@st.composite
def proposals(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Nearly right trees, so that much survives: few tokens, parents around the valid range."""
    size = draw(st.integers(0, 20))
    tokens = draw(st.lists(st.integers(-1, 5), min_size=size, max_size=size))
    parents = [draw(st.integers(-2, max(0, node))) for node in range(size)]
    return tokens, parents


@settings(deadline=None)
@given(proposals(), st.integers(1, 20), st.data())
def test_walk_and_cut_of_any_repaired_tree(
    proposal: tuple[list[int], list[int]], nodes: int, data: st.DataObject
) -> None:
    tree = repair(*proposal, nodes=nodes, vocab_size=5, anchor=3)
    drawn = data.draw(st.lists(st.integers(0, 4), min_size=len(tree), max_size=len(tree)))
    path = walk(tree, drawn)
    assert all(tree.parents[b] == a for a, b in zip(path, path[1:], strict=False))
    assert all(tree.tokens[b] == drawn[a] for a, b in zip(path, path[1:], strict=False))
    last = path[-1]
    assert not any(
        tree.parents[c] == last and tree.tokens[c] == drawn[last] for c in range(len(tree))
    )
    stop_ids = data.draw(st.sets(st.integers(0, 4), max_size=2))
    room, min_left = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3))
    result = cut(tree, path, drawn, stop_ids=stop_ids, room=room, min_left=min_left)
    assert len(result.tokens) == len(result.path) <= room
    assert result.tokens == [drawn[node] for node in path][: len(result.tokens)]
    inner = result.tokens[:-1] if result.finish == "stop" else result.tokens
    assert not any(t in stop_ids for i, t in enumerate(inner) if i >= min_left)
    if result.finish == "none":
        assert len(result.tokens) == len(path) < room
    if result.finish == "limit":
        assert len(result.tokens) == room


def slow_repair(
    tokens: list[int], parents: list[int], nodes: int, vocab_size: int, anchor: int
) -> list[tuple[int, ...]]:
    """Paths (as token tuples) of what should be kept, node by node."""
    if len(tokens) != len(parents) or not 1 <= len(tokens) <= nodes:
        return [(anchor,)]
    paths: dict[int, tuple[int, ...]] = {0: (anchor,)}
    for node in range(1, len(tokens)):
        above = paths.get(parents[node]) if parents[node] < node else None
        if above is None or not 0 <= tokens[node] < vocab_size:
            continue
        path = (*above, tokens[node])
        if path not in paths.values():
            paths[node] = path
    return list(paths.values())


@settings(deadline=None)
@given(proposals(), st.integers(1, 20))
def test_repair_keeps_exactly_the_valid_nodes(
    proposal: tuple[list[int], list[int]], nodes: int
) -> None:
    tokens, parents = proposal
    tree = repair(tokens, parents, nodes=nodes, vocab_size=5, anchor=3)
    tree.validate()
    paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    assert paths == slow_repair(tokens, parents, nodes, 5, 3)


ANY = st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-3, 30), max_size=40)


@settings(deadline=None)
@given(ANY, ANY, st.integers(1, 40))
def test_repair_of_anything_is_a_valid_tree(
    tokens: list[int], parents: list[int], nodes: int
) -> None:
    tree = repair(tokens, parents, nodes=nodes, vocab_size=20, anchor=19)
    tree.validate()
    assert tree.tokens[0] == 19
    assert 1 <= len(tree) <= nodes
    assert all(0 <= token < 20 for token in tree.tokens)


@settings(deadline=None)
@given(proposals())
def test_repair_leaves_its_own_output_alone(proposal: tuple[list[int], list[int]]) -> None:
    once = repair(*proposal, nodes=20, vocab_size=5, anchor=3)
    assert repair(once.tokens, once.parents, nodes=20, vocab_size=5, anchor=3) == once


def test_repair_drops_a_bad_node_with_its_subtree() -> None:
    tree = repair([1, 2, 99, 3, 4], [-1, 0, 0, 2, 1], nodes=5, vocab_size=50, anchor=7)
    assert (tree.tokens, tree.parents, tree.depths) == ([7, 2, 4], [-1, 0, 1], [0, 1, 2])


def test_repair_of_a_wrong_count_is_the_root() -> None:
    root = Tree([7], [-1], [0])
    assert repair([1, 2, 3], [-1, 0, 1], nodes=2, vocab_size=9, anchor=7) == root
    assert repair([1, 2], [-1], nodes=5, vocab_size=9, anchor=7) == root
    assert repair([], [], nodes=5, vocab_size=9, anchor=7) == root
