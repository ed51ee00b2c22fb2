"""Answers bound by a grammar: what comes out fits it, and trees change no token of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.target.commands import PlanEntry, Release
from services.target.grammar import Vocabulary, bitmap, tree_masks
from services.target.model_runner import ModelRunner
from services.target.runner import Finish
from slipstream.errors import InvalidRequest
from slipstream.grammar import Grammar, GrammarKind
from slipstream.params import SamplingParams
from slipstream.tree import Tree
from slipstream.v1 import common_pb2 as pb
from tests.fakes.target_driver import Driver
from tests.tiny import EOS, Pair, make_pair
from tests.unit.target_model_rig import (
    PROMPTS,
    VOCAB,
    Request,
    chain,
    fresh,
    generate,
    load,
    noise,
    oracle,
    plain,
    torn,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "maxItems": 2},
        "old": {"type": "boolean"},
    },
    "required": ["name", "tags", "old"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ \\n]{1,2}"},
}
CHOICE = GrammarKind.CHOICE
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Grammar(GrammarKind.REGEX, r"(the|tea|[0-9]{2}){3}-é?"),
    "choice": Grammar(CHOICE, json.dumps(["yes", 'no\n"maybe"', "là", "yes, sir"])),
    "special": Grammar(CHOICE, json.dumps(["<|im_end|>", "tea<|im_end|>x", "red<|mask|>"])),
    "special regex": Grammar(GrammarKind.REGEX, r"x<\|im_end\|>[ab]{2}<\|im_start\|>"),
    "lark": Grammar(GrammarKind.LARK, 'start: "(" inner ")"\ninner: /[ab]{1,3}/ | start'),
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "hot": SamplingParams(temperature=1.0, seed=9),
    "all": SamplingParams(
        temperature=0.8, top_p=0.9, top_k=30, seed=4, frequency_penalty=0.5, presence_penalty=0.3,
        logit_bias={60: 2.0}, banned_ids=frozenset({41, 70}),
    ),
}  # fmt: skip
LONG = 120


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB)


@pytest.fixture(scope="module")
def text(pair: Pair) -> Tokenizer:
    return Tokenizer.from_file(str(pair.target / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(pair: Pair) -> Vocabulary:
    made = Vocabulary.load(pair.target, VOCAB, (EOS,))
    assert made is not None
    return made


@pytest.fixture
def driver(pair: Pair) -> Iterator[Driver[ModelRunner]]:
    made = Driver(load(pair))
    yield made
    made.check()
    made.engine.stop()
    assert not made.failure


def fits(name: str, answer: str) -> None:
    grammar = GRAMMARS[name]
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            value = json.loads(answer)
            assert list(value) == ["name", "tags", "old"]
            assert isinstance(value["name"], str) and len(value["name"]) <= 6
            assert len(value["tags"]) <= 2 and set(value["tags"]) <= {"red", "green", 7}
            assert value["old"] in (True, False)
        case GrammarKind.REGEX:
            assert re.fullmatch(grammar.text, answer), answer
        case GrammarKind.CHOICE:
            assert answer in json.loads(grammar.text)
        case _:
            assert re.fullmatch(r"\(+[ab]{1,3}\)+", answer), answer
            assert answer.count("(") == answer.count(")")


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_fit_and_trees_change_nothing(
    driver: Driver[ModelRunner], text: Tokenizer, name: str, sampling: str
) -> None:
    fields: dict[str, Any] = {"sampling": SAMPLINGS[sampling], "grammar": GRAMMARS[name]}
    fields |= {"stop": (EOS,), "count": LONG}
    requests = fresh()
    outputs = generate(driver, requests, **fields)
    for request in requests:
        if request.finish is Finish.STOP:
            assert request.got.pop() == EOS
            fits(name, text.decode(request.got))
            request.got.append(EOS)
    assert name == "lark" or all(request.finish is Finish.STOP for request in requests)
    want = {id(prompt): out for prompt, out in zip(PROMPTS, outputs, strict=True)}
    for trees in (chain(want), oracle(want), noise, torn):
        drafted = fresh()
        assert generate(driver, drafted, trees, join_every=2, chunk=9, **fields) == outputs
        assert [r.finish for r in drafted] == [r.finish for r in requests]
        if trees not in (noise, torn):
            assert sum(request.accepted for request in drafted) > 0


def test_readmission_goes_on_where_it_was(driver: Driver[ModelRunner]) -> None:
    fields: dict[str, Any] = {"sampling": SAMPLINGS["hot"], "grammar": GRAMMARS["schema"]}
    fields["stop"] = (EOS,)
    prompt = PROMPTS[1]
    want = plain(driver, count=LONG, **fields)[id(prompt)]
    output, epoch = want[:7], driver.step + 1
    limit, known = len(prompt) + LONG, len(prompt) + 7
    driver.admit(0, prompt, output=tuple(output), epoch=epoch, limit=limit, **fields)
    got = output + list(driver.prefill(0, 0, known, epoch=epoch).entries[0].result.tokens)
    while got[-1] != EOS:
        got += driver.decode(PlanEntry(0, epoch, limit, nodes=1)).entries[0].result.tokens
    assert got == want
    driver.send(lambda n: Release(n, 0, epoch))


def test_what_cannot_be_matched_is_rejected(driver: Driver[ModelRunner]) -> None:
    bad = driver.admit(0, [1], grammar=Grammar(GrammarKind.REGEX, "["))
    assert "invalid regex" in driver.rejected(bad, pb.REJECT_CODE_BAD_VALUE).reason
    bad = driver.admit(0, [1], epoch=2, grammar=Grammar(GrammarKind.UNKNOWN))
    assert "kind" in driver.rejected(bad, pb.REJECT_CODE_BAD_VALUE).reason
    bad = driver.admit(0, [1], epoch=3, output=(5,), grammar=GRAMMARS["schema"])
    assert "output_ids" in driver.rejected(bad, pb.REJECT_CODE_BAD_VALUE).reason
    driver.admit(0, [1], epoch=4, grammar=GRAMMARS["schema"])
    driver.prefill(0, 0, 1, epoch=4)
    driver.send(lambda n: Release(n, 0, 4))


@pytest.mark.parametrize("trees", ["plain", "chain", "oracle"])
def test_a_request_without_any_token_left_fails_alone(
    driver: Driver[ModelRunner], text: Tokenizer, trees: str
) -> None:
    """The end may not come before min_tokens, and the grammar has nothing else."""
    grammar = Grammar(GrammarKind.REGEX, "abcd")
    letters = {i: text.token_to_id(letter) for i, letter in enumerate("abcd")}
    want = {id(prompt): list(letters.values()) + [EOS] * 9 for prompt in PROMPTS}
    made = {"plain": None, "chain": chain(want), "oracle": oracle(want, misses=0.0)}
    requests = fresh()
    generate(driver, requests, made[trees], grammar=grammar, stop=(EOS,), min_tokens=10)
    for request in requests:
        assert text.decode(request.got) == "abcd"
        assert request.finish is Finish.ERROR
    if trees == "chain":
        assert sum(request.accepted for request in requests) > 4


def test_a_first_token_may_fail_too(driver: Driver[ModelRunner]) -> None:
    request = Request(PROMPTS[0])
    banned = SamplingParams(banned_ids=frozenset(range(1, VOCAB)))
    generate(driver, [request], sampling=banned, grammar=GRAMMARS["schema"])
    assert (request.got, request.finish) == ([], Finish.ERROR)


def test_an_ignored_end_token_is_all_that_follows(driver: Driver[ModelRunner]) -> None:
    request = Request(PROMPTS[0])
    generate(driver, [request], grammar=Grammar(GrammarKind.REGEX, "a"), count=5)
    assert request.got[1:] == [EOS] * 4 and request.finish is Finish.LIMIT


# -- masks -----------------------------------------------------------------------------------------


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_bitmap() -> None:
    assert ids(bitmap({0, 31, 32, 69}, 70)) == [0, 31, 32, 69]
    assert bitmap({70, 500}, 70).tolist() == [0, 0, 0]


def test_masks_of_a_tree_are_those_of_its_paths(vocabulary: Vocabulary, text: Tokenizer) -> None:
    rng = random.Random(3)
    for grammar in GRAMMARS.values():
        matcher = vocabulary.matcher(grammar, (EOS,))
        tree = Tree([0], [-1], [0])
        while len(tree) < 40:
            parent = rng.randrange(max(0, len(tree) - 6), len(tree))
            path = [tree.tokens[node] for node in tree.path(parent)[1:]]
            here = vocabulary.matcher(grammar, (EOS,))
            here.advance(path)
            likely = ids(here.allowed()) or [0]
            token = rng.choice([*likely, rng.randrange(VOCAB)])
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.depths.append(tree.depths[parent] + 1)
        masks = tree_masks([(matcher, tree)])[0]
        other = vocabulary.matcher(GRAMMARS["regex"], (EOS,))
        other.advance(ids(other.allowed())[:1])
        pooled = tree_masks([(matcher, tree), (other, Tree([0], [-1], [0]))], vocabulary.pool())
        assert [{n: ids(m) for n, m in found.items()} for found in pooled] == [
            {n: ids(m) for n, m in masks.items()}, {0: ids(other.allowed())}
        ]  # fmt: skip
        for node in range(len(tree)):
            path = [tree.tokens[n] for n in tree.path(node)[1:]]
            here, possible = vocabulary.matcher(grammar, (EOS,)), True
            for token in path:
                possible &= token in ids(here.allowed())
                here.advance((token,))
            assert (node in masks) == possible
            if possible:
                assert ids(masks[node]) == ids(here.allowed())
        assert ids(masks[0]) == ids(matcher.allowed())


def test_ends_come_where_the_answer_is_complete(vocabulary: Vocabulary, text: Tokenizer) -> None:
    a, b = text.token_to_id("a"), text.token_to_id("b")
    matcher = vocabulary.matcher(Grammar(GrammarKind.REGEX, "ab?"), (b, 1))
    assert ids(matcher.allowed()) == [a]
    matcher.advance((a,))
    assert ids(matcher.allowed()) == [1, EOS, b]
    matcher.advance((EOS,))
    assert ids(matcher.allowed()) == [1, EOS, b]
    assert not matcher.failed
    wrong = vocabulary.matcher(Grammar(GrammarKind.REGEX, "ab?"), ())
    wrong.advance((EOS,))
    assert wrong.failed and ids(wrong.allowed()) == []


def test_a_special_token_of_a_grammar_is_not_its_text(
    vocabulary: Vocabulary, text: Tokenizer
) -> None:
    angle = text.token_to_id("<")
    as_text = vocabulary.matcher(Grammar(GrammarKind.LARK, 'start: "<|im_end|>" "b"'), (EOS,))
    assert ids(as_text.allowed()) == [angle]
    as_token = vocabulary.matcher(Grammar(GrammarKind.LARK, 'start: <|im_end|> "b"'), ())
    assert ids(as_token.allowed()) == [EOS]
    as_token.advance((EOS,))
    assert ids(as_token.allowed()) == [text.token_to_id("b")]


def test_a_vocabulary_of_another_size(pair: Pair) -> None:
    for size in (VOCAB - 20, VOCAB + 50):
        made = Vocabulary.load(pair.target, size, (EOS,))
        assert made is not None
        mask = made.matcher(GRAMMARS["schema"], ()).allowed()
        assert len(mask) == -(-size // 32)


def test_no_tokenizer_no_grammars(tmp_path: Path, pair: Pair) -> None:
    assert Vocabulary.load(tmp_path, VOCAB, (EOS,)) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Vocabulary.load(tmp_path, VOCAB, (EOS,)) is None
    bare = Driver(load(pair))
    object.__setattr__(bare.runner.spec, "grammars", False)
    number = bare.admit(0, [1], grammar=GRAMMARS["schema"])
    assert "grammar" in bare.rejected(number, pb.REJECT_CODE_BAD_VALUE).reason
    bare.engine.stop()


def test_compiled_grammars_are_kept_and_given_up(vocabulary: Vocabulary) -> None:
    first = vocabulary.matcher(GRAMMARS["choice"], ())
    first.advance((0,))
    assert first.failed and not vocabulary.matcher(GRAMMARS["choice"], ()).failed
    for number in range(100):
        vocabulary.matcher(Grammar(GrammarKind.REGEX, f"a{number}"), ())
    with pytest.raises(InvalidRequest, match="JSON"):
        vocabulary.matcher(Grammar(GrammarKind.JSON_SCHEMA, "{"), ())
