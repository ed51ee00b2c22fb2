"""Two runs of a request that differ: did rounding turn a near-tie, or is it a bug?

Up to the first difference both runs have the same tokens, so at it they computed the same thing.
Each has log-probabilities of its best tokens there. The margin is the gap between the two tokens
that were drawn, in each run; what rounding does is bounded from below by the largest change of
any value that both runs list. Within twice that a difference is a near-tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.pair import Row
from services.target.runner import Logprob


@dataclass(frozen=True)
class Difference:
    """The first difference of a request, greedy and without penalties.

    Attributes:
        at: index among the new tokens.
        first, second: the tokens of the two runs; None where a run had ended.
        margins: gap between the two tokens' log-probabilities in each run; None where a run does
            not list both.
        largest: largest change of a log-probability that both runs list.
    """

    id: str
    at: int
    first: int | None
    second: int | None
    margins: tuple[float | None, float | None]
    largest: float

    @property
    def exact(self) -> bool:
        """Whether one of the runs had a true tie, which the lower id wins."""
        return 0.0 in self.margins

    @property
    def near_tie(self) -> bool:
        """Equal values in both runs cannot give two tokens, whatever the margin."""
        return self.largest > 0 and all(
            margin is not None and margin <= 2 * self.largest for margin in self.margins
        )

    @property
    def verdict(self) -> str:
        if not self.near_tie:
            return "BUG"
        return "exact tie" if self.exact else "near-tie"

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        margins = " and ".join("unknown" if m is None else f"{m:.3g}" for m in self.margins)
        return (
            f"{self.id} at {self.at}: {self.first} or {self.second}, margins {margins}, "
            f"2 D {2 * self.largest:.3g}: {self.verdict}"
        )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference, the end of the shorter counted; None when equal."""
    if list(one) == list(other):
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def compare(one: Row, other: Row) -> Difference | None:
    """Where two runs of a request part. Raises ValueError unless both kept logprobs."""
    for row in (one, other):
        if len(row.logprobs) != len(row.tokens):
            counted = f"{len(row.logprobs)} logprobs, {len(row.tokens)} tokens"
            raise ValueError(f"{row.request.id}: {counted}")
    at = first_difference(one.tokens, other.tokens)
    if at is None:
        return None
    if at >= min(len(one.tokens), len(other.tokens)):
        # One ended where the other went on, after the same tokens: no rounding does that.
        first, second = (row.tokens[at] if at < len(row.tokens) else None for row in (one, other))
        return Difference(one.request.id, at, first, second, (None, None), 0.0)
    tokens = one.tokens[at], other.tokens[at]
    values = _values(one.logprobs[at], tokens[0]), _values(other.logprobs[at], tokens[1])
    common = values[0].keys() & values[1].keys()
    largest = max((abs(values[0][token] - values[1][token]) for token in common), default=0.0)
    margins = _margin(values[0], *tokens), _margin(values[1], *tokens)
    return Difference(one.request.id, at, *tokens, margins, largest)


def _values(logprob: Logprob, token: int) -> dict[int, float]:
    return {**dict(logprob.top), token: logprob.logprob}


def _margin(values: Mapping[int, float], first: int, second: int) -> float | None:
    if first not in values or second not in values:
        return None
    return abs(values[first] - values[second])
