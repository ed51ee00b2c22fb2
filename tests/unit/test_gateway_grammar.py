"""What binds an answer: read from the request, checked, and matched by the grammar library."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.chat.answer import AnswerFormat, AnswerParser
from gateway.chat.formats import HERMES, JSON, LLAMA3, THINK, ToolFormat
from gateway.chat.reasoning import Thinking
from gateway.chat.tools import ToolUse, chosen, declarations
from gateway.grammar import Bound, Constraint, constraint
from gateway.grammar_check import ANYTHING, Checker, Drawn
from slipstream.errors import InvalidRequest
from slipstream.grammar import Grammar, GrammarKind, source
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
WEATHER = '{"name": "weather", "arguments": {"city": "Bern"}}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    raw.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return raw


@pytest.fixture
def checker(raw: Tokenizer) -> Iterator[Checker]:
    eos = raw.token_to_id("<|im_end|>")
    checker = Checker(lambda: llguidance.LLTokenizer(raw.to_str(), eos_token=[eos]), 1)
    yield checker
    checker.close()


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


@pytest.fixture(scope="module")
def words(raw: Tokenizer) -> Words:
    return Words(raw)


def content(**fields: Any) -> Constraint:
    found = constraint(fields)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "param", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", '{"a": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
            "response_format.json_schema.schema",
            '{"city": "x"}',
            "{}",
        ),
        ({"guided_json": json.dumps(CITY)}, "guided_json", '{\n"city": "x"}', '{"city": 1}'),
        ({"guided_json": True}, "guided_json", "null", "nil"),
        ({"guided_regex": "a/[0-9]{2}"}, "guided_regex", "a/12", "a/1"),
        ({"guided_choice": ["yes", "né"]}, "guided_choice", "né", "n"),
        ({"structured_outputs": {"json": CITY}}, "structured_outputs.json", '{"city":"x"}', "{}"),
        ({"structured_outputs": {"regex": "a|b"}}, "structured_outputs.regex", "b", "ab"),
        ({"structured_outputs": {"choice": ["q"]}}, "structured_outputs.choice", "q", ""),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "{}", ""),
    ],
)
def test_fields_that_bind_content(
    checker: Checker, words: Words, fields: dict[str, Any], param: str, good: str, bad: str
) -> None:
    bound = content(**fields)
    assert bound.param == param
    plain = admit(checker, Bound(bound))
    assert plain == bound.grammar
    thinks = admit(checker, Bound(bound, think=THINK, thinking=Thinking.POSSIBLE))
    for grammar in (plain, thinks):
        assert words.accept(grammar, good)
        assert not words.accept(grammar, bad)


def test_white_space_is_bounded(checker: Checker, words: Words) -> None:
    grammar = admit(checker, Bound(content(guided_json=CITY)))
    assert words.accept(grammar, '{\n    "city" : "x"\n}')
    assert not words.accept(grammar, "{" + " " * 40 + '"city": "x"}')


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_fields_that_bind_nothing(fields: dict[str, Any]) -> None:
    assert constraint(fields) is None
    assert Bound(constraint(fields)).grammar(NO_TOKEN) is None


def json_schema(schema: object, **more: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **more}}}


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": 5}, "response_format.type", "must be"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "null"),
        (json_schema(None), SCHEMA, "null"),
        (json_schema(5), SCHEMA, "5"),
        (json_schema({}, strict=3), "response_format.json_schema.strict", "3"),
        (json_schema({"type": "objct"}), SCHEMA, "Invalid type: objct"),
        (json_schema({"enum": []}), SCHEMA, "Unsatisfiable"),
        (json_schema({"$ref": "#/$defs/x"}), SCHEMA, "does not exist"),
        (json_schema({"$ref": "#"}), SCHEMA, ""),
        (json_schema({"type": "array", "uniqueItems": True}, strict=True), SCHEMA, "uniqueItems"),
        (json_schema({"type": "string", "pattern": "("}), SCHEMA, "unclosed"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": [1]}, "guided_json", "schema"),
        ({"guided_json": False}, "guided_json", "schema"),
        ({"guided_json": {"enum": ["x" * 200_000]}}, "guided_json", "longer"),
        ({"guided_regex": ""}, "guided_regex", "''"),
        ({"guided_regex": 3}, "guided_regex", "3"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_choice": "yes"}, "guided_choice", "yes"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "''"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice", "5000"),
        ({"guided_choice": []}, "guided_choice", "must not be empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"guided_grammar": "start: <[999]>"}, "guided_grammar", "999"),
        ({"guided_grammar": "start: <|nowhere|>"}, "guided_grammar", "nowhere"),
        ({"structured_outputs": 1}, "structured_outputs", "1"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"structural_tag": 1}}, "structured_outputs.structural_tag", "not"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "Expected"),
        ({"guided_grammar": "start: ("}, "guided_grammar", "Expected"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
    ],
)
def test_refusals_name_the_field(
    checker: Checker, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admit(checker, Bound(content(**fields)))
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert said in str(caught.value)


def test_a_grammar_of_the_clients_own(checker: Checker, words: Words) -> None:
    bound = content(guided_grammar='start: "a" [b]\nb: "b"')
    assert words.accept(admit(checker, Bound(bound)), "ab")
    with pytest.raises(InvalidRequest) as caught:
        admit(checker, Bound(bound, think=THINK, thinking=Thinking.POSSIBLE))
    assert caught.value.param == "guided_grammar"


@pytest.mark.parametrize(
    "lark",
    ["start: <[300]>", "start: <|im_start|>", "start: <[259-300]>", 'start: "a" <tool_call>'],
)
def test_a_grammar_of_the_models_own_tokens(
    checker: Checker, words: Words, raw: Tokenizer, lark: str
) -> None:
    """Ids beyond those of bytes, and special tokens, as the target takes them."""
    grammar = admit(checker, Bound(content(guided_grammar=lark)))
    compiled = llguidance.LLMatcher(words._words, source(grammar), log_level=0)
    assert not compiled.is_error()
    assert any(compiled.compute_bitmask())


def test_bans_that_leave_no_answer(checker: Checker, raw: Tokenizer) -> None:
    """Refused before a token is drawn; what may still be answered is not."""
    eos = raw.token_to_id("<|im_end|>")

    def ban(letters: str, most: int = 100) -> Drawn:
        found = {number for piece, number in raw.get_vocab().items() if set(piece) & set(letters)}
        return Drawn(found - {eos}, {eos}, most)

    yes = Bound(content(guided_choice=["yes"]))
    for bound, drawn, param in (
        (yes, ban("y"), "guided_choice"),
        (yes, ban("s"), "guided_choice"),
        (yes, Drawn({eos}, {eos}), "guided_choice"),
        (Bound(content(guided_choice=["no", "yes"])), ban("os"), "guided_choice"),
        (Bound(content(guided_json=CITY)), ban("{"), "guided_json"),
        (Bound(content(guided_regex="a+b")), ban("a"), "guided_regex"),
        (calls(LLAMA3), ban("{"), "tool_choice"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            admit(checker, bound, drawn=drawn)
        assert caught.value.param == "bad_words"
        assert str(caught.value).startswith("bad_words: ")
        assert f"that {param} allows" in str(caught.value)
    for bound, drawn in (
        (yes, ban("n")),
        (yes, ban("s", most=1)),  # its length ends it first
        (Bound(content(guided_choice=["no", "yes"])), ban("s")),
        (Bound(content(guided_regex="[ab]*")), ban("a")),
        (Bound(content(guided_json=CITY)), ban("abcdefgh")),
    ):
        admit(checker, bound, drawn=drawn)


def test_what_is_not_strict_is_held_as_far_as_possible(checker: Checker, words: Words) -> None:
    fields = json_schema({"type": "array", "uniqueItems": True, "items": {"type": "integer"}})
    grammar = admit(checker, Bound(content(**fields)))
    assert words.accept(grammar, "[1, 1]")
    assert not words.accept(grammar, '["a"]')


def test_deep_schemas_are_refused(checker: Checker) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest) as caught:
        admit(checker, Bound(content(**json_schema(schema))))
    assert caught.value.param == SCHEMA


def use(choice: Any, parallel: bool = True) -> ToolUse:
    return ToolUse.of(TOOLS, chosen(choice), parallel)


def calls(form: ToolFormat, choice: Any = "required", parallel: bool = True, **more: Any) -> Bound:
    chosen = use(choice, parallel)
    return Bound(form=form, forced=chosen.forced, parallel=chosen.parallel, **more)


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


def test_a_bad_tool_is_named(checker: Checker) -> None:
    bad = {"type": "function", "function": {"name": "b", "parameters": {"type": "objct"}}}
    chosen = ToolUse.of(declarations([*TOOLS, bad]), "required", True)
    with pytest.raises(InvalidRequest, match="objct") as caught:
        admit(checker, Bound(form=HERMES, forced=chosen.forced))
    assert caught.value.param == "tools[2].function.parameters"


def test_what_passed_is_remembered(checker: Checker) -> None:
    bound = Bound(content(guided_regex="[a-z]{1,5}"))
    first = admit(checker, bound)
    began = time.thread_time()
    assert admit(checker, bound) == first
    assert time.thread_time() - began < 0.1
    assert first.kind is GrammarKind.REGEX


def test_a_costly_grammar_is_refused_and_the_event_loop_goes_on_meanwhile(checker: Checker) -> None:
    """The library lets go of the lock: other requests are served while a grammar is compiled."""

    async def run() -> float:
        task = asyncio.create_task(
            checker.admit(Bound(content(guided_regex="(a{10000}){10000}")), NO_TOKEN)
        )
        worst = 0.0
        while not task.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - began)
        with pytest.raises(InvalidRequest, match="^guided_regex: takes too much time") as caught:
            await task
        assert caught.value.param == "guided_regex"
        return worst

    assert asyncio.run(run()) < 0.4
