"""The nouns of the gateway's core: what a client asks for, what it gets, and the request between.

Tokens only: text lives above this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from slipstream.errors import ContextTooLong, GrammarDeadEnd, InvalidRequest, SlipstreamError
from slipstream.grammar import Grammar
from slipstream.tree import TreeSpec

Finish = Literal["none", "stop", "length", "error", "cancelled"]

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a connected cell serves. Without a draft `block_size` is 1 and there is no `tree`.

    `tree` is what drafting is limited to; `grammars`: whether answers may be bound to a grammar.
    """

    model: str
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    dtype: str
    slots: int
    pages: int
    page_size: int
    block_size: int = 1
    tree: TreeSpec | None = None
    grammars: bool = False


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """One choice of one request; n choices are n of these with their own `choice`.

    Attributes:
        max_tokens: output tokens at most; the model's window may end the answer earlier. 0 draws
            nothing.
        min_tokens: output tokens before which no stop id is drawn.
        stop_ids: tokens that end the answer, the model's end tokens among them unless ignored.
        top_k: 0 is off; `top_p` 1 and `min_p` 0 are off.
        banned_ids: tokens that are never drawn.
        seed: None draws 64 random bits.
        logprobs: None for none, 0 for the drawn token's own, k for the k best beside it.
        prompt_logprobs: the same of prompt tokens.
        grammar: what the answer may be; None: anything.
        grammar_param: the client's field that says so.
        draft: False plans one node per step.
        width, budget: the request's own tree, within the cell's; None: as the cell has it.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    seed: int | None = None
    choice: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    grammar_param: str = "grammar"
    draft: bool = True
    width: int | None = None
    budget: int | None = None

    def validate(self, info: ModelInfo) -> None:
        """Raises InvalidRequest or ContextTooLong naming the field that cannot be served."""
        self._validate_tokens(info)
        if info.tree is not None:
            self.tree(info.tree, info.block_size)
        if self.grammar is not None and not info.grammars:
            raise no_grammars(self.grammar_param)
        if self.grammar is not None and self.min_tokens > 0:
            raise InvalidRequest(
                f"min_tokens must be 0 where a grammar says when the answer ends, got"
                f" {self.min_tokens}",
                "min_tokens",
            )
        for name, value, fits, wanted in (
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("presence_penalty", self.presence_penalty, True, "finite"),
            ("frequency_penalty", self.frequency_penalty, True, "finite"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
            ("seed", self.seed or 0, 0 <= (self.seed or 0) < 1 << 64, "in [0, 2^64)"),
            ("n", self.choice, 0 <= self.choice < 1 << 32, "in [0, 2^32)"),
            ("logprobs", self.logprobs or 0, 0 <= (self.logprobs or 0) <= MAX_LOGPROBS,
             f"in [0, {MAX_LOGPROBS}]"),
            ("prompt_logprobs", self.prompt_logprobs or 0,
             0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
        ):  # fmt: skip
            if not (math.isfinite(value) and fits):
                raise InvalidRequest(f"{name} must be {wanted}, got {value}", name)

    def _validate_tokens(self, info: ModelInfo) -> None:
        length = len(self.prompt_ids)
        if length == 0:
            raise InvalidRequest("the prompt is empty", "prompt")
        if self.max_tokens < 0:
            raise InvalidRequest(
                f"max_tokens must be at least 0, got {self.max_tokens}", "max_tokens"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be in [0, {self.max_tokens}], got {self.min_tokens}", "min_tokens"
            )
        if length + min(self.max_tokens, 1) > info.max_model_len:
            raise too_long(info.max_model_len, str(length))
        for name, ids in (
            ("prompt", self.prompt_ids),
            ("stop_token_ids", self.stop_ids),
            ("logit_bias", self.logit_bias),
            ("bad_words", self.banned_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise InvalidRequest(f"{name}: token {bad} is not in [0, {info.vocab_size})", name)
        if any(not math.isfinite(value) for value in self.logit_bias.values()):
            raise InvalidRequest("logit_bias: a value is not finite", "logit_bias")

    def dead_end(self, length: int) -> SlipstreamError:
        """Why nothing can follow the first `length` tokens of an answer that a grammar binds."""
        bans = " and bad_words does not ban" if self.banned_ids else ""
        return GrammarDeadEnd(
            f"{self.grammar_param}: after {length} tokens of the answer the model has no token that"
            f" it allows{bans}",
            self.grammar_param,
        )

    def refusal(self, reason: str) -> SlipstreamError:
        """What the target's `reason` to refuse the request is for the client."""
        problem = reason.removeprefix("grammar: ")
        if self.grammar is None or problem == reason:
            return InvalidRequest(reason)
        return InvalidRequest(f"{self.grammar_param}: {problem}", self.grammar_param)

    @property
    def own_tree(self) -> bool:
        """Whether the request asks for a tree of its own."""
        return self.width is not None or self.budget is not None

    def tree(self, cell: TreeSpec, block_size: int) -> TreeSpec:
        """How the request's trees are built where `cell` is what the cell builds.

        Raises InvalidRequest naming the field: beyond the cell's, or too few nodes for its mode.
        """
        if not self.own_tree:
            return cell
        width, budget = self.width or cell.width, self.budget or cell.budget
        for name, value, most in (("width", width, cell.width), ("budget", budget, cell.budget)):
            if value > most:
                raise InvalidRequest(
                    f"speculative.{name} must be at most the server's {most}, got {value}",
                    f"speculative.{name}",
                )
        if self.budget is None and width == 1:
            budget = min(budget, block_size)
        wanted = replace(cell, width=width, budget=budget)
        try:
            return TreeSpec.from_proto(wanted.to_proto(), block_size)
        except InvalidRequest as error:
            name = f"speculative.{error.param}"
            raise InvalidRequest(f"speculative.{error}", name) from error


def too_long(window: int, length: str) -> ContextTooLong:
    """The error for a prompt that leaves no room for an answer; `length` says how many tokens."""
    # Clients match on "maximum context length is N tokens".
    return ContextTooLong(
        f"this model's maximum context length is {window} tokens, but the prompt has {length} and"
        " the window must also hold an answer",
        "prompt",
    )


def no_grammars(param: str) -> InvalidRequest:
    """The error where the field `param` needs a grammar and the target takes none."""
    return InvalidRequest(f"{param}: the model's server matches no grammars", param)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and the best tokens (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step gave one request.

    Attributes:
        tokens: new output tokens; the token that ended the answer is among them.
        logprobs: one per token where wanted, else None.
        prompt_logprobs: where wanted, of the prompt tokens that follow those of earlier chunks,
            from the prompt's second on.
        finish: "none" while the request runs; any other value makes this its last chunk.
        error: why, when `finish` is "error".
        nodes: rows verified, root included; 0 when this was no verify step.
        accepted: draft nodes on the walked path, before any cut.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish = "none"
    error: SlipstreamError | None = None
    nodes: int = 0
    accepted: int = 0


Deliver = Callable[[Sequence[tuple[int, Chunk]]], None]
"""Takes (request id, chunk) pairs, once per step, on the scheduler's thread; must not block."""


@dataclass(slots=True, eq=False)
class Request:
    """A request from submission to its last chunk; only the scheduler's thread changes it.

    `id` grows with arrival and is the order of the queue. `output` holds the tokens delivered, so
    prompt + output + seed is all that a preemption or a recovery needs. `scored` counts the prompt
    log-probabilities delivered.
    """

    id: int
    params: GenerateParams
    seed: int
    output: list[int] = field(default_factory=list)
    scored: int = 0
    ended: bool = False

    @property
    def committed(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.params.prompt_ids) + len(self.output)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to come."""
        params = self.params
        return params.prompt_logprobs is not None and self.scored < len(params.prompt_ids) - 1

    def limit(self, max_model_len: int) -> int:
        """Committed tokens at which the request ends."""
        return min(len(self.params.prompt_ids) + self.params.max_tokens, max_model_len)
