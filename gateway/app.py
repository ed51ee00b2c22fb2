"""The REST door: OpenAI's paths, health, readiness, metrics, and one shape for every error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.documents import body_of, documented
from gateway.generation import Generation
from gateway.openai import Kind, error_body, model_body
from gateway.reference import page
from gateway.responses import CLIENT_CLOSED, GenerationAnswer, JSONAnswer, error_answer
from gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    TokenizeChatBody,
    tokenize_body,
    unknown_fields,
    validate,
)
from gateway.service import Service
from slipstream import __version__
from slipstream.errors import InvalidRequest, SlipstreamError
from slipstream.metrics import CONTENT_TYPE, render

MAX_BODY = 8 << 20
"""Most bytes of a request body; the longest windows need about 1 MiB of text."""

MAX_DRAINED = 64 << 20
"""Most that is read of a body that is refused: many clients read no answer before all is sent."""

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

_SHORT = 1 << 16  # bytes of a body that is read on the event loop

B = TypeVar("B", bound=GenerateBody)
M = TypeVar("M", bound=BaseModel)


def create_app(service: Service, metrics: CollectorRegistry) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(
        title="Slipstream",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(WithoutSlash)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokens(app, service)

    @app.get("/health")
    async def health() -> Response:
        """The process lives."""
        return JSONAnswer({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Requests are taken: the model is connected and the server is not shutting down."""
        service.info()
        return JSONAnswer({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        """This program's version."""
        return JSONAnswer({"version": __version__})

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(render(metrics), headers={"content-type": CONTENT_TYPE})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Every path and field, for people."""
        return HTMLResponse(page(app.openapi()))

    _add_errors(app)
    app.openapi = documented(app)  # type: ignore[method-assign]
    return app


class WithoutSlash:
    """Takes a path with a slash at its end for the one without; a redirect would lose the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path != "/":
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answer(
        request: Request,
        kind: Kind,
        schema: type[B],
        start: Callable[[B], Awaitable[Generation]],
    ) -> Response:
        count = service.metrics.requests.add
        try:
            body = await _body(request, lambda _: schema, service)
            generation = await start(body)
        except ClientDisconnect:
            count(1, kind, str(CLIENT_CLOSED))
            return Response(status_code=CLIENT_CLOSED)
        except SlipstreamError as error:
            refusal = error_answer(error)
            count(1, kind, str(refusal.status_code))
            return refusal
        except Exception as error:
            status = error.status_code if isinstance(error, HTTPException) else 500
            count(1, kind, str(status))
            raise
        shape = service.shape(kind, body)
        return GenerationAnswer(shape, generation, service.metrics, stream=body.stream)

    @app.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continues a text, or token ids."""
        return await answer(request, "completion", CompletionBody, service.completion)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def chat(request: Request) -> Response:
        """Answers a conversation."""
        return await answer(request, "chat", ChatBody, service.chat)


def _add_models(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def body(name: str) -> dict[str, Any]:
        return model_body(name, started, service.info().max_model_len)

    @app.get("/v1/models")
    async def models() -> Response:
        """The served model, under each of its names."""
        return JSONAnswer({"object": "list", "data": [body(name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model by its name."""
        return JSONAnswer(body(service.named(name)))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=body_of(TokenizeBody, TokenizeChatBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a conversation as the chat template writes it."""
        body = await _body(request, tokenize_body, service)
        return JSONAnswer(await service.tokenize(body))

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens as they are written."""
        body = await _body(request, lambda _: DetokenizeBody, service)
        return JSONAnswer(await service.detokenize(body))


async def _body(request: Request, schema: Callable[[object], type[M]], service: Service) -> M:
    """The request's body, of the schema that its JSON asks for.

    A long one is read beside the event loop, which answers others meanwhile. Raises InvalidRequest,
    or HTTPException 413 for a body too large.
    """
    raw = await _read(request)

    def read() -> tuple[M, list[str]]:
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"body: not valid JSON: {error}") from error
        wanted = schema(data)
        return validate(wanted, data), list(unknown_fields(wanted, data))

    body, unknown = read() if len(raw) <= _SHORT else await asyncio.to_thread(read)
    service.ignored(unknown)
    return body


async def _read(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_DRAINED:
            break
        if size <= MAX_BODY:
            parts.append(part)
    if size > MAX_BODY:
        raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
    return b"".join(parts)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = error_body(
            message, "invalid_request_error", None, _HTTP_CODES.get(error.status_code)
        )
        return JSONAnswer(body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(SlipstreamError)
    async def ours(request: Request, error: SlipstreamError) -> Response:
        return error_answer(error)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        # The server logs it: it is raised again after this answer.
        return JSONAnswer(error_body("internal error", "server_error"), 500)
