"""What the tests of grammars in the gateway share: a tokenizer with marks, and short ways."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.chat.formats import ToolFormat
from gateway.chat.tools import ToolUse, chosen, declarations
from gateway.grammar import Bound, Constraint, constraint
from gateway.grammar_check import ANYTHING, Checker, Drawn
from slipstream.grammar import Grammar, source
from tests.tiny import make_tokenizer

llguidance = pytest.importorskip("llguidance")

NO_TOKEN = lambda _: None  # noqa: E731
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = declarations(
    [
        {"type": "function", "function": {"name": "weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "now", "description": "the time"}},
    ]
)


def with_marks(folder: Path) -> Tokenizer:
    """A tokenizer in which the marks of calls and thinking are tokens of their own."""
    raw = Tokenizer.from_file(str(make_tokenizer(folder) / "tokenizer.json"))
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    raw.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return raw


def checker_of(raw: Tokenizer) -> Checker:
    eos = raw.token_to_id("<|im_end|>")
    return Checker(lambda: llguidance.LLTokenizer(raw.to_str(), eos_token=[eos]), 1)


def admit(
    checker: Checker, bound: Bound, token: Any = NO_TOKEN, drawn: Drawn = ANYTHING
) -> Grammar:
    grammar = asyncio.run(checker.admit(bound, token, drawn))
    assert grammar is not None
    return grammar


class Words:
    """Whether texts follow a grammar, in the tokens of a model."""

    def __init__(self, raw: Tokenizer) -> None:
        self._raw = raw
        self._words = llguidance.LLTokenizer(raw.to_str())

    def accept(self, grammar: Grammar, text: str) -> bool:
        matcher = llguidance.LLMatcher(self._words, source(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self._raw.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def content(**fields: Any) -> Constraint:
    found = constraint(fields)
    assert found is not None
    return found


def use(choice: Any, parallel: bool = True) -> ToolUse:
    return ToolUse.of(TOOLS, chosen(choice), parallel)


def calls(form: ToolFormat, choice: Any = "required", parallel: bool = True, **more: Any) -> Bound:
    chosen = use(choice, parallel)
    return Bound(form=form, forced=chosen.forced, parallel=chosen.parallel, **more)
