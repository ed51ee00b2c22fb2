"""How a request's tokens are drawn: its sampling parameters, and what each row adds to them.

Free of torch, so that a gateway can check what a client sent by the target's own rules.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slipstream.errors import InvalidRequest
from slipstream.tree.arrays import Tree
from slipstream.v1 import common_pb2 as pb

GREEDY_BELOW = 1e-5
"""Temperatures below this are read as 0: the noise would not reach the last bit of a logit."""

MAX_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    The pipeline works in fp32 and reads each number as the nearest fp32, as the wire carries it.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: tokens kept; 0 is off.
        min_p: smallest probability kept, as a share of the largest; 0 is off.
        presence_penalty: subtracted once from the logit of every token in the output.
        frequency_penalty: subtracted per occurrence in the output.
        repetition_penalty: divides (positive) or multiplies the logits of tokens in prompt or
            output; 1 is off.
        logit_bias: added to the logits of these token ids.
        seed: 64-bit key of the noise.
        choice: index among the request's n; a word of the noise counter.
        banned_ids: token ids that are never drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    choice: int = 0
    banned_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether some tokens may not be drawn because others are likelier."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def biased(self) -> bool:
        """Whether some logits are changed whatever the tokens so far."""
        return bool(self.logit_bias) or bool(self.banned_ids)

    @property
    def min_p_depth(self) -> float:
        """How far, in nats, the scaled logit of a token kept by min_p may be below the best."""
        return -math.log(max(fp32(self.min_p), 2.0**-149))

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first bad field and its value."""
        for name, ok, rule in self._rules(vocab_size):
            if not ok:
                raise InvalidRequest(f"{name} must be {rule}, got {getattr(self, name)}", name)

    def _rules(self, vocab_size: int) -> Iterator[tuple[str, bool, str]]:
        finite = math.isfinite
        yield "temperature", finite(self.temperature) and self.temperature >= 0, "0 or more"
        yield "top_p", 0 < self.top_p <= 1, "above 0 and at most 1"
        yield "top_k", 0 <= self.top_k < 1 << 32, "0 (off) or the number of tokens kept"
        yield "min_p", 0 <= self.min_p <= 1, "between 0 and 1"
        for name in ("presence_penalty", "frequency_penalty"):
            limit = f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}"
            yield name, abs(getattr(self, name)) <= MAX_PENALTY, limit
        repetition = self.repetition_penalty
        yield "repetition_penalty", finite(repetition) and repetition > 0, "a number above 0"
        yield (
            "logit_bias",
            all(
                0 <= token < vocab_size and abs(bias) <= MAX_BIAS
                for token, bias in self.logit_bias.items()
            ),
            f"from -{MAX_BIAS:g} to {MAX_BIAS:g} for ids in [0, {vocab_size})",
        )
        yield "seed", 0 <= self.seed < 1 << 64, "an unsigned 64-bit number"
        yield "choice", 0 <= self.choice < 1 << 32, "an unsigned 32-bit number"
        banned = self.banned_ids
        yield (
            "banned_ids",
            all(0 <= token < vocab_size for token in banned) and len(banned) < vocab_size,
            f"ids in [0, {vocab_size}), and not all of them",
        )

    def to_proto(self) -> pb.Sampling:
        return pb.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            seed=self.seed,
            choice=self.choice,
            banned_ids=sorted(self.banned_ids),
        )

    @classmethod
    def from_proto(cls, message: pb.Sampling) -> SamplingParams:
        """Unset top_p and repetition_penalty, 0 on the wire, are off; nothing else is checked."""
        return cls(
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=message.top_k,
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
            logit_bias=dict(message.logit_bias),
            seed=message.seed,
            choice=message.choice,
            banned_ids=frozenset(message.banned_ids),
        )


def fp32(value: float) -> float:
    """The nearest number that fp32 has."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


class History:
    """A request's committed tokens as penalties count them, the anchor among the output.

    Attributes:
        prompt: distinct tokens of the prompt.
        output: occurrences of each token in the output.
    """

    __slots__ = ("output", "prompt")

    def __init__(self, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> None:
        self.prompt = frozenset(prompt)
        self.output = Counter(output)

    def append(self, tokens: Iterable[int]) -> None:
        """Counts newly committed output tokens."""
        self.output.update(tokens)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token of one row (a node) is drawn.

    Attributes:
        position: the position that the draw decides: start + depth + 1.
        history: the request's committed tokens; None counts as empty. Read, never written.
        path: tokens of the node's path below the anchor, its own included.
        banned: ids that may not be drawn while position < banned_until (stop ids below min_tokens:
            banned_until = prompt length + min_tokens).
        allowed: bitmap of the ids that the request's grammar allows here, bit v % 8 of byte v // 8;
            None without a grammar.
    """

    params: SamplingParams
    position: int
    history: History | None = None
    path: tuple[int, ...] = ()
    banned: Collection[int] = ()
    banned_until: int = 0
    allowed: bytes | None = None


def tree_rows(
    tree: Tree,
    start: int,
    params: SamplingParams,
    history: History | None = None,
    banned: Collection[int] = (),
    banned_until: int = 0,
) -> list[RowSampling]:
    """One RowSampling per node of `tree`, whose anchor is at position `start`."""
    paths: list[tuple[int, ...]] = [()] * len(tree)
    if params.penalised:
        for node in range(1, len(tree)):
            paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    return [
        RowSampling(params, start + depth + 1, history, path, banned, banned_until)
        for depth, path in zip(tree.depths, paths, strict=True)
    ]
