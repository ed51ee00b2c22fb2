"""The OpenAPI document: bodies that the endpoints read themselves, and every status they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)

_REFERENCE = "#/components/schemas/"
_BODIES: tuple[type[BaseModel], ...] = (
    CompletionBody,
    ChatBody,
    TokenizeBody,
    TokenizeChatBody,
    DetokenizeBody,
)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "a field holds a value that cannot be served, or its grammar allows no token any more",
    "404": "no such model or path",
    "413": "the body is too large",
    "429": "too many requests wait: try again later",
    "500": "our own fault",
    "502": "the model's server broke the protocol",
    "503": "the model is not connected, or the server is shutting down",
}
_OF_GET = ("404", "503")


def body_of(*bodies: type[BaseModel]) -> dict[str, Any]:
    """The request body of an endpoint, one of `bodies`, for its `openapi_extra`."""
    schemas = [{"$ref": _REFERENCE + body.__name__} for body in bodies]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """What makes `app`'s document, once."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    return make


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, found = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_REFERENCE + "{model}"
    )
    schemas = found["$defs"]
    for schema in schemas.values():
        _allow_nulls(schema)
    document.setdefault("components", {})["schemas"] = {**schemas, "Error": _ERROR}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _add_statuses(operation, _STATUSES if method == "post" else _OF_GET)
            if path.endswith("completions"):
                operation["responses"]["200"]["content"]["text/event-stream"] = {}
            if path == "/metrics":
                operation["responses"]["200"]["content"] = {"text/plain": {}}
    return document


def _allow_nulls(schema: dict[str, Any]) -> None:
    """A null counts as absent."""
    required = schema.get("required", ())
    for name, value in schema.get("properties", {}).items():
        if name not in required and {"type": "null"} not in value.get("anyOf", ()):
            noted = {key: value.pop(key) for key in ("title", "description") if key in value}
            schema["properties"][name] = noted | {"anyOf": [value, {"type": "null"}]}


def _add_statuses(operation: dict[str, Any], statuses: Any) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI would say of bodies that it reads
    for status in statuses:
        responses[status] = {
            "description": _STATUSES[status],
            "content": {"application/json": {"schema": {"$ref": f"{_REFERENCE}Error"}}},
        }
