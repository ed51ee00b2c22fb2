"""Server-sent events of a streamed answer.

A chunk mostly differs from the one before it only in its text, so what stands around the text is
made once per choice; such a chunk is then two joins and one small JSON string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.chat.answer import parser_of
from gateway.generation import Choice, Delta, Generation
from gateway.openai import AnswerShape, describe_error, stats_body, usage_body

DONE = b"data: [DONE]\n\n"
"""Ends every stream."""

_OBJECTS = {"completion": "text_completion", "chat": "chat.completion.chunk"}


def error_event(error: BaseException) -> bytes:
    """An error in the middle of a stream."""
    return b"data: " + orjson.dumps(describe_error(error)[1]) + b"\n\n"


class Frames:
    """The server-sent events of one streamed request."""

    def __init__(self, shape: AnswerShape, generation: Generation) -> None:
        self._shape = shape
        self._generation = generation
        head: dict[str, Any] = {
            "id": generation.id,
            "object": _OBJECTS[shape.kind],
            "created": generation.created,
            "model": generation.model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        # With usage asked for, every chunk but the last says null.
        self._tail = b'],"usage":null' if shape.include_usage else b"]"
        around = [self._around(choice.index) for choice in generation.choices]
        self._before = [before for before, _ in around]
        self._after = around[0][1] + b'"logprobs":null,"finish_reason":'
        self._plain = self._after + b"null}" + self._tail + b"}\n\n"
        self._parsers = [parser_of(generation.wishes.form) for _ in generation.choices]
        plain = shape.plain and generation.wishes.form.plain
        self.encode = self._encode_plain if plain else self._encode_rich

    def _around(self, index: int) -> tuple[bytes, bytes]:
        start = self._head + b'{"index":%d,' % index
        if self._shape.chat:
            return start + b'"delta":{"content":', b"},"
        return start + b'"text":', b","

    def open(self) -> bytes:
        """What comes before all text: in a chat, each choice's role."""
        if not self._shape.chat:
            return b""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        end = self._tail
        choices = self._generation.choices
        if self._shape.token_ids:
            end += b',"prompt_token_ids":' + orjson.dumps(list(choices[0].prompt.ids))
        return b"".join(
            self._head + b'{"index":%d,' % choice.index + role + end + b"}\n\n"
            for choice in choices
        )

    def _encode_plain(self, deltas: Sequence[Delta]) -> bytes:
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
        end = self._after + orjson.dumps(choice.finish)
        if choice.stop is not None:
            end += b',"stop_reason":' + orjson.dumps(choice.stop)
        return end + b"}" + self._tail + self._stats(choice) + b"}\n\n"

    def _encode_rich(self, deltas: Sequence[Delta]) -> bytes:
        """The events of `deltas`, each with all that its tokens are to say."""
        frames: list[bytes] = []
        for choice, piece in deltas:
            parser = self._parsers[choice.index]
            entry = self._shape.entry(choice, piece, parser, streamed=True)
            if self._shape.plain and piece.finish is None and not entry["delta"]:
                continue  # nothing is certain yet
            end = self._stats(choice) if piece.finish is not None else b""
            frames += (self._head, orjson.dumps(entry), self._tail, end, b"}\n\n")
        return b"".join(frames)

    def _stats(self, choice: Choice) -> bytes:
        if not self._generation.wishes.stats:
            return b""
        return b',"speculative":' + orjson.dumps(stats_body(choice.stats))

    def close(self) -> bytes:
        """What comes after all text: the usage, if it was asked for, and the end mark."""
        if not self._shape.include_usage:
            return DONE
        generation = self._generation
        event = self._head + b'],"usage":' + orjson.dumps(usage_body(generation.usage()))
        if generation.wishes.stats:
            event += b',"speculative":' + orjson.dumps(stats_body(generation.stats()))
        return event + b"}\n\n" + DONE
