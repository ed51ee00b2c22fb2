"""Log-probabilities in OpenAI's two shapes, and in the one that vLLM gives prompts.

A token's log-probability and its entry among the best ones are the same number, and it always has
such an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.request import TokenLogprob
from gateway.stream import Scored

_LEAST = -9999.0  # JSON has no infinity


class Names(Protocol):
    """What a vocabulary knows of single tokens."""

    def bytes_of(self, token: int) -> bytes: ...

    def name(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True)
class LogprobShape:
    """How the log-probabilities of one request are written.

    Attributes:
        top: how many of the best tokens.
        as_ids: tokens are called `token_id:` and their id.
    """

    names: Names
    top: int
    as_ids: bool = False

    def completion(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """The `logprobs` of a completion's choice."""
        scores = [None if row is None else _finite(row.logprob) for _, _, row in rows]
        return {
            "tokens": [self._name(token) for token, _, _ in rows],
            "token_logprobs": scores,
            "top_logprobs": [
                None if row is None else self._map(token, row) for token, _, row in rows
            ],
            "text_offset": [offset for _, offset, _ in rows],
        }

    def chat(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = []
        for token, _, row in rows:
            if row is None:
                continue
            entry = self._entry(token, row.logprob)
            entry["top_logprobs"] = [
                self._entry(other, value) for other, value in self._best(token, row)
            ]
            content.append(entry)
        return {"content": content, "refusal": None}

    def prompt(
        self, ids: Sequence[int], rows: Sequence[TokenLogprob]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """A prompt's own tokens, the first of which has no log-probability."""
        found: list[dict[str, dict[str, Any]] | None] = [None]
        for token, row in zip(ids[1:], rows, strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(row.top, 1)}
            best = self._best(token, row) or [(token, row.logprob)]
            found.append(
                {str(other): self._ranked(other, value, ranks.get(other)) for other, value in best}
            )
        return found

    def _ranked(self, token: int, value: float, rank: int | None) -> dict[str, Any]:
        """`rank` is only known of the best tokens."""
        known = {} if rank is None else {"rank": rank}
        return {"logprob": _finite(value), **known, "decoded_token": self.names.name(token)}

    def _best(self, token: int, row: TokenLogprob) -> list[tuple[int, float]]:
        """The best tokens, and `token` itself even where it is none of them."""
        if self.top == 0:
            return []
        best = [
            (other, row.logprob if other == token else value)
            for other, value in row.top[: self.top]
        ]
        if all(other != token for other, _ in best):
            best.append((token, row.logprob))
        return best

    def _map(self, token: int, row: TokenLogprob) -> dict[str, float]:
        own = self._name(token)
        found: dict[str, float] = {}
        for other, value in self._best(token, row):
            name = self._name(other)
            # Different tokens may read the same; the token itself keeps its name.
            if other != token and (name == own or name in found):
                name = f"token_id:{other}"
            found[name] = _finite(value)
        return found or {own: _finite(row.logprob)}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": _finite(value),
            "bytes": list(self.names.bytes_of(token)),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.names.name(token)


def prompt_rows(
    ids: Sequence[int], offsets: Sequence[int], rows: Sequence[TokenLogprob]
) -> Iterator[Scored]:
    """A prompt's tokens as rows of the answer that begins with them."""
    for token, offset, row in zip(ids, offsets, (None, *rows), strict=True):
        yield Scored(token, offset, row)


def _finite(value: float) -> float:
    return max(value, _LEAST)
