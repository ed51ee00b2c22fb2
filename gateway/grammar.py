"""What an answer is bound to: read from a request's fields and put together.

Everything here is text; `grammar_check` compiles and tries it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.chat.formats import ThinkFormat, ToolFormat
from gateway.chat.reasoning import Thinking
from gateway.chat.tools import calls_rules, parameters, text
from gateway.fields import refuse, short
from slipstream.errors import InvalidRequest
from slipstream.grammar import WHITE_SPACE, Grammar, GrammarKind, source

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What content must be, and the field that says so."""

    grammar: Grammar
    param: str


def constraint(fields: Mapping[str, Any]) -> Constraint | None:
    """Of a request's fields, by their names; absent ones may be None. None: nothing is bound.

    Raises InvalidRequest naming the field that is malformed or one too many.
    """
    found = [
        bound
        for name, read in _READERS.items()
        if fields.get(name) is not None and (bound := read(name, fields[name])) is not None
    ]
    if len(found) > 1:
        name = found[1].param
        raise InvalidRequest(f"{name}: the answer is already bound by {found[0].param}", name)
    return found[0] if found else None


def _response_format(param: str, value: object) -> Constraint | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise refuse(f"{param}.type", "must be text, json_object or json_schema", kind)
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(_schema(_ANY_OBJECT), param)
    spec = value.get("json_schema")
    if not isinstance(spec, dict):
        raise refuse(f"{param}.json_schema", "must be an object", spec)
    strict = spec.get("strict") or False
    if not isinstance(strict, bool):
        raise refuse(f"{param}.json_schema.strict", "must be true or false", strict)
    # What is not strict is held as far as the library can, as OpenAI does.
    return _json(f"{param}.json_schema.schema", spec.get("schema"), lenient=not strict)


def _structured_outputs(param: str, value: object) -> Constraint | None:
    if not isinstance(value, dict):
        raise refuse(param, "must be an object", value)
    readers: Mapping[str, Callable[[str, object], Constraint | None]] = {
        "json": _json,
        "regex": _regex,
        "choice": _choice,
        "json_object": _json_object,
        "grammar": _lark,
    }
    given = [name for name, item in value.items() if item is not None]
    for name in given:
        if name not in readers:
            raise refuse(f"{param}.{short(name)}", "is not supported", value[name])
    if len(given) != 1:
        raise refuse(param, f"must have one of {', '.join(readers)}", given)
    return readers[given[0]](f"{param}.{given[0]}", value[given[0]])


def _json_object(param: str, value: object) -> Constraint | None:
    if not isinstance(value, bool):
        raise refuse(param, "must be true or false", value)
    return Constraint(_schema(_ANY_OBJECT), param) if value else None


def _json(param: str, value: object, lenient: bool = False) -> Constraint:
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise refuse(param, f"must be JSON ({error})", value) from error
    if not isinstance(schema, dict | bool):
        raise refuse(param, "must be a JSON schema, an object", value)
    try:
        return Constraint(_schema(schema, lenient), param)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: cannot be written as JSON: {error}", param) from error


_TEMPERATURE = re.compile(r"^\s*[?!]?\w+\s*\[[^\]\"\n]*\btemperature\s*=", re.MULTILINE)


def _regex(param: str, value: object) -> Constraint:
    if not isinstance(value, str) or not value:
        raise refuse(param, "must be a regular expression", value)
    return Constraint(Grammar(GrammarKind.REGEX, value), param)


def _lark(param: str, value: object) -> Constraint:
    if not isinstance(value, str) or not value:
        raise refuse(param, "must be a grammar in Lark", value)
    if _TEMPERATURE.search(value):
        # The library would leave it to whoever draws; here one temperature holds for an answer.
        raise InvalidRequest(f"{param}: a rule's own temperature is not supported", param)
    return Constraint(Grammar(GrammarKind.LARK, value), param)


def _choice(param: str, value: object) -> Constraint:
    if value == []:
        raise refuse(param, "must not be empty", value)
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise refuse(param, "must be a list of strings that are not empty", value)
    return Constraint(Grammar(GrammarKind.CHOICE, json.dumps(value)), param)


def _schema(schema: Mapping[str, Any] | bool, lenient: bool = False) -> Grammar:
    """The options of the library go with the schema: as part of a rule it gets no others."""
    if isinstance(schema, dict):
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
        own = schema.get("x-guidance", {})
        schema = schema | {"x-guidance": options | (own if isinstance(own, dict) else {})}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


_READERS: Mapping[str, Callable[[str, object], Constraint | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
}

FIELDS = tuple(_READERS)
"""The fields of a request that bind its answer."""


@dataclass(frozen=True, slots=True)
class Bound:
    """All that binds one answer, from its first token on.

    Attributes:
        content: what the content must be.
        form, forced: how calls are written, and the tools to call one of, by index; none: no calls.
        either: calls or such content; otherwise forced calls leave no content.
        think, thinking: the thinking part that may come first, which nothing binds.
    """

    content: Constraint | None = None
    form: ToolFormat | None = None
    forced: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    either: bool = False
    think: ThinkFormat | None = None
    thinking: Thinking = Thinking.CLOSED

    @property
    def thinks(self) -> bool:
        """Whether a thinking part may come first."""
        return self.think is not None and self.thinking is not Thinking.CLOSED

    @property
    def binds(self) -> bool:
        """Whether there is anything that binds the answer."""
        return self.content is not None or (self.form is not None and bool(self.forced))

    @property
    def alone(self) -> bool:
        """Whether the content is all of the answer."""
        return not self.thinks and not (self.form is not None and self.forced)

    @property
    def param(self) -> str:
        """The field that binds the answer."""
        return self.content.param if self.content is not None else "tool_choice"

    def grammar(self, token: Callable[[str], int | None]) -> Grammar | None:
        """The grammar of the whole answer; None when nothing binds it.

        `token` gives the id of a text that is a token of its own: such a mark has no other form.
        """
        calls = self.form is not None and bool(self.forced)
        if not self.binds:
            return None
        if self.content is not None and not self.alone:
            if self.content.grammar.kind is GrammarKind.LARK:
                name = self.content.param
                raise InvalidRequest(f"{name}: does not go with tools or thinking", name)
        thinks = self.thinks
        if self.content is not None and self.alone:
            return self.content.grammar
        rules = self._think_rules(token) if thinks else []
        parts = []
        if self.form is not None and calls:
            parts.append("calls")
            mark = _mark_rule(token)
            rules.append(
                calls_rules(
                    self.form, list(self.forced.values()), self.parallel, _arguments_rule, mark
                )
            )
        if self.content is not None and (self.either or not calls):
            parts.append("content")
            rules.append(f"content: {_content_rule(self.content.grammar)}")
        start = f"start: {'thinking ' if thinks else ''}({' | '.join(parts)})"
        return Grammar(GrammarKind.LARK, "\n".join([start, *rules]) + "\n")

    def _think_rules(self, token: Callable[[str], int | None]) -> list[str]:
        assert self.think is not None
        opening, closing = self.think.opening, self.think.closing
        within = closing.replace("/", r"\/")
        if token(closing) is None:
            rules = ["thoughts: until SPACE?", f"until[lazy]: /(.|\\n)*{within}/"]
        else:
            rules = [
                f"thoughts: THOUGHT? {_mark_rule(token)(closing)} SPACE?",
                f"THOUGHT: /(.|\\n)+/ & ~/(.|\\n)*{within}(.|\\n)*/",
            ]
        begin = {
            Thinking.POSSIBLE: f"(SPACE? {_mark_rule(token)(opening)} thoughts)?",
            Thinking.OPENED: "thoughts",
        }
        return [
            f"thinking: {begin.get(self.thinking, 'thoughts')}",
            *rules,
            r"SPACE: /[ \t\n\r]{1,8}/",
        ]


def _mark_rule(token: Callable[[str], int | None]) -> Callable[[str], str]:
    def rule(mark: str) -> str:
        number = token(mark)
        return text(mark) if number is None else f"<[{number}]>"

    return rule


def _arguments_rule(tool: Mapping[str, Any]) -> str:
    return f"%json {arguments(tool).text}"


def arguments(tool: Mapping[str, Any]) -> Grammar:
    """What a tool's arguments may be."""
    return _schema(parameters(tool), lenient=not tool["function"].get("strict"))


def _content_rule(grammar: Grammar) -> str:
    """A constraint's grammar as part of a rule."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return f"%json {'{}' if grammar.text == 'true' else grammar.text}"
    if grammar.kind is GrammarKind.CHOICE:
        return " | ".join(map(text, json.loads(grammar.text)))
    made = json.loads(source(grammar))["grammars"][0]["lark_grammar"]
    return str(made).removeprefix("start: ")
