"""Conversations as clients send them, made into what chat templates take.

Templates want plain strings as content and objects as tool arguments; clients may send text parts,
nulls, and arguments as JSON text.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.fields import refuse
from slipstream.errors import InvalidRequest

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of messages, and what the template is told: templates know no developer."""

_MAY_SAY_NOTHING = frozenset({"assistant", "tool"})  # their content may be null or absent


def conversation(value: object) -> list[dict[str, Any]]:
    """The messages of a `messages` field. Raises InvalidRequest naming messages[i] and its field.

    Fields that are not known here reach the template as they are, but for nulls, which count as
    absent.
    """
    if not isinstance(value, list) or not value:
        raise refuse("messages", "must be a list of at least one message", value)
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _message(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(param, "must be an object", value)
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{param}.role", f"must be one of {', '.join(ROLES)}", role)
    for name, instead in (("function_call", ", use tool_calls"), ("audio", "")):
        if message.get(name):
            raise refuse(f"{param}.{name}", f"is not supported{instead}", message[name])
    for name in ("name", "reasoning_content", "refusal"):
        if not isinstance(message.get(name, ""), str):
            raise refuse(f"{param}.{name}", "must be a string", message[name])
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise refuse(f"{param}.tool_call_id", "must be a string", message.get("tool_call_id"))
    calls = message.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise refuse(f"{param}.tool_calls", "only an assistant has them", calls)
        message["tool_calls"] = _calls(f"{param}.tool_calls", calls)
    content = message.get("content", "" if role in _MAY_SAY_NOTHING else None)
    return message | {"role": ROLES[role], "content": _content(f"{param}.content", content)}


def _content(param: str, value: object) -> str:
    """A message's text: a string, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(param, "must be a string or a list of text parts", value)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refuse(f"{param}[{index}].type", "only text parts are supported", kind)
        if not isinstance(part.get("text"), str):
            raise refuse(f"{param}[{index}].text", "must be a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(param: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refuse(param, "must be a list", value)
    return [_call(f"{param}[{index}]", item) for index, item in enumerate(value)]


def _call(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(param, "must be an object", value)
    call = {key: item for key, item in value.items() if item is not None}
    if call.get("type", "function") != "function":
        raise refuse(f"{param}.type", "must be 'function'", call["type"])
    if not isinstance(call.get("id", ""), str):
        raise refuse(f"{param}.id", "must be a string", call["id"])
    function = call.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{param}.function", "must be an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refuse(f"{param}.function.name", "must be the name of a function", name)
    arguments = _arguments(f"{param}.function.arguments", function.get("arguments"))
    return call | {"type": "function", "function": function | {"arguments": arguments}}


def _arguments(param: str, value: object) -> dict[str, Any]:
    """A call's arguments: JSON text of an object, or the object itself; nothing is none."""
    found = value
    if value is None or value == "":
        found = {}
    elif isinstance(value, str):
        try:
            # It refuses what a template could not write again: half of a surrogate, 1e999, NaN.
            found = orjson.loads(value)
        except (ValueError, RecursionError) as error:
            raise refuse(param, f"must be JSON ({error})", value) from error
    if not isinstance(found, dict):
        raise refuse(param, "must be a JSON object", value)
    return found


def may_continue(messages: list[dict[str, Any]]) -> str:
    """The text that an answer shall go on from: that of the last message.

    Raises InvalidRequest naming `continue_final_message` when that is not an assistant's text.
    """
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last or not last["content"].strip():
        raise InvalidRequest(
            "continue_final_message: the last message must be an assistant's, with text and no"
            f" tool calls, got one of {last['role']!r}",
            "continue_final_message",
        )
    text: str = last["content"]
    return text
