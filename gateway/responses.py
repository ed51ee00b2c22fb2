"""The two ways an answer leaves over HTTP, both plain ASGI: whole, or as server-sent events.

The endpoint's status is known only when the first piece, or an error, is there; so a stream's
headers wait for it, and an early error is a proper HTTP error. While an answer is made the
connection is watched: a client that leaves ends its request at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.frames import DONE, Frames, error_event
from gateway.generation import Generation
from gateway.metrics import FrontMetrics
from gateway.openai import AnswerShape, describe_error, response_body
from gateway.stream import Piece, joined
from slipstream.errors import Draining, PeerLost, QueueFull, SlipstreamError

CLIENT_CLOSED = 499
"""Status under which a request counts whose client left."""

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class JSONAnswer(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes `content`."""
        return orjson.dumps(content)


def error_answer(error: BaseException) -> JSONAnswer:
    """`error` as OpenAI's error body, with Retry-After where trying again makes sense."""
    status, body = describe_error(error)
    headers: Mapping[str, str] = {}
    if isinstance(error, QueueFull):
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    elif isinstance(error, Draining | PeerLost):
        headers = {"retry-after": "1"}
    return JSONAnswer(body, status, dict(headers))


class GenerationAnswer(Response):
    """A request's answer, whole or streamed.

    Counts the request under its final status, and cancels what still runs when it is left.
    """

    def __init__(
        self,
        shape: AnswerShape,
        generation: Generation,
        metrics: FrontMetrics,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._shape = shape
        self._generation = generation
        self._metrics = metrics
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless the client leaves first."""
        status = CLIENT_CLOSED
        with self._generation as generation:
            watch = asyncio.create_task(_watch(receive, generation.cancel))
            try:
                if self._stream:
                    status = await self._send_stream(scope, receive, send)
                else:
                    status = await self._send_whole(scope, receive, send)
            finally:
                watch.cancel()
                self._metrics.requests.add(1, self._shape.kind, str(status))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> int:
        generation = self._generation
        pieces: list[list[Piece]] = [[] for _ in generation.choices]
        try:
            while deltas := await generation.next():
                for choice, piece in deltas:
                    pieces[choice.index].append(piece)
        except SlipstreamError as error:
            answer = error_answer(error)
        else:
            if not generation.finished:
                return CLIENT_CLOSED
            whole = [joined(parts) for parts in pieces]
            answer = JSONAnswer(response_body(self._shape, generation, whole))
        await answer(scope, receive, send)
        return answer.status_code

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        generation = self._generation
        try:
            deltas = await generation.next()
        except SlipstreamError as error:
            answer = error_answer(error)
            await answer(scope, receive, send)
            return answer.status_code
        if not deltas:
            return CLIENT_CLOSED
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        frames = Frames(self._shape, generation)
        encode, wait = frames.encode, generation.next
        body, status = frames.open(), 200
        try:
            while deltas:
                body += encode(deltas)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = b""
                deltas = await wait()
            if not generation.finished:
                return CLIENT_CLOSED
            body = frames.close()
        except SlipstreamError as error:
            status, _ = describe_error(error)
            body = error_event(error) + DONE
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return status


async def _watch(receive: Receive, leave: Callable[[], None]) -> None:
    """Calls `leave` when the client's connection ends."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
