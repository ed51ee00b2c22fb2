"""The REST door: OpenAI's paths, health, readiness, metrics, and one shape for every error."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.generation import Generation
from gateway.openai import Kind, error_body, models_body
from gateway.responses import CLIENT_CLOSED, GenerationAnswer, JSONAnswer, error_answer
from gateway.schemas import ChatBody, CompletionBody, GenerateBody, validate
from gateway.service import Service
from slipstream import __version__
from slipstream.errors import InvalidRequest, NotFound, SlipstreamError
from slipstream.metrics import CONTENT_TYPE, render

MAX_BODY = 8 << 20
"""Most bytes of a request body; the longest windows need about 1 MiB of text."""

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

B = TypeVar("B", bound=GenerateBody)


def create_app(service: Service, metrics: CollectorRegistry) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(title="Slipstream", version=__version__, docs_url=None, redoc_url=None)
    started = int(time.time())
    _add_generation(app, service)

    @app.get("/v1/models")
    async def models() -> Response:
        """The served model."""
        return JSONAnswer(models_body(service.model, started, service.info().max_model_len))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model by its name."""
        if name != service.model:
            raise NotFound(f"model: {name!r} does not exist", "model")
        body = models_body(service.model, started, service.info().max_model_len)
        return JSONAnswer(body["data"][0])

    @app.get("/health")
    async def health() -> Response:
        """The process lives."""
        return JSONAnswer({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Requests are taken: the model is connected and the server is not shutting down."""
        service.info()
        return JSONAnswer({"status": "ready"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(render(metrics), headers={"content-type": CONTENT_TYPE})

    _add_errors(app)
    app.openapi = _openapi(app)  # type: ignore[method-assign]
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answer(
        request: Request,
        kind: Kind,
        schema: type[B],
        start: Callable[[B], Awaitable[Generation]],
    ) -> Response:
        count = service.metrics.requests.add
        try:
            body = validate(schema, await _read(request))
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
        return GenerationAnswer(
            kind,
            generation,
            service.metrics,
            stream=body.stream,
            include_usage=body.include_usage,
        )

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continues a text, or token ids."""
        return await answer(request, "completion", CompletionBody, service.completion)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatBody))
    async def chat(request: Request) -> Response:
        """Answers a conversation."""
        return await answer(request, "chat", ChatBody, service.chat)


async def _read(request: Request) -> object:
    """The request's JSON. Raises InvalidRequest, or HTTPException 413 for a body too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
        parts.append(part)
    try:
        return orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"body: not valid JSON: {error}") from error


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


def _body_of(schema: type[GenerateBody]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def _openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """The OpenAPI document, with the bodies that the endpoints read themselves."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema(
                [(CompletionBody, "validation"), (ChatBody, "validation")],
                ref_template="#/components/schemas/{model}",
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    return make
