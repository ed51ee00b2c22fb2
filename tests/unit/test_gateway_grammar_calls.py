"""Enforced calls: the grammar, the parser and the family's way of writing them mean the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.chat.answer import AnswerFormat, AnswerParser
from gateway.chat.formats import HERMES, JSON, LLAMA3, THINK, ToolFormat
from gateway.chat.reasoning import Thinking
from gateway.chat.tools import ToolUse, declarations
from gateway.grammar import Bound
from gateway.grammar_check import Checker
from slipstream.errors import InvalidRequest
from slipstream.grammar import source
from tests.unit.gateway_grammar_rig import (
    NO_TOKEN,
    TOOLS,
    Words,
    admit,
    calls,
    checker_of,
    content,
    with_marks,
)

llguidance = pytest.importorskip("llguidance")

WEATHER = '{"name": "weather", "arguments": {"city": "Bern"}}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_marks(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def checker(raw: Tokenizer) -> Iterator[Checker]:
    checker = checker_of(raw)
    yield checker
    checker.close()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def marked(*written: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


LLAMA_NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    ("bound", "good", "bad"),
    [
        (calls(HERMES), [marked(NOW), marked(NOW, WEATHER)], ["", NOW, "hi", marked(NOW) + " "]),
        (calls(HERMES, parallel=False), [marked(WEATHER)], [marked(NOW, NOW)]),
        (calls(HERMES, named("weather")), [marked(WEATHER)], [marked(NOW), marked(WEATHER, NOW)]),
        (calls(LLAMA3), [LLAMA_NOW, f"{LLAMA_NOW}; {LLAMA_NOW}"], [NOW, marked(NOW)]),
        (calls(JSON), [f"[{NOW}]", f"[{NOW}, {WEATHER}]"], [NOW, "[]"]),
        (calls(JSON, named("now")), [NOW], [f"[{NOW}]", WEATHER]),
        (
            calls(HERMES, content=content(guided_choice=["yes"]), either=True),
            ["yes", marked(NOW)],
            ["no", f"yes{marked(NOW)}"],
        ),
        (
            calls(HERMES, think=THINK, thinking=Thinking.POSSIBLE),
            [marked(NOW), f"<think>\na <b/> c\n</think>\n\n{marked(NOW)}"],
            ["<think>", f"a</think>{marked(NOW)}", "<think>a</think>"],
        ),
        (
            calls(LLAMA3, think=THINK, thinking=Thinking.OPENED),
            [f"</think>{LLAMA_NOW}", f"\nhm 漢\n</think>\n{LLAMA_NOW}"],
            [LLAMA_NOW, f"a</think>b</think>{LLAMA_NOW}"],
        ),
        (
            Bound(content(guided_regex="x+|y"), think=THINK, thinking=Thinking.INSIDE),
            ["on</think>xx", "</think>\ny"],
            ["x", "on</think>xy"],
        ),
    ],
)
@pytest.mark.parametrize("as_tokens", [True, False])
def test_enforced_calls(
    raw: Tokenizer, bound: Bound, good: list[str], bad: list[str], as_tokens: bool
) -> None:
    if as_tokens:
        words = Words(raw)
    else:  # a model to which the marks are words like any other
        specials = {token for token in raw.get_vocab() if token.startswith("<|")}
        plain = json.loads(raw.to_str())
        plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] in specials]
        words = Words(Tokenizer.from_str(json.dumps(plain)))
    checker = Checker(lambda: words._words, 1)
    grammar = admit(checker, bound, raw.token_to_id if as_tokens else NO_TOKEN)
    checker.close()
    for text in good:
        assert words.accept(grammar, text), text
        form = AnswerFormat(bound.think, bound.thinking, bound.form, ("weather", "now"))
        message = AnswerParser(form).feed(text, last=True).message()
        assert "tool_calls" in message or bound.content is not None
    for text in bad:
        assert not words.accept(grammar, text), text


@pytest.mark.parametrize("form", [HERMES, LLAMA3, JSON], ids=lambda form: form.name)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_under_it_is_read_as_calls(
    checker: Checker, raw: Tokenizer, form: ToolFormat, seed: int
) -> None:
    """Tokens drawn at random among those allowed: the parser and the grammar mean the same."""
    bound = calls(form, think=THINK, thinking=Thinking.OPENED)
    grammar = admit(checker, bound, raw.token_to_id)
    eos, size = raw.token_to_id("<|im_end|>"), raw.get_vocab_size()
    words = llguidance.LLTokenizer(raw.to_str(), eos_token=eos)
    matcher = llguidance.LLMatcher(words, source(grammar), log_level=0)
    draw, ids = random.Random(seed), [raw.token_to_id("</think>")]
    assert matcher.consume_token(ids[0])
    while not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(size) if bits[i >> 3] >> (i & 7) & 1]
        ids.append(eos if eos in allowed else draw.choice(allowed))
        assert matcher.consume_token(ids[-1])
    text = raw.decode(ids)
    parser = AnswerParser(AnswerFormat(THINK, Thinking.OPENED, form, ("weather", "now")))
    message = parser.feed(text, last=True).message()
    assert message["content"] is None
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert list(arguments) == (["city"] if call["function"]["name"] == "weather" else [])


@pytest.mark.parametrize(
    ("kind", "param", "said"),
    [
        ("objct", "tools[2].function.parameters", "objct"),
        ("string", "tools[2].function.parameters.type", "must be 'object'"),
        (["object", "null"], "tools[2].function.parameters.type", "must be 'object'"),
    ],
)
def test_a_bad_tool_is_named(checker: Checker, kind: Any, param: str, said: str) -> None:
    bad = {"type": "function", "function": {"name": "b", "parameters": {"type": kind}}}
    chosen = ToolUse.of(declarations([*TOOLS, bad]), "required", True)
    with pytest.raises(InvalidRequest, match=said) as caught:
        admit(checker, Bound(form=HERMES, forced=chosen.forced))
    assert caught.value.param == param
