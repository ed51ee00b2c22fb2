"""The tools that a request declares, and what it says of their use."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.chat.tools import Named, ToolUse, chosen, declarations
from slipstream.errors import InvalidRequest

TOOLS = declarations(
    [
        {"type": "function", "function": {"name": "weather"}},
        {"type": "function", "function": {"name": "now", "description": "the time"}},
    ]
)


def use(choice: Any, parallel: bool = True) -> ToolUse:
    return ToolUse.of(TOOLS, chosen(choice), parallel)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_declarations() -> None:
    assert declarations([]) == []
    tool = {"type": "function", "function": {"name": "a", "strict": None, "extra": 1}}
    assert declarations([tool]) == [
        {"type": "function", "function": {"name": "a", "extra": 1}},
    ]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (5, "tools"),
        ([function(name=f"f{i}") for i in range(129)], "tools"),
        ([5], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([function(name="a b")], "tools[0].function.name"),
        ([function(), function()], "tools[1].function.name"),
        ([function(description=1)], "tools[0].function.description"),
        ([function(parameters=[])], "tools[0].function.parameters"),
        ([function(strict="yes")], "tools[0].function.strict"),
    ],
)
def test_bad_declarations(value: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        declarations(value)
    assert caught.value.param == param


def test_the_choice_of_a_tool() -> None:
    assert use("none") == ToolUse()
    assert use("auto").forced == {}
    assert use("auto").declared == TOOLS
    assert list(use("required").forced) == [0, 1]
    assert list(use(named("now")).forced) == [1]
    assert not use(named("now")).parallel
    assert chosen(named("x")) == Named("x")
    assert ToolUse.of((), "auto", True) == ToolUse()


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("sometimes", TOOLS, "tool_choice"),
        (5, TOOLS, "tool_choice"),
        ({"type": "allowed_tools"}, TOOLS, "tool_choice"),
        ({"type": "function"}, TOOLS, "tool_choice.function.name"),
        (named("other"), TOOLS, "tool_choice.function.name"),
        ("required", [], "tool_choice"),
        (named("now"), [], "tool_choice"),
    ],
)
def test_bad_choices(choice: object, tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ToolUse.of(tools, chosen(choice), True)
    assert caught.value.param == param
