"""Sampling's fast path: equal to the reference row by row, and over whole tree steps."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import races
from slipstream.sampling import History, RowSampling, SamplingParams, draw, draw_rows, tree_rows
from slipstream.tree import cut, repair, walk

HOT = SamplingParams(temperature=1.0, seed=0x1234_5678_9ABC_DEF0)


def same(logits: Tensor, rows: list[RowSampling]) -> None:
    expected = [draw(values, row) for values, row in zip(logits, rows, strict=True)]
    assert draw_rows(logits, rows) == expected


def random_row(generator: np.random.Generator, vocab: int) -> RowSampling:
    def some(chance: float, value: float) -> float:
        return value if generator.random() < chance else 0.0

    params = SamplingParams(
        temperature=float(generator.choice([0.0, 0.3, 0.7, 1.0, 3.0])),
        top_p=float(generator.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999])),
        top_k=int(generator.choice([0, 0, 0, 1, 2, 5, 20, vocab, 10 * vocab])),
        min_p=float(generator.choice([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])),
        presence_penalty=some(0.3, 0.6),
        frequency_penalty=some(0.3, -0.3),
        repetition_penalty=float(generator.choice([1.0, 1.0, 1.2, 0.8])),
        logit_bias={3: 2.5, 1: -50.0} if generator.random() < 0.2 else {},
        seed=int(generator.integers(0, 1 << 64, dtype=np.uint64)),
        choice=int(generator.integers(0, 3)),
        banned_ids=frozenset({0, 6}) if generator.random() < 0.2 else frozenset(),
    )
    tokens = generator.integers(0, vocab, 12).tolist()
    return RowSampling(
        params,
        int(generator.integers(0, 5000)),
        History(tokens[:5], tokens[3:9]) if generator.random() < 0.7 else None,
        tuple(tokens[7 : 7 + int(generator.integers(0, 5))]),
        banned=(2, 4),
        banned_until=int(generator.choice([0, 9999])),
        allowed=some_bits(generator, vocab) if generator.random() < 0.3 else None,
    )


def some_bits(generator: np.random.Generator, vocab: int) -> bytes:
    """A grammar's bitmap with few or many tokens, or none."""
    chance = generator.choice([0.0, 2 / vocab, 0.5, 1.0])
    bits = generator.random(-(-vocab // 32) * 32) < chance
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "count"), [(8, 1500), (300, 1000), (5000, 300)])
def test_fast_equals_reference(vocab: int, count: int, tied: bool) -> None:
    generator = np.random.default_rng(vocab + tied)
    torch.manual_seed(vocab + tied)
    logits = (
        torch.randn(count, vocab) * torch.tensor([0.0, 0.5, 2.0, 6.0]).repeat(count)[:count, None]
    )
    if tied:
        logits = logits.round()
    same(logits, [random_row(generator, vocab) for _ in range(count)])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.95},
        {"top_p": 0.9999},
        {"top_k": 4000, "top_p": 0.9},
        {"min_p": 1e-9},
        {"temperature": 20.0},
        {"temperature": 2e-5},
    ],
)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_fast_equals_reference_on_a_large_vocabulary(
    fields: dict[str, float], spread: float
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 49_152) * spread
    logits[0] = logits[0].bfloat16().float()  # many exact ties
    params = dataclasses.replace(HOT, **fields)
    same(logits, [RowSampling(params, position // 2) for position in range(4)])


def test_an_undecided_row_goes_to_the_reference() -> None:
    # The nucleus of equal logits ends exactly at a token: no sum in fp32 can tell its side.
    logits = torch.zeros(1, 4096)
    undecided = 0
    for position in range(64):
        row = RowSampling(dataclasses.replace(HOT, top_p=0.5), position)
        undecided += races.run(logits.numpy(), [row]) == [None]
        same(logits, [row])
    narrow = torch.full((1, 64), -60.0)
    narrow[0, :4] = 0.0
    for position in range(64):
        row = RowSampling(dataclasses.replace(HOT, top_p=0.75), position)
        undecided += races.run(narrow.numpy(), [row]) == [None]
        same(narrow, [row])
    assert undecided > 0


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from([0.0, 1.0, 2.0, -math.inf]) | st.floats(-40, 40, width=32), min_size=1
    ),
    st.floats(0.05, 1.0),
    st.integers(0, 6),
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, (1 << 64) - 1),
)
def test_fast_equals_reference_anywhere(
    values: list[float], top_p: float, top_k: int, min_p: float, temperature: float, seed: int
) -> None:
    params = SamplingParams(temperature, top_p, top_k, min_p, seed=seed)
    same(torch.tensor([values]), [RowSampling(params, 3)])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    generator = np.random.default_rng(2)
    logits = torch.randn(50, 700) * 2
    rows = [random_row(generator, 700) for _ in range(50)]
    together = draw_rows(logits, rows)
    assert together == [draw_rows(logits[i : i + 1], rows[i : i + 1])[0] for i in range(50)]


def test_logits_are_left_alone_and_rows_must_match() -> None:
    logits = torch.randn(2, 30)
    before = logits.clone()
    generator = np.random.default_rng(4)
    draw_rows(logits, [random_row(generator, 30) for _ in range(2)])
    assert torch.equal(logits, before)
    assert draw_rows(logits[:0], []) == []
    with pytest.raises(ValueError, match="1 rows to draw for 2 rows"):
        draw_rows(logits, [RowSampling(SamplingParams(), 0)])


# -- a whole step ----------------------------------------------------------------------------------


def toy_logits(tokens: tuple[int, ...]) -> Tensor:
    """A "model": logits (10,) that depend on every token so far."""
    seed = sum((token + 1) * 31**i for i, token in enumerate(tokens)) % (1 << 31)
    return torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("case", range(60))
def test_a_tree_step_commits_what_plain_decoding_would(case: int) -> None:
    generator = np.random.default_rng(case)
    params = dataclasses.replace(
        random_row(generator, 10).params, temperature=float(generator.choice([0.0, 0.8]))
    )
    prompt, output = (1, 2, 3), tuple(generator.integers(0, 10, 2).tolist())
    committed, stop_ids, min_tokens, limit = prompt + output, {0, 5}, 4, 9
    start = len(committed) - 1

    size = 24
    parents = [-1, *(int(generator.integers(0, node)) for node in range(1, size))]
    proposed = generator.integers(0, 10, size).tolist()
    tree = repair(proposed, parents, nodes=size, vocab_size=10, anchor=committed[-1])
    paths = [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(len(tree))]
    logits = torch.stack([toy_logits(committed + path) for path in paths])
    banned_until = len(prompt) + min_tokens
    rows = tree_rows(tree, start, params, History(prompt, output), stop_ids, banned_until)
    drawn = draw_rows(logits, rows)
    step = cut(
        tree,
        walk(tree, drawn),
        drawn,
        stop_ids=stop_ids,
        room=limit - len(committed),
        min_left=max(0, min_tokens - len(output)),
    )

    plain: list[int] = []
    history = History(prompt, output)
    while len(plain) < len(step.tokens):
        position = len(committed) + len(plain)
        row = RowSampling(params, position, history, (), stop_ids, banned_until)
        token = draw(toy_logits((*committed, *plain)), row)
        history.append([token])
        plain.append(token)
    assert step.tokens == plain
    ended = [t in stop_ids and len(output) + i >= min_tokens for i, t in enumerate(plain)]
    assert ended.count(True) == (step.finish == "stop")
    if step.finish == "none":
        assert len(plain) < limit - len(committed)
