"""From the logits of a step's rows to what each request commits.

A draw at a node needs only the node's own path, so a walk can draw as it goes. Greedy requests that
nothing else touches are drawn at all nodes at once, one argmax; the others level by level, all
requests of the step together, so that no token is drawn at a node that the walk does not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.target.grammar import Matcher
from services.target.runner import Finish, Logprob, SlotAdmit
from slipstream.sampling import (
    NOTHING,
    History,
    RowSampling,
    SamplingParams,
    draw_rows,
    logprobs_of,
    tree_rows,
)
from slipstream.tree import Tree, cut, walk

SCORED_ROWS = 128
"""Prompt tokens scored at once: fp64 log-probabilities of the whole vocabulary for each."""


@dataclass(slots=True)
class Sampler:
    """How one request's tokens are drawn; `history` is kept only where penalties read it.

    `matcher` stands behind the committed tokens; None without a grammar.
    """

    params: SamplingParams
    stop_ids: frozenset[int]
    min_until: int  # position from which on a stop id may be drawn
    limit: int
    logprobs: int | None
    history: History | None
    matcher: Matcher | None = None

    @classmethod
    def of(cls, admit: SlotAdmit, matcher: Matcher | None = None) -> Sampler:
        """The sampling state of a request at its admission; `matcher` has its output so far."""
        params = admit.sampling
        return cls(
            params,
            admit.stop_ids,
            len(admit.prompt_ids) + admit.min_tokens,
            admit.limit,
            admit.logprobs,
            History(admit.prompt_ids, admit.output_ids) if params.penalised else None,
            matcher,
        )

    def plain(self, position: int) -> bool:
        """Whether draws from `position` on are the largest raw logits."""
        params = self.params
        return (
            params.greedy
            and not params.penalised
            and not params.biased
            and self.matcher is None
            and position >= self.min_until
        )

    def row(
        self, position: int, path: tuple[int, ...], allowed: bytes | None = None
    ) -> RowSampling:
        """The draw that decides `position` at the end of `path`, the tokens below the anchor."""
        return RowSampling(
            self.params, position, self.history, path, self.stop_ids, self.min_until, allowed
        )

    def commit(self, tokens: Sequence[int]) -> None:
        """`tokens` are committed."""
        if self.history is not None:
            self.history.append(tokens)
        if self.matcher is not None:
            self.matcher.advance(tokens)


@dataclass(slots=True)
class Verify:
    """One request's tree in the logits: its nodes are the rows `first` .. of the step's logits.

    The anchor is at position `start`. `_path` and `_drawn` fill up as the walk goes on.
    """

    sampler: Sampler
    tree: Tree
    start: int
    first: int
    _path: list[int] = field(default_factory=lambda: [0])
    _drawn: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _matcher: Matcher | None = None  # stands where the walk stands

    def begin(self) -> None:
        """Prepares a walk that draws as it goes."""
        self._drawn = [0] * len(self.tree)
        self._matcher = self.sampler.matcher
        for node in range(len(self.tree) - 1, 0, -1):  # of equal siblings the first stays
            self._children[(self.tree.parents[node], self.tree.tokens[node])] = node

    def row(self) -> tuple[int, RowSampling]:
        """The row of the logits at which the walk stands, and how its token is drawn."""
        node = self._path[-1]
        path = tuple(self.tree.tokens[n] for n in self._path[1:])
        allowed = self._matcher.allowed().tobytes() if self._matcher is not None else None
        return self.first + node, self.sampler.row(self.start + len(self._path), path, allowed)

    def follow(self, token: int) -> bool:
        """Takes the token drawn where the walk stands; False when the walk ends there.

        A node at which nothing may be drawn is not walked to: its token is committed as the bonus
        of the node before it, and the request fails in the step that begins there.
        """
        if token == NOTHING:
            self._path.pop()
            return False
        node = self._path[-1]
        self._drawn[node] = token
        child = self._children.get((node, token))
        if child is None:
            return False
        self._path.append(child)
        if self._matcher is not None:
            if node == 0:  # the committed one stays where it is
                self._matcher = self._matcher.fork()
            self._matcher.advance((token,))
        return True

    def take(self, drawn: list[int]) -> None:
        """Takes the tokens drawn at every node."""
        self._drawn = drawn
        self._path = walk(self.tree, drawn)

    def finish(self) -> Walked:
        """What the request commits."""
        if not self._path:
            return Walked([], [], Finish.ERROR, 0)
        committed = self.start + 1
        sampler = self.sampler
        done = cut(
            self.tree,
            self._path,
            self._drawn,
            stop_ids=sampler.stop_ids,
            room=sampler.limit - committed,
            min_left=max(0, sampler.min_until - committed),
        )
        return Walked(done.path, done.tokens, Finish(done.finish), len(self._path) - 1)


@dataclass(frozen=True, slots=True)
class Walked:
    """The outcome of a walk: nodes whose rows stay, tokens committed, drafts accepted uncut."""

    path: list[int]
    tokens: list[int]
    finish: Finish
    accepted: int


def verify(logits: Tensor, requests: Sequence[Verify]) -> list[Walked]:
    """Draws and walks; `logits` is (rows, V) fp32, the requests' rows side by side in order."""
    plain = [request.sampler.plain(request.start + 1) for request in requests]
    eager = [r for r, is_plain in zip(requests, plain, strict=True) if is_plain]
    if eager:
        _draw_all(logits, eager)
    walking = [r for r, is_plain in zip(requests, plain, strict=True) if not is_plain]
    for request in walking:
        request.begin()
    while walking:
        rows, samplings = zip(*(request.row() for request in walking), strict=True)
        drawn = draw_rows(_pick(logits, rows), samplings)
        walking = [r for r, token in zip(walking, drawn, strict=True) if r.follow(token)]
    return [request.finish() for request in requests]


def _draw_all(logits: Tensor, requests: Sequence[Verify]) -> None:
    rows = [row for r in requests for row in range(r.first, r.first + len(r.tree))]
    samplings = [s for r in requests for s in tree_rows(r.tree, r.start, r.sampler.params)]
    drawn = draw_rows(_pick(logits, rows), samplings)
    taken = 0
    for request in requests:
        request.take(drawn[taken : taken + len(request.tree)])
        taken += len(request.tree)


def _pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows; all of them without a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def logprobs(logits: Tensor, request: Verify, walked: Walked) -> list[Logprob]:
    """Of the tokens that the request commits, as many as it wants; [] if none."""
    wanted = request.sampler.logprobs
    if wanted is None or not walked.tokens:
        return []
    rows = _pick(logits, [request.first + node for node in walked.path])
    return [Logprob(own, top) for own, top in logprobs_of(rows, walked.tokens, wanted)]


def prompt_logprobs(
    logits: Callable[[int, int], Tensor], tokens: Sequence[int], top: int
) -> list[Logprob]:
    """Of prompt tokens, each scored by the row before it; `tokens[i]` by row i of a chunk.

    `logits` gives those of the rows from the first number up to the second, (rows, V) fp32.
    """
    found: list[Logprob] = []
    for first in range(0, len(tokens), SCORED_ROWS):
        part = tokens[first : first + SCORED_ROWS]
        rows = logprobs_of(logits(first, first + len(part)), part, top)
        found += [Logprob(own, best) for own, best in rows]
    return found
