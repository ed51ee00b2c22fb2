"""From the tokens drawn at every node to what is committed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.tree.arrays import Tree

Finish = Literal["none", "stop", "limit"]


@dataclass(frozen=True, slots=True)
class Walk:
    """What one step commits.

    Attributes:
        path: nodes whose rows stay, root first; the rows of path[i] belong to position start + i.
        tokens: tokens that become committed, as many as `path`; the last is the next anchor.
        finish: "stop": the last token ends the answer; "limit": no room is left; else "none".
    """

    path: list[int]
    tokens: list[int]
    finish: Finish


def walk(tree: Tree, drawn: Sequence[int]) -> list[int]:
    """The nodes that the draws lead through, from the root on.

    Each node of the path has the token drawn at the node before it; `drawn` has one token per node.
    The token drawn at the last of them is the bonus. Of equal siblings the first is followed.
    """
    path = [0]
    current, wanted = 0, drawn[0]
    for node in range(1, len(tree)):
        if tree.parents[node] == current and tree.tokens[node] == wanted:
            current, wanted = node, drawn[node]
            path.append(node)
    return path


def cut(
    tree: Tree,
    path: Sequence[int],
    drawn: Sequence[int],
    *,
    stop_ids: Collection[int],
    room: int,
    min_left: int,
) -> Walk:
    """Ends a walk after its first stop id or where its room is used up; a stop wins over the limit.

    Args:
        path: what `walk` returned; at least the root.
        drawn: the token drawn at every node of `tree`.
        room: tokens the request may still commit.
        min_left: tokens to be committed before a stop id counts.
    """
    if len(drawn) != len(tree):
        raise ValueError(f"{len(drawn)} drawn tokens for {len(tree)} nodes")
    tokens = [drawn[node] for node in path[: max(0, room)]]
    finish: Finish = "limit" if len(tokens) >= room else "none"
    for index, token in enumerate(tokens):
        if index >= min_left and token in stop_ids:
            finish = "stop"
            del tokens[index + 1 :]
            break
    return Walk(list(path[: len(tokens)]), tokens, finish)
