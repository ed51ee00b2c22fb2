"""What gateway and target share of grammars: kinds, limits, what is refused and why."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from slipstream.errors import InvalidRequest
from slipstream.grammar import MAX_BYTES, MAX_CHOICES, Grammar, GrammarKind, check, source
from slipstream.v1 import common_pb2 as pb

SCHEMA, REGEX, CHOICE = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SCHEMA, '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}'),
        (SCHEMA, "true"),
        (GrammarKind.JSON_OBJECT, ""),
        (REGEX, r"[^@\s]+@example\.(com|org)"),
        (CHOICE, '["yes", "no", "line\\nbreak \\"quoted\\" \\u00e9"]'),
        (GrammarKind.LARK, 'start: "a" start | "b"'),
    ],
)  # fmt: skip
def test_what_is_taken(kind: GrammarKind, text: str) -> None:
    check(Grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (SCHEMA, "{", "not a JSON schema"),
        (SCHEMA, "[1]", "not a JSON schema"),
        (SCHEMA, '{"type": "text"}', "text"),
        (SCHEMA, '{"$ref": "http://example.com/a"}', "example.com"),
        (SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000, "recursion"),
        (REGEX, "[", "unclosed"),
        (REGEX, "a(?=b)", "look-ahead"),
        (REGEX, "a" * (MAX_BYTES + 1), "longer"),
        (CHOICE, "yes", "no JSON"),
        (CHOICE, '{"a": 1}', "list of texts"),
        (CHOICE, '["a", ""]', "not empty"),
        (CHOICE, "[]", "0 choices"),
        (CHOICE, json.dumps([str(n) for n in range(MAX_CHOICES + 1)]), "choices"),
        (CHOICE, '["\\ud83d"]', "surrogate"),
        (GrammarKind.LARK, "start: missing", "missing"),
        (GrammarKind.UNKNOWN, "", "no kind"),
    ],
)
def test_what_is_refused(kind: GrammarKind, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check(Grammar(kind, text))


@pytest.mark.parametrize(
    ("regex", "text", "takes"),
    [
        (r"\d{3}", "123", True),
        (r"\d{3}", "1\u09eb3", False),
        (r"[\d.]+", "3.14", True),
        (r"[\d.]+", "\u09eb", False),
        (r"\D", "\u09eb", True),
        (r"\D", "7", False),
        (r"[^\D5]", "7", True),
        (r"\\d", r"\d", True),
        (r"\\d", "7", False),
        (r"\\\d", "\\7", True),
    ],
)
def test_digits_are_those_of_ascii(regex: str, text: str, takes: bool) -> None:
    matcher = LLMatcher(LLTokenizer("byte"), source(Grammar(REGEX, regex)))
    ids = list(text.encode())
    assert (matcher.validate_tokens(ids) == len(ids)) is takes


def test_wire_form() -> None:
    for kind in GrammarKind:
        grammar = Grammar(kind, "x")
        assert Grammar.from_proto(grammar.to_proto()) == grammar
    later = pb.Grammar(kind=99)  # type: ignore[arg-type]
    assert Grammar.from_proto(later).kind is GrammarKind.UNKNOWN
