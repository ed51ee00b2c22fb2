"""The page at /docs: the OpenAPI document as plain HTML.

It loads nothing, from this server or any other, so it reads the same without a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}"
    "td,th{border:1px solid #ccc;padding:.2rem .5rem;text-align:left;vertical-align:top}"
    "code{font:14px ui-monospace,monospace}h2{margin-top:2.5rem}"
)
_LIMITS: Mapping[str, str] = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "maxItems": "at most {} items",
}


def page(document: Mapping[str, Any]) -> str:
    """The page for an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>. A null counts as',
        " absent.</p>",
    ]
    used: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(path, method, operation, used)
    for name in used:  # grows while it is read: bodies name further schemas
        schema = schemas.get(name, {})
        parts += [f'<h2 id="{escape(name)}">{escape(name)}</h2>', *_fields(schema, used)]
    return "".join([*parts, "</body></html>"])


def _operation(
    path: str, method: str, operation: Mapping[str, Any], used: list[str]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        yield f"<p>Body: {_type(content['schema'], used)}</p>"
    yield "<table><tr><th>status</th><th></th></tr>"
    for status, response in operation["responses"].items():
        said = escape(response.get("description", ""))
        yield f"<tr><td>{escape(status)}</td><td>{said}</td></tr>"
    yield "</table>"


def _fields(schema: Mapping[str, Any], used: list[str]) -> Iterator[str]:
    if text := schema.get("description"):
        yield f"<p>{escape(text)}</p>"
    required: Sequence[str] = schema.get("required", ())
    yield "<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>"
    for name, value in schema.get("properties", {}).items():
        default = "required" if name in required else json.dumps(value.get("default"))
        said = ", ".join(filter(None, (value.get("description", ""), *_limits(value))))
        cells = (f"<code>{escape(name)}</code>", _type(value, used), escape(default), escape(said))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any], used: list[str]) -> str:
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        if name not in used:
            used.append(name)
        return f'<a href="#{name}">{name}</a>'
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if kinds:
        return " or ".join(dict.fromkeys(_type(kind, used) for kind in kinds))
    if values := schema.get("enum"):
        return escape(", ".join(map(json.dumps, values)))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), used)}"
    return escape(str(kind))


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    for part in (schema, *schema.get("anyOf", ())):
        for key, words in _LIMITS.items():
            if key in part:
                yield words.format(part[key])
