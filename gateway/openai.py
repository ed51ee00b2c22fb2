"""OpenAI's shapes: response bodies, stream chunks, errors.

A chunk differs from the one before it only in its text, so what stands around the text is made once
per choice; a chunk is then two joins and one small JSON string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import orjson

from gateway.generation import Choice, Delta, Generation, SpeculativeStats, Usage
from slipstream.errors import RequestError, describe

Kind = Literal["completion", "chat"]

DONE = b"data: [DONE]\n\n"
"""Ends every stream."""

_OBJECTS = {"completion": "text_completion", "chat": "chat.completion"}
_CHUNK_OBJECTS = {"completion": "text_completion", "chat": "chat.completion.chunk"}


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


def error_event(error: BaseException) -> bytes:
    """An error in the middle of a stream."""
    return b"data: " + orjson.dumps(describe_error(error)[1]) + b"\n\n"


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


class Frames:
    """The server-sent events of one streamed request."""

    def __init__(self, kind: Kind, generation: Generation, include_usage: bool) -> None:
        self._chat = kind == "chat"
        self._generation = generation
        self._include_usage = include_usage
        head: dict[str, Any] = {
            "id": generation.id,
            "object": _CHUNK_OBJECTS[kind],
            "created": generation.created,
            "model": generation.model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        # With usage asked for, every chunk but the last says null.
        self._tail = b'],"usage":null' if include_usage else b"]"
        around = [self._around(choice.index) for choice in generation.choices]
        self._before = [before for before, _ in around]
        self._after = around[0][1] + b'"logprobs":null,"finish_reason":'
        self._plain = self._after + b"null}" + self._tail + b"}\n\n"

    def _around(self, index: int) -> tuple[bytes, bytes]:
        start = self._head + b'{"index":%d,' % index
        if self._chat:
            return start + b'"delta":{"content":', b"},"
        return start + b'"text":', b","

    def open(self) -> bytes:
        """What comes before all text: in a chat, each choice's role."""
        if not self._chat:
            return b""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(
            self._head + b'{"index":%d,' % choice.index + role + self._tail + b"}\n\n"
            for choice in self._generation.choices
        )

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """The events of `deltas`; empty when no text became final."""
        dumps, before, plain = orjson.dumps, self._before, self._plain
        frames: list[bytes] = []
        for choice, piece in deltas:
            if piece.finish is not None:
                frames += (before[choice.index], dumps(piece.text), self._last(choice))
            elif piece.text:
                frames += (before[choice.index], dumps(piece.text), plain)
        return b"".join(frames)

    def _last(self, choice: Choice) -> bytes:
        """What follows the text of a choice's last event."""
        end = self._after + orjson.dumps(choice.finish) + b"}" + self._tail
        if self._generation.want_stats:
            end += b',"speculative":' + orjson.dumps(stats_body(choice.stats))
        return end + b"}\n\n"

    def close(self) -> bytes:
        """What comes after all text: the usage, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        generation = self._generation
        event = self._head + b'],"usage":' + orjson.dumps(usage_body(generation.usage()))
        if generation.want_stats:
            event += b',"speculative":' + orjson.dumps(stats_body(generation.stats()))
        return event + b"}\n\n" + DONE


def response_body(kind: Kind, generation: Generation, texts: Sequence[str]) -> dict[str, Any]:
    """The whole answer, once every choice has ended; `texts` are the choices' texts in order.

    Of several choices each carries its own `speculative`; the one of the body is for all of them.
    """
    choices = []
    for choice, text in zip(generation.choices, texts, strict=True):
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}}
            if kind == "chat"
            else {"text": text}
        )
        entry = {"index": choice.index, **said, "logprobs": None, "finish_reason": choice.finish}
        if generation.want_stats and len(generation.choices) > 1:
            entry["speculative"] = stats_body(choice.stats)
        choices.append(entry)
    body: dict[str, Any] = {
        "id": generation.id,
        "object": _OBJECTS[kind],
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "usage": usage_body(generation.usage()),
    }
    if generation.want_stats:
        body["speculative"] = stats_body(generation.stats())
    return body


def models_body(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """The list of models: the one that is served."""
    return {
        "object": "list",
        "data": [
            {
                "id": model,
                "object": "model",
                "created": created,
                "owned_by": "slipstream",
                "max_model_len": max_model_len,
            }
        ],
    }
