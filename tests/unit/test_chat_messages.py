"""Conversations: what templates get, and that every refusal names the message and the field."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.chat.messages import conversation, may_continue
from slipstream.errors import InvalidRequest


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f"} | function}


def test_content_of_every_kind_and_the_developer() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert conversation(
        [
            {"role": "developer", "content": parts, "name": None},
            {"role": "user", "content": "hi", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": []},
        ]
    ) == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("arguments", "object_"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
    ],
)
def test_arguments_become_objects(arguments: object, object_: object) -> None:
    messages = conversation(
        [
            {"role": "assistant", "tool_calls": [call(arguments=arguments)]},
            {"role": "tool", "tool_call_id": "c1", "content": None},
        ]
    )
    assert messages[0]["tool_calls"] == [call(arguments=object_)]
    assert messages[0]["content"] == messages[1]["content"] == ""


def assistant(*calls: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, ""),
        ({"content": "a"}, ".role"),
        ({"role": "wizard", "content": "a"}, ".role"),
        ({"role": ["user"], "content": "a"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": None}, ".content"),
        ({"role": "system", "content": 4}, ".content"),
        ({"role": "user", "content": ["a"]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": "a", "name": 3}, ".name"),
        ({"role": "user", "content": "a", "tool_calls": [call()]}, ".tool_calls"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, ".function_call"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, ".audio"),
        ({"role": "assistant", "tool_calls": 5}, ".tool_calls"),
        (assistant(5), ".tool_calls[0]"),
        (assistant(call(), {"id": "x"}), ".tool_calls[1].function"),
        (assistant({"type": "code"}), ".tool_calls[0].type"),
        (assistant(call() | {"id": 3}), ".tool_calls[0].id"),
        (assistant(call(name="")), ".tool_calls[0].function.name"),
        (assistant(call(arguments="{")), ".tool_calls[0].function.arguments"),
        (assistant(call(arguments="[1]")), ".tool_calls[0].function.arguments"),
        (assistant(call(arguments='{"a": NaN}')), ".tool_calls[0].function.arguments"),
        (assistant(call(arguments='{"a": 1e999}')), ".tool_calls[0].function.arguments"),
        (assistant(call(arguments='{"a": "\\ud800"}')), ".tool_calls[0].function.arguments"),
        (assistant(call(arguments="[" * 100_000)), ".tool_calls[0].function.arguments"),
        (assistant(call(arguments=3)), ".tool_calls[0].function.arguments"),
        ({"role": "tool", "content": "a"}, ".tool_call_id"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, ".tool_call_id"),
    ],
)
def test_refusals_name_the_field(message: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversation([{"role": "user", "content": "first"}, message])
    assert caught.value.param == f"messages[1]{param}"
    assert str(caught.value).startswith(f"messages[1]{param}: ")


@pytest.mark.parametrize("messages", [None, [], "hi", {}])
def test_no_messages(messages: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversation(messages)
    assert caught.value.param == "messages"


def test_what_an_answer_may_go_on_from() -> None:
    assert may_continue(conversation([{"role": "assistant", "content": "So "}])) == "So "
    for message in (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " "},
        {"role": "assistant", "content": "a", "tool_calls": [call()]},
    ):
        with pytest.raises(InvalidRequest) as caught:
            may_continue(conversation([message]))
        assert caught.value.param == "continue_final_message"
