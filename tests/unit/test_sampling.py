"""The sampling pipeline: filters at their edges, its law, edits, log-probabilities, parameters."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.noise import gumbel
from slipstream.sampling import (
    NOTHING,
    History,
    RowSampling,
    SamplingParams,
    apply_edits,
    draw,
    draw_rows,
    logprobs_of,
    tree_rows,
)
from slipstream.tree import Tree, build_chain
from slipstream.v1 import common_pb2 as pb

SEED = 0x1234_5678_9ABC_DEF0


def drawn_set(logits: Tensor, params: SamplingParams, draws: int = 200) -> set[int]:
    rows = [RowSampling(params, position) for position in range(draws)]
    return set(draw_rows(logits.expand(draws, -1), rows))


def hot(**fields: float) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=SEED, **fields)  # type: ignore[arg-type]


# -- greedy ----------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_equals_and_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("races.token_words", "races.vocabulary_words", "races.gumbel_of"):
        monkeypatch.setattr(f"slipstream.{name}", None)
    monkeypatch.setattr("slipstream.sampling.gumbel", None)
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    for row in logits:
        assert draw(row, RowSampling(SamplingParams(), 5)) == int(row.argmax())
    assert draw_rows(logits, [RowSampling(SamplingParams(), 5)] * 2) == [1, 0]
    assert SamplingParams(temperature=1e-6).greedy


# -- filters at their edges ------------------------------------------------------------------------


def test_top_k_keeps_the_lower_id_of_equals() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0])
    assert drawn_set(logits, hot(top_k=1)) == {4}
    assert drawn_set(logits, hot(top_k=3)) == {4, 1, 2}
    assert drawn_set(logits, hot(top_k=5)) == set(range(5))
    assert drawn_set(logits, hot(top_k=50)) == set(range(5))


def test_top_p_keeps_the_smallest_set_with_the_mass() -> None:
    logits = torch.zeros(4)
    assert drawn_set(logits, hot(top_p=0.5)) == {0, 1}
    assert drawn_set(logits, hot(top_p=0.51)) == {0, 1, 2}
    assert drawn_set(logits, hot(top_p=0.25)) == {0}
    assert drawn_set(logits, hot(top_p=1e-9)) == {0}
    skewed = torch.tensor([0.1, 0.6, 0.3]).log()
    assert drawn_set(skewed, hot(top_p=0.59)) == {1}
    assert drawn_set(skewed, hot(top_p=0.61)) == {1, 2}
    assert drawn_set(skewed, hot(top_p=0.91)) == {0, 1, 2}


def test_min_p_is_a_share_of_the_largest() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    assert drawn_set(logits, hot(min_p=0.55)) == {1}
    assert drawn_set(logits, hot(min_p=0.45)) == {1, 2}
    assert drawn_set(logits, hot(min_p=1.0)) == {1}
    assert drawn_set(torch.zeros(3), hot(min_p=1.0)) == {0, 1, 2}
    assert drawn_set(logits, hot(min_p=1e-60)) == {0, 1, 2}


def test_filters_work_on_the_tempered_distribution_in_order() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two kept by top-k the first has 4/7 of the mass.
    assert drawn_set(logits, hot(top_k=2, top_p=0.56)) == {0}
    assert drawn_set(logits, hot(top_k=2, top_p=0.58)) == {0, 1}
    # Of the three kept by min-p the first has 4/9.
    assert drawn_set(logits, hot(min_p=0.4, top_p=0.43)) == {0}
    assert drawn_set(logits, hot(min_p=0.4, top_p=0.45)) == {0, 1}
    # Colder, the first alone has 0.16 / 0.30.
    cold = dataclasses.replace(hot(top_p=0.52), temperature=0.5)
    assert drawn_set(logits, cold) == {0}
    assert drawn_set(logits, hot(top_p=0.52)) == {0, 1}


def test_impossible_values() -> None:
    logits = torch.tensor([-math.inf, 0.0, math.nan, 0.0])
    assert drawn_set(logits, hot()) == {1, 3}
    assert drawn_set(logits, hot(top_k=4, top_p=0.9)) == {1, 3}
    assert drawn_set(logits, SamplingParams()) == {1}
    for params in (SamplingParams(), hot(), hot(top_p=0.5), hot(min_p=0.1)):
        assert drawn_set(torch.full((3,), -math.inf), params) == {0}
        assert drawn_set(torch.full((3,), math.nan), params) == {0}
        assert drawn_set(torch.tensor([0.0, math.inf]), params) == {1}


# -- the law ---------------------------------------------------------------------------------------


def filtered_law(logits: Tensor, params: SamplingParams) -> list[float]:
    """The exact distribution, by the textbook: probabilities, one filter after the other."""
    p = (logits.double() / params.temperature).softmax(0).tolist()
    kept = [v for v in range(len(p)) if p[v] >= params.min_p * max(p)]
    kept.sort(key=lambda v: (-p[v], v))
    if params.top_k:
        kept = kept[: params.top_k]
    total, sum_before, nucleus = sum(p[v] for v in kept), 0.0, []
    for v in kept:
        if sum_before < params.top_p * total:
            nucleus.append(v)
        sum_before += p[v]
    mass = sum(p[v] for v in nucleus)
    return [p[v] / mass if v in nucleus else 0.0 for v in range(len(p))]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 4},
        {"min_p": 0.15},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_filtered_softmax(fields: dict[str, float]) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    params = dataclasses.replace(hot(), **fields)
    draws = 10_000
    rows = [RowSampling(params, position) for position in range(draws)]
    counts = Counter(draw_rows(logits.expand(draws, -1), rows))
    law = filtered_law(logits, params)
    support = [v for v in range(12) if law[v] > 0]
    assert set(counts) <= set(support)
    result = chisquare([counts[v] for v in support], [law[v] * draws for v in support])
    assert result.pvalue > 0.01


def test_draws_of_seeds_positions_and_choices_differ() -> None:
    logits = torch.zeros(1, 1000)
    base = RowSampling(hot(), 7)
    others = [
        dataclasses.replace(base, position=8),
        dataclasses.replace(base, params=dataclasses.replace(base.params, seed=SEED ^ 1)),
        dataclasses.replace(base, params=dataclasses.replace(base.params, seed=SEED ^ 1 << 32)),
        dataclasses.replace(base, params=dataclasses.replace(base.params, choice=1)),
    ]
    tokens = draw_rows(logits.expand(5, -1), [base, *others])
    assert len(set(tokens)) == 5
    assert tokens[0] == int(gumbel(SEED, 7, 0, torch.arange(1000)).argmax())


# -- edits -----------------------------------------------------------------------------------------


def test_edits_by_hand() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5, 0.25, 0.0])
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias={0: 3.0, 5: -1.0},
    )
    row = RowSampling(params, 9, History([0, 1], [2, 2]), (2, 3), banned=(4,), banned_until=10)
    # 0: bias, then halved; 1: prompt, negative, doubled; 2: halved, thrice in the output; 3: once.
    expected = [2.0, -2.0, 1.0 - 0.75 - 0.5, 0.25 - 0.25 - 0.5, -math.inf, -1.0]
    assert apply_edits(logits, row).tolist() == expected
    assert logits[0] == 1.0
    later = dataclasses.replace(row, position=10)
    assert apply_edits(logits, later)[4] == 0.25


def test_a_path_counts_like_committed_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40) * 2
    params = hot(presence_penalty=0.3, frequency_penalty=0.7, repetition_penalty=1.3)
    history = History([1, 2, 3], [3, 4, 4])
    ahead = RowSampling(params, 50, history, (4, 7, 7, 1))
    committed = History([1, 2, 3], [3, 4, 4])
    committed.append([4, 7, 7, 1])
    plain = RowSampling(params, 50, committed)
    assert torch.equal(apply_edits(logits, ahead), apply_edits(logits, plain))
    assert draw_rows(logits[None], [ahead]) == draw_rows(logits[None], [plain])
    assert history.output == {3: 1, 4: 2}


def test_tree_rows() -> None:
    tree = Tree([9, 5, 6, 7], [-1, 0, 0, 1], [0, 1, 1, 2])
    history = History([1], [9])
    params = SamplingParams(presence_penalty=0.1)
    rows = tree_rows(tree, 20, params, history, banned=[2], banned_until=22)
    assert [row.position for row in rows] == [21, 22, 22, 23]
    assert [row.path for row in rows] == [(), (5,), (6,), (5, 7)]
    assert all(row.history is history and row.banned_until == 22 for row in rows)
    assert all(row.path == () for row in tree_rows(tree, 20, SamplingParams()))


def test_min_tokens_ban_ends_with_its_position() -> None:
    logits = torch.tensor([[5.0, 0.0]]).expand(3, -1)
    rows = tree_rows(build_chain(1, [0, 0]), 10, SamplingParams(), None, {0}, banned_until=13)
    assert draw_rows(logits, rows) == [1, 1, 0]


def test_banned_ids_are_never_drawn() -> None:
    logits = torch.tensor([0.0, 9.0, 5.0, 4.0])
    for params in (SamplingParams(), hot(), hot(top_k=2), hot(top_p=0.5)):
        banned = dataclasses.replace(params, banned_ids=frozenset({1, 3}), logit_bias={1: 50.0})
        assert drawn_set(logits, banned) <= {0, 2}
        path = RowSampling(banned, 5, History([1], [3]), (1, 2))
        assert apply_edits(logits, path).tolist() == [0.0, -math.inf, 5.0, -math.inf]


def test_a_grammar_leaves_its_tokens_or_nothing() -> None:
    logits = torch.tensor([0.0, 9.0, 5.0, 4.0, 1.0, 1.0, 1.0, 1.0, 99.0])
    for params in (SamplingParams(), hot(), hot(top_k=2), hot(min_p=0.1)):
        some = RowSampling(params, 5, allowed=bytes([0b1001]))  # ids beyond its bits are not
        assert draw_rows(logits[None], [some])[0] in (0, 3)
        empty = dataclasses.replace(some, allowed=bytes(4))
        banned = dataclasses.replace(some, banned={0, 3}, banned_until=6)
        assert draw_rows(logits.expand(2, -1), [empty, banned]) == [NOTHING, NOTHING]
        assert draw(logits, empty) == draw(logits, banned) == NOTHING


# -- log-probabilities -----------------------------------------------------------------------------


def test_logprobs() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.25, 0.5]]).log() + 4
    own, top = zip(*logprobs_of(logits, [0, 1], 2), strict=True)
    assert own == pytest.approx([math.log(0.2), math.log(0.25)], abs=1e-6)
    assert [[token for token, _ in row] for row in top] == [[1, 2], [2, 0]]
    assert top[1][1][1] == pytest.approx(math.log(0.25), abs=1e-6)
    assert logprobs_of(logits, [0, 1], 0)[0][1] == []
    assert len(logprobs_of(logits, [0, 1], 9)[0][1]) == 3


def test_logprobs_prefer_the_lower_id_of_equals() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 700] = 1.0
    ((_, top),) = logprobs_of(logits, [5], 4)
    assert [token for token, _ in top] == [700, 0, 1, 2]


def test_logprobs_want_one_token_per_row() -> None:
    with pytest.raises(ValueError, match="1 tokens for 2 rows"):
        logprobs_of(torch.zeros(2, 4), [0], 0)


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("seed", -1),
        ("seed", 1 << 64),
        ("choice", 1 << 32),
        ("banned_ids", frozenset({100})),
        ("banned_ids", frozenset({-1})),
        ("banned_ids", frozenset(range(100))),
    ],
)
def test_validate_names_the_field(field: str, value: object) -> None:
    params = dataclasses.replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidRequest, match=field) as caught:
        params.validate(100)
    assert caught.value.param == field


def test_wire_form() -> None:
    params = SamplingParams(0.5, 0.75, 40, 0.25, 1.0, -0.5, 1.25, {7: 2.0}, (1 << 64) - 1, 3)
    params = dataclasses.replace(params, banned_ids=frozenset({5, 9}))
    params.validate(100)
    assert SamplingParams.from_proto(params.to_proto()) == params
    assert SamplingParams.from_proto(pb.Sampling()) == SamplingParams()


def test_numbers_are_read_as_the_wire_carries_them() -> None:
    torch.manual_seed(5)
    logits = torch.randn(200, 50)
    params = hot(top_p=0.9, min_p=0.1, frequency_penalty=0.1, repetition_penalty=1.1)
    params = dataclasses.replace(params, temperature=0.7)
    sent = SamplingParams.from_proto(params.to_proto())
    history = History([1, 2], [3, 4])
    here, there = (
        draw_rows(logits, [RowSampling(p, i, history) for i in range(200)]) for p in (params, sent)
    )
    assert here == there
