"""What is said of a request that its grammar brings to an end: the client's own field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.request import GenerateParams
from slipstream.errors import GrammarDeadEnd, InvalidRequest, describe
from slipstream.grammar import Grammar, GrammarKind, first_lines
from tests.fakes.scheduler import model_info

BOUND = GenerateParams(
    (1, 2), grammar=Grammar(GrammarKind.REGEX, "a"), grammar_param="guided_regex"
)


def test_a_dead_end_is_the_clients() -> None:
    error = BOUND.dead_end(7)
    assert isinstance(error, GrammarDeadEnd)
    assert error.param == "guided_regex"
    assert str(error).startswith("guided_regex: after 7 tokens")
    assert "bad_words" not in str(error)
    assert "bad_words" in str(replace(BOUND, banned_ids=(5,)).dead_end(7))
    assert (describe(error).http, describe(error).code) == (400, "grammar_dead_end")


@pytest.mark.parametrize(
    ("params", "reason", "param", "message"),
    [
        (BOUND, "grammar: too large", "guided_regex", "guided_regex: too large"),
        (BOUND, "limit: 9 is beyond 8", None, "limit: 9 is beyond 8"),
        (replace(BOUND, grammar=None), "grammar: odd", None, "grammar: odd"),
    ],
)
def test_what_the_target_refuses(
    params: GenerateParams, reason: str, param: str | None, message: str
) -> None:
    error = params.refusal(reason)
    assert isinstance(error, InvalidRequest)
    assert (error.param, str(error)) == (param, message)


def test_a_target_without_grammars() -> None:
    with pytest.raises(InvalidRequest, match="^guided_regex: ") as caught:
        BOUND.validate(model_info(320))
    assert caught.value.param == "guided_regex"


def test_the_librarys_words_are_for_people() -> None:
    assert first_lines("NoExtensionBias\n<non-verbose/>") == "no token of the model may follow"
    assert first_lines("at 1(8):\n  odd") == "at 1(8): odd"
