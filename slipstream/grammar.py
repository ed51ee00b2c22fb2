"""Grammars that bound an answer: what the gateway and the target share of them.

A grammar is a kind and a text, on the wire too. The gateway checks it before a request is admitted
(`check`), the target matches tokens against it; both read it through `source`, so that what one
accepts the other does. Free of torch; the grammar library is imported where it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from slipstream.errors import InvalidRequest
from slipstream.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_BYTES = 1 << 17
"""Longest text of a grammar, UTF-8."""

MAX_SYMBOLS = 100_000
"""Most symbols of a compiled grammar."""

MAX_LEXER_FUEL = 1_000_000
"""Work that building its lexer may take: some 20 ms."""

MAX_CHOICES = 1024

WHITE_SPACE = r"[ \t\n\r]{1,32}"
"""Between the parts of a JSON value: bounded, so that a model that goes on with it must stop."""


class GrammarKind(StrEnum):
    """What the text of a grammar is written in; see GrammarKind of common.proto.

    UNKNOWN is what a peer said that we do not know; it is refused when it is read.
    """

    UNKNOWN = "unknown"
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


_NUMBERS: dict[GrammarKind, pb.GrammarKind.ValueType] = {
    GrammarKind.UNKNOWN: pb.GRAMMAR_KIND_UNSPECIFIED,
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.JSON_OBJECT: pb.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.REGEX: pb.GRAMMAR_KIND_REGEX,
    GrammarKind.CHOICE: pb.GRAMMAR_KIND_CHOICE,
    GrammarKind.LARK: pb.GRAMMAR_KIND_LARK,
}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be. A JSON schema's own `x-guidance` options win over ours."""

    kind: GrammarKind
    text: str = ""

    def to_proto(self) -> pb.Grammar:
        return pb.Grammar(kind=_NUMBERS[self.kind], text=self.text)

    @classmethod
    def from_proto(cls, message: pb.Grammar) -> Grammar:
        """Nothing is checked."""
        return cls(_KINDS.get(message.kind, GrammarKind.UNKNOWN), message.text)


def limits() -> LLParserLimits:
    """What compiling and matching a grammar may cost."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=MAX_LEXER_FUEL, max_grammar_size=MAX_SYMBOLS, verbose_errors=False
    )


def vocabulary(tokenizer: str, vocab_size: int, end_ids: Collection[int]) -> LLTokenizer:
    """The tokens that grammars are matched with: those of a tokenizer.json's text.

    `vocab_size` is the model's, which may have padding; without `end_ids` the tokenizer's own end
    an answer. Raises ValueError when the library cannot read the tokenizer. Holds Python's lock for
    up to a second.
    """
    from llguidance import LLTokenizer

    ends = sorted(end_ids) or None
    words = LLTokenizer(tokenizer, eos_token=ends)
    if words.vocab_size < vocab_size:
        words = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
    return words


class Specials:
    """Texts of special tokens, as a grammar may have them: as text, of ordinary tokens.

    Where a grammar forces a text, the library allows the one token that its tokenizer begins it
    with. If that is a special one, it is not the text, and the library itself does not take it.
    """

    def __init__(self, words: LLTokenizer) -> None:
        self._begins: dict[int, int] = {}
        for token in filter(words.is_special_token, range(words.vocab_size)):
            spelt = words.greedy_tokenize(words.decode_str([token]))
            if spelt:
                self._begins[token] = spelt[0]

    def __iter__(self) -> Iterator[int]:
        """The special tokens."""
        return iter(self._begins)

    def corrected(self, matcher: LLMatcher, token: int) -> int:
        """What may come next where `token` is all that the library allows."""
        begins = self._begins.get(token)
        if begins is None or matcher.is_accepting():
            return token
        takes = matcher.deep_copy()
        return token if takes.consume_token(token) else begins


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def _ascii(escape: re.Match[str]) -> str:
    """`\\d` as the digits 0 to 9, which it is in the patterns of JSON schemas; the library has it
    mean those of every script. A class may stand inside another."""
    return {"d": "[0-9]", "D": "[^0-9]"}.get(escape[1], escape[0])


def source(grammar: Grammar) -> str:
    """The grammar as the library takes it. Raises InvalidRequest when it can already tell."""
    from llguidance import LLMatcher

    text = grammar.text
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise InvalidRequest(f"grammar: its text is longer than {MAX_BYTES} bytes", "grammar")
    match grammar.kind:
        case GrammarKind.UNKNOWN:
            raise InvalidRequest("grammar: of no kind that is known", "grammar")
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(_ESCAPE.sub(_ascii, text))
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(text))
        case GrammarKind.JSON_OBJECT:
            text = '{"type": "object"}'
        case GrammarKind.JSON_SCHEMA if text.strip() == "true":
            text = "{}"  # the same schema; the library sets its options only in an object
    try:
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": WHITE_SPACE}
        )
    except ValueError as error:
        raise InvalidRequest(f"grammar: not a JSON schema: {error}", "grammar") from error


def _choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"grammar: choices are no JSON: {error}", "grammar") from error
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise InvalidRequest(
            "grammar: choices must be a list of texts that are not empty", "choice"
        )
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"grammar: {len(choices)} choices, 1 to {MAX_CHOICES}", "choice")
    if any(0xD800 <= ord(letter) < 0xE000 for choice in choices for letter in choice):
        raise InvalidRequest("grammar: a choice has half a surrogate pair", "choice")
    return "start: " + " | ".join(map(literal, choices))


def literal(text: str) -> str:
    """`text` as a literal of Lark."""
    # The library's lexer takes no DEL as it stands; JSON does not escape it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check(grammar: Grammar) -> None:
    """Raises InvalidRequest when the grammar cannot be compiled, saying why.

    Takes up to some 20 ms, in which Python's lock is held for the most part.
    """
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(source(grammar), limits=limits())
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequest(f"grammar: {first_lines(problem)}", "grammar")


def first_lines(problem: str) -> str:
    """The telling part of the library's message, on one line."""
    told = " ".join(problem.split()).removesuffix("<non-verbose/>").rstrip()
    return told.replace("NoExtensionBias", "no token of the model may follow")[:300]
