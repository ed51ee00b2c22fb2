"""What binds an answer: read from the request, checked, and matched by the grammar library."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.chat.formats import LLAMA3, THINK
from gateway.chat.reasoning import Thinking
from gateway.grammar import Bound, constraint
from gateway.grammar_check import Checker, Drawn
from slipstream.errors import InvalidRequest
from slipstream.grammar import GrammarKind, source
from tests.unit.gateway_grammar_rig import (
    CITY,
    NO_TOKEN,
    Words,
    admit,
    calls,
    checker_of,
    content,
    with_marks,
)

llguidance = pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_marks(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def checker(raw: Tokenizer) -> Iterator[Checker]:
    checker = checker_of(raw)
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def words(raw: Tokenizer) -> Words:
    return Words(raw)


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
        ({"guided_choice": ["\x7f\x01\u2028"]}, "guided_choice", "\x7f\x01\u2028", "\x7f"),
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
        ({"guided_grammar": "start: a\na[temperature=0.3]: /x+/"}, "guided_grammar", "temperature"),
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


@pytest.mark.parametrize("mark", ["<|im_end|>", "<|mask|>", "<tool_call>"])
@pytest.mark.parametrize("before", ["", "x" * 20])
def test_the_text_of_a_special_token_is_text(
    checker: Checker, raw: Tokenizer, mark: str, before: str
) -> None:
    """Also where nothing else may come: the library's own choice there is the special token."""
    answer = f"{before}{mark}y"
    pattern = answer.replace("|", r"\|")
    written = json.dumps(answer)
    bans = Drawn({raw.token_to_id("q")}, {raw.token_to_id("<|im_end|>")})
    for fields in (
        {"guided_choice": [answer]},
        {"guided_regex": pattern},
        {"guided_json": {"const": answer}},
        {"guided_grammar": f"start: {written}"},
    ):
        admit(checker, Bound(content(**fields)), drawn=bans)
    least = Drawn({raw.token_to_id("<")}, bans.ends)
    with pytest.raises(InvalidRequest, match="no answer that guided_choice allows"):
        admit(checker, Bound(content(guided_choice=[answer])), drawn=least)


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
