"""Thinking, tool calls and content: found in whole answers, and the same however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.answer import AnswerFormat, AnswerParser, parser_of
from gateway.chat.formats import (
    HERMES,
    JSON,
    LLAMA3,
    THINK,
    ToolFormat,
    think_format,
    tool_format,
)
from gateway.chat.reasoning import Thinking, thinking_after
from slipstream.errors import ConfigError

NAMES = ("weather", "time")


def tools(form: ToolFormat, parallel: bool = True) -> AnswerFormat:
    return AnswerFormat(tools=form, names=NAMES, parallel=parallel)


def thinks(state: Thinking, form: ToolFormat | None = None) -> AnswerFormat:
    return AnswerFormat(THINK, state, form, NAMES)


def read(form: AnswerFormat, text: str) -> tuple[Any, ...]:
    """Reasoning, content and calls (name, arguments) of a whole answer."""
    message = AnswerParser(form).feed(text, last=True).message()
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message.get("reasoning_content", ""), message["content"], calls


def streamed(form: AnswerFormat, pieces: list[str]) -> tuple[Any, ...]:
    """The same, of an answer that came in pieces, as a client puts its chunks together."""
    parser = AnswerParser(form)
    reasoning = content = ""
    calls: list[list[str]] = []
    for index, piece in enumerate(pieces):
        body = parser.feed(piece, index == len(pieces) - 1).body()
        reasoning += body.get("reasoning_content", "")
        content += body.get("content", "")
        for call in body.get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            else:
                assert "name" not in call["function"]
            calls[call["index"]][1] += call["function"]["arguments"]
    said = content if content or not (reasoning or calls) else None
    return reasoning, said, [(name, arguments) for name, arguments in calls]


WEATHER = '{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}'
TIME = '{"arguments": {"at": "}\\"{"}, "name": "time"}'
MARKED = f"<tool_call>\n{WEATHER}\n</tool_call>"
BERN = ("weather", '{"city": "Bern", "days": [1, 2]}')
LATE = ("time", '{"at": "}\\"{"}')

CASES: list[tuple[AnswerFormat, str, Any]] = [
    (tools(HERMES), "plain text ", ("", "plain text ", [])),
    (tools(HERMES), MARKED, ("", None, [BERN])),
    (tools(HERMES), f"Let me see.\n{MARKED}", ("", "Let me see.", [BERN])),
    (
        tools(HERMES),
        f"{MARKED}\n<tool_call>{TIME}</tool_call>\n then",
        ("", "then", [BERN, LATE]),
    ),
    (tools(HERMES, False), f"{MARKED}\n<tool_call>{TIME}</tool_call>", ("", None, [BERN])),
    (tools(HERMES), f"<tool_call>[{WEATHER}, {TIME}]</tool_call>", ("", None, [BERN, LATE])),
    (tools(HERMES), f"<tool_call>{WEATHER}\n<tool_call>{TIME}", ("", None, [BERN, LATE])),
    (tools(HERMES), f"<tool_call>{WEATHER} oh</tool_call> a", ("", "a", [BERN])),
    (tools(HERMES), WEATHER, ("", WEATHER, [])),
    (tools(HERMES), "a  <tool_call> no", ("", "a  <tool_call> no", [])),
    (tools(HERMES), f"<tool_call> <tool_call>{TIME}", ("", "<tool_call>", [LATE])),
    (tools(HERMES), 'a <tool_call>{"na', ("", 'a <tool_call>{"na', [])),
    (tools(HERMES), '<tool_call>{"name": "time", "argu', ("", None, [("time", "")])),
    (
        tools(HERMES),
        '<tool_call>{"name": "time", "arguments": {"a',
        ("", None, [("time", '{"a')]),
    ),
    (tools(HERMES), '<tool_call>{"name": "time"}', ("", None, [("time", "{}")])),
    (tools(HERMES), '<tool_call>{"name": "time", "arguments": null}', ("", None, [("time", "{}")])),
    (
        tools(HERMES),
        '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}", "id": [{"name": "y"}]}',
        ("", None, [("time", '{"a": 1}')]),
    ),
    (tools(HERMES), '<tool_call>{"name": "time", "arguments": ""}', ("", None, [("time", "{}")])),
    *(
        (tools(HERMES), text, ("", text, []))  # of functions that nobody declared
        for text in (
            '<tool_call>{"name": "x", "argu',
            '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>',
            'a\n<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call> b',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": [1], "name": "time"}</tool_call>',
            '<tool_call>{"arguments": "x", "name": "time"}</tool_call>',
            '<tool_call>{"arguments": {"a": b}, "name": "time"}</tool_call>',
        )
    ),
    (
        tools(HERMES),
        f'{MARKED}\n<tool_call>{{"name": "x"}}</tool_call>',
        ("", '<tool_call>{"name": "x"}</tool_call>', [BERN]),
    ),
    (
        tools(LLAMA3),
        '<|python_tag|>{"name": "x", "parameters": {}}',
        ("", '<|python_tag|>{"name": "x", "parameters": {}}', []),
    ),
    (tools(HERMES), '<tool_call>{"name": 5}', ("", '<tool_call>{"name": 5}', [])),
    (tools(HERMES), '<tool_call>{"name": "\\ud800"}', ("", '<tool_call>{"name": "\\ud800"}', [])),
    (tools(HERMES), "a <tool_", ("", "a <tool_", [])),
    (tools(LLAMA3), WEATHER.replace("arguments", "parameters"), ("", None, [BERN])),
    (tools(LLAMA3), f"\n{WEATHER}; {TIME}", ("", None, [BERN, LATE])),
    (tools(LLAMA3), f"I look: <|python_tag|>{WEATHER}", ("", "I look:", [BERN])),
    (tools(LLAMA3), f"<|python_tag|>{WEATHER} and", ("", "and", [BERN])),
    (tools(LLAMA3), '{"name": "Ann"}', ("", '{"name": "Ann"}', [])),
    (tools(LLAMA3), f"as {WEATHER}", ("", f"as {WEATHER}", [])),
    (tools(LLAMA3), f'{WEATHER}; {{"x": 1}}', ("", '{"x": 1}', [BERN])),
    (tools(JSON), f"[{WEATHER}, {TIME}]", ("", None, [BERN, LATE])),
    (tools(JSON), "[1, 2]", ("", "[1, 2]", [])),
    (tools(JSON), " { x", ("", " { x", [])),
    (thinks(Thinking.POSSIBLE), "hello", ("", "hello", [])),
    (thinks(Thinking.POSSIBLE), " \n", ("", " \n", [])),
    (
        thinks(Thinking.POSSIBLE),
        "\n<think>\nhm </th\n\n</think>\n\nyes ",
        ("hm </th", "yes ", []),
    ),
    (thinks(Thinking.POSSIBLE), "a <think>b</think>", ("", "a <think>b</think>", [])),
    (thinks(Thinking.POSSIBLE), "<think></think>x", ("", "x", [])),
    (thinks(Thinking.POSSIBLE), "<think>long </", ("long </", None, [])),
    (thinks(Thinking.POSSIBLE), "<thi", ("", "<thi", [])),
    (thinks(Thinking.OPENED), "\nwell\n</think>\nso", ("well", "so", [])),
    (thinks(Thinking.OPENED), "<think>well</think>so", ("well", "so", [])),
    (thinks(Thinking.INSIDE), " on</think>", (" on", None, [])),
    (thinks(Thinking.CLOSED), "<think>a</think>", ("", "<think>a</think>", [])),
    (
        thinks(Thinking.OPENED, HERMES),
        f"<tool_call>?\n</think>\n\nAh\n{MARKED}",
        ("<tool_call>?", "Ah", [BERN]),
    ),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_whole_and_letter_by_letter(form: AnswerFormat, text: str, expected: Any) -> None:
    assert read(form, text) == expected
    assert streamed(form, [*text, ""]) == expected


FORMS = [
    *(tools(form, parallel) for form in (HERMES, LLAMA3, JSON) for parallel in (True, False)),
    *(thinks(state, form) for state in Thinking for form in (None, HERMES, LLAMA3)),
]
PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "{", "}"),
        *("[", "]", ",", ";", ":", '"', "\\", '\\"', " ", "\n", "a", "null", "é😀", "\\u00e9"),
        *(WEATHER, TIME, MARKED, '{"name":', '"weather"', '"name"', '"arguments"', "{}", "text "),
        *('{"name": "time", "parameters": ', "</", "tool", "_call>", "think>", "\\ud83d"),
    ]
)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(FORMS), st.lists(PIECES, max_size=14), st.data())
def test_the_same_however_it_is_cut(
    form: AnswerFormat, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, text)
    assert streamed(form, pieces) == whole
    assert streamed(form, [*text, ""]) == whole


NAME = st.sampled_from(NAMES)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA3, JSON]),
    st.lists(st.tuples(NAME, ARGUMENTS, st.booleans()), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_calls_come_back_as_they_were_written(
    form: ToolFormat, calls: list[tuple[str, Any, bool]], ascii_: bool, indent: int | None
) -> None:
    written = []
    for name, arguments, turned in calls:
        items = [("name", name), (form.key, arguments)]
        call = dict(reversed(items) if turned else items)
        text = json.dumps(call, ensure_ascii=ascii_, indent=indent)
        written.append(text if form.bare else form.opening + text + form.closing)
    text = form.between.join(written)
    _, content, found = read(tools(form), f"[{text}]" if form.list else text)
    assert content is None
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        (name, arguments) for name, arguments, _ in calls
    ]


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (MARKED, True),
        (MARKED.removesuffix("</tool_call>"), True),
        (f"{MARKED}\n{MARKED}", True),
        (f'{MARKED}<tool_call>{{"name": "x"}}</tool_call>', True),
        (MARKED[:40], False),  # within its arguments
        (f"{MARKED}\n{MARKED[:40]}", False),
        ('<tool_call>{"name": "time"', False),
        ('<tool_call>{"name": "time", "arguments": {"at": now}}</tool_call>', False),
        ('<tool_call>{"name": "time", "arguments": {"at": [}}</tool_call>', False),
        ('<tool_call>{"name": "time", "arguments": {"at": NaN}}</tool_call>', False),
        ('<tool_call>{"name": "time", "arguments": [1]}</tool_call>', False),
        ('<tool_call>{"name": "time", "arguments": "at"}</tool_call>', False),
        ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', False),
    ],
)
def test_only_complete_calls_are_to_be_carried_out(text: str, called: bool) -> None:
    for pieces in ([text], [*text, ""]):
        parser = AnswerParser(tools(HERMES))
        for index, piece in enumerate(pieces):
            parser.feed(piece, last=index == len(pieces) - 1)
        assert parser.finish("stop") == ("tool_calls" if called else "stop")
        assert parser.finish("length") == "length"


def test_the_finish_reason() -> None:
    parser = AnswerParser(tools(HERMES))
    parser.feed("text", last=False)
    assert parser.finish("stop") == "stop"
    parser.feed(MARKED, last=True)
    assert parser.finish("stop") == "tool_calls"
    assert parser.finish("length") == "length"
    assert parser.finish(None) is None


def test_ids_differ_and_bodies_have_what_clients_read() -> None:
    message = AnswerParser(tools(HERMES)).feed(MARKED * 2, last=True).message()
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert first.keys() == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '<|python_tag|>' }}", LLAMA3),
        ("<|start_header_id|> '\"parameters\": '", LLAMA3),
        ("<tool_call><function=x>", JSON),
        ("{{ messages }}", JSON),
    ],
)
def test_the_template_shows_the_format(source: str, form: ToolFormat) -> None:
    assert tool_format("auto", source) is form
    assert tool_format("none", source) is None
    assert tool_format("llama3_json", source) is LLAMA3


def test_names_of_formats() -> None:
    with pytest.raises(ConfigError, match="--tool-parser"):
        tool_format("other", "")  # type: ignore[arg-type]
    assert think_format("auto", "a </think> b") is THINK
    assert think_format("auto", "") is None
    assert think_format("think", "") is THINK
    assert think_format("none", "</think>") is None


@pytest.mark.parametrize(
    ("prompt", "continued", "state"),
    [
        ("user: <think>\nassistant: ", None, Thinking.POSSIBLE),
        ("assistant: <think>\n", None, Thinking.OPENED),
        ("assistant: <think>\n\n</think>\n\n", None, Thinking.CLOSED),
        ("assistant: <think>a", "<think>a", Thinking.INSIDE),
        ("assistant: <think>a</think>b", "<think>a</think>b", Thinking.CLOSED),
        ("assistant: b", "b", Thinking.CLOSED),
    ],
)
def test_where_the_prompt_leaves_the_answer(
    prompt: str, continued: str | None, state: Thinking
) -> None:
    assert thinking_after(THINK, prompt, continued) is state


def test_marks_that_must_be_shown() -> None:
    assert thinks(Thinking.OPENED, LLAMA3).marks == {"<think>", "</think>", "<|python_tag|>"}
    assert tools(JSON).marks == frozenset()
    assert parser_of(AnswerFormat()) is None
    assert parser_of(thinks(Thinking.CLOSED)) is None
    assert parser_of(tools(JSON)) is not None
