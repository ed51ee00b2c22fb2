"""The tools that a client declares and what it says of their use.

The chat template gets the declarations as the client wrote them. "auto" leaves the choice to the
model; "required" and a named function bind the answer to a grammar: calls in the way that the
model's family writes them, with arguments that the function's own JSON schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.chat.formats import ToolFormat
from gateway.fields import refuse
from slipstream.errors import InvalidRequest
from slipstream.grammar import literal

MAX_TOOLS = 128
MAX_CALLS = 16
"""Most calls of one answer when they are enforced."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Named:
    """`tool_choice` of one function."""

    name: str


def declarations(value: object) -> list[dict[str, Any]]:
    """The declarations of a `tools` field. Raises InvalidRequest naming tools[i] and its field."""
    if not isinstance(value, list):
        raise refuse("tools", "must be a list", value)
    if len(value) > MAX_TOOLS:
        raise refuse("tools", f"must have at most {MAX_TOOLS} items", len(value))
    found: list[dict[str, Any]] = []
    names: set[str] = set()
    for index, item in enumerate(value):
        tool = _tool(f"tools[{index}]", item)
        name = tool["function"]["name"]
        if name in names:
            raise refuse(f"tools[{index}].function.name", "must be declared once", name)
        names.add(name)
        found.append(tool)
    return found


def _tool(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(param, "must be an object", value)
    if value.get("type") != "function":
        raise refuse(f"{param}.type", "must be 'function'", value.get("type"))
    function = value.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{param}.function", "must be an object", function)
    function = {key: item for key, item in function.items() if item is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "must be 1 to 128 letters, digits or any of _ - . :"
        raise refuse(f"{param}.function.name", wanted, name)
    for key, kind, wanted in (
        ("description", str, "must be a string"),
        ("parameters", dict, "must be a JSON schema, an object"),
        ("strict", bool, "must be true or false"),
    ):
        if not isinstance(function.get(key, kind()), kind):
            raise refuse(f"{param}.function.{key}", wanted, function[key])
    return value | {"function": function}


def chosen(value: object) -> Choice | Named:
    """A `tool_choice`: a word, or {"type": "function", "function": {"name": ...}}."""
    if value == "auto" or value == "none" or value == "required":
        return value
    if not isinstance(value, dict) or value.get("type") != "function":
        raise refuse("tool_choice", "must be auto, none, required or a function", value)
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse("tool_choice.function.name", "must be a string", name)
    return Named(name)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        declared: for the chat template; empty when calls are ruled out.
        forced: those that the answer must call one of, by their index; empty when it need not.
        parallel: whether it may call several.
    """

    declared: Sequence[Mapping[str, Any]] = ()
    forced: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True

    @classmethod
    def of(
        cls, declared: Sequence[Mapping[str, Any]], choice: Choice | Named | None, parallel: bool
    ) -> ToolUse:
        """Raises InvalidRequest naming `tool_choice` when it fits no declared tool."""
        if choice == "none":
            return cls()
        if choice is None or choice == "auto":
            return cls(declared, {}, parallel)
        if not declared:
            raise InvalidRequest("tool_choice: needs tools, but there are none", "tool_choice")
        tools = dict(enumerate(declared))
        if not isinstance(choice, Named):
            return cls(declared, tools, parallel)
        forced = {i: tool for i, tool in tools.items() if tool["function"]["name"] == choice.name}
        if not forced:
            raise refuse("tool_choice.function.name", "must be one of the tools", choice.name)
        return cls(declared, forced, False)

    @property
    def names(self) -> frozenset[str]:
        """The declared functions."""
        return frozenset(tool["function"]["name"] for tool in self.declared)


def parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; without one there are none."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    schema: dict[str, Any] = tool["function"].get("parameters") or nothing
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def calls_rules(
    form: ToolFormat,
    forced: Sequence[Mapping[str, Any]],
    parallel: bool,
    arguments_rule: Callable[[Mapping[str, Any]], str],
    mark_rule: Callable[[str], str],
) -> str:
    """Rules in Lark of which `calls` is the first: one call or several, as `form` writes them.

    `arguments_rule` writes what a tool's arguments may be, `mark_rule` a mark, as part of a rule.
    """
    opening = mark_rule(form.opening) if form.opening and not form.bare else ""
    closing = mark_rule(form.closing) if form.closing and not form.bare else ""
    around = (
        " ".join(filter(None, (opening, text(form.before)))),
        " ".join(filter(None, (text(form.after), closing))),
    )
    again = f" ({text(form.between)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    listed = form.list and parallel
    head, tail = ('"[" ', ' "]"') if listed else ("", "")
    rules = [f"calls: {head}call{again}{tail}", f"call: {around[0]} function {around[1]}"]
    rules.append("function: " + " | ".join(f"function_{i}" for i in range(len(forced))))
    for index, tool in enumerate(forced):
        begin = f'{{"name": {json.dumps(tool["function"]["name"])}, "{form.key}": '
        rules.append(f'function_{index}: {text(begin)} {arguments_rule(tool)} "}}"')
    return "\n".join(rules)


def text(written: str) -> str:
    """A literal in Lark; nothing for an empty one."""
    return literal(written) if written else ""
