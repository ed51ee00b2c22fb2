"""OpenAI's shapes: errors, usage, models, and what a choice says.

A choice's entry in a whole answer and in a stream's chunk is made by the same code, so that the
parts of a stream join to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.chat.answer import AnswerParser, parser_of
from gateway.generation import Choice, Generation, SpeculativeStats, Usage
from gateway.logprobs import LogprobShape
from gateway.stream import Piece
from slipstream.errors import RequestError, describe

Kind = Literal["completion", "chat"]

_OBJECTS = {"completion": "text_completion", "chat": "chat.completion"}


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The one shape of every error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of `error`."""
    found = describe(error)
    param = error.param if isinstance(error, RequestError) else None
    return found.http, error_body(str(error), found.type, param, found.code)


def usage_body(usage: Usage) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def stats_body(stats: SpeculativeStats) -> dict[str, Any]:
    """The `speculative` object."""
    return {
        "steps": stats.steps,
        "tau": stats.tau,
        "accepted": stats.accepted,
        "nodes": stats.nodes,
    }


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How the answer to one request is written.

    Attributes:
        include_usage: a stream ends with the request's usage.
        logprobs, prompt_logprobs: None where the client wants none.
        token_ids: ids are told beside the text.
    """

    kind: Kind
    include_usage: bool = False
    logprobs: LogprobShape | None = None
    prompt_logprobs: LogprobShape | None = None
    token_ids: bool = False

    @property
    def plain(self) -> bool:
        """Whether a chunk says nothing but text."""
        return self.logprobs is None and not self.token_ids

    @property
    def chat(self) -> bool:
        """Whether a choice is a message."""
        return self.kind == "chat"

    def entry(
        self, choice: Choice, piece: Piece, parser: AnswerParser | None, *, streamed: bool
    ) -> dict[str, Any]:
        """What `piece` adds to the choice, or, if it is all of it, the choice.

        `parser` takes the choice's text apart; None leaves it whole.
        """
        entry: dict[str, Any] = {"index": choice.index}
        if not self.chat:
            entry["text"] = piece.text
        elif parser is not None:
            said = parser.feed(piece.text, last=piece.finish is not None)
            entry |= {"delta": said.body()} if streamed else {"message": said.message()}
        elif streamed:
            entry["delta"] = {"content": piece.text}
        else:
            entry["message"] = {"role": "assistant", "content": piece.text}
        logprobs = self.logprobs
        if logprobs is None:
            entry["logprobs"] = None
        else:
            write = logprobs.chat if self.chat else logprobs.completion
            entry["logprobs"] = write(piece.scored)
        entry["finish_reason"] = piece.finish if parser is None else parser.finish(piece.finish)
        if choice.stop is not None and piece.finish is not None:
            entry["stop_reason"] = choice.stop
        if self.token_ids:
            entry["token_ids"] = list(piece.tokens)
            if piece.first and not self.chat:
                entry["prompt_token_ids"] = list(choice.prompt.ids)
        return entry


def response_body(
    shape: AnswerShape, generation: Generation, pieces: Sequence[Piece]
) -> dict[str, Any]:
    """The whole answer, once every choice has ended; `pieces` are all of the choices, in order.

    Of several choices each carries its own `speculative`; the one of the body is for all of them.
    """
    stats, form = generation.wishes.stats, generation.wishes.form
    body: dict[str, Any] = {
        "id": generation.id,
        "object": _OBJECTS[shape.kind],
        "created": generation.created,
        "model": generation.model,
    }
    choices = []
    for choice, piece in zip(generation.choices, pieces, strict=True):
        entry = shape.entry(choice, piece, parser_of(form), streamed=False)
        if stats and len(generation.choices) > 1:
            entry["speculative"] = stats_body(choice.stats)
        if shape.prompt_logprobs is not None:
            rows = shape.prompt_logprobs.prompt(choice.prompt.ids, choice.prompt_logprobs)
            (body if shape.chat else entry)["prompt_logprobs"] = rows
        choices.append(entry)
    body |= {"choices": choices, "usage": usage_body(generation.usage())}
    if shape.token_ids and shape.chat:
        body["prompt_token_ids"] = list(generation.choices[0].prompt.ids)
    if stats:
        body["speculative"] = stats_body(generation.stats())
    return body


def model_body(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One name of the served model, and how many tokens its window holds."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "slipstream",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }
