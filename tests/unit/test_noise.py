"""Philox by its published vectors, and the Gumbel values made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import noise
from slipstream.noise import GUMBEL_HIGH, GUMBEL_LOW, gumbel, philox4x32

# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """The published round function, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def python_gumbel(seed: int, position: int, choice: int, token: int) -> float:
    key = [seed % (1 << 32), seed >> 32]
    x = python_philox([token // 4, position, choice, 0], key)[token % 4]
    return -math.log(-math.log1p(-(x + 0.5) * 2.0**-32))


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter: str, key: str, output: str) -> None:
    c, k = ([torch.tensor([w]) for w in words(t)] for t in (counter, key))
    assert [int(x) for x in philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))] == words(output)
    assert python_philox(words(counter), words(key)) == words(output)


def test_known_answer_of_the_fast_form() -> None:
    out = noise.vocabulary_words(4, position=0, choice=0, seed=0)
    assert out.tolist() == words(KNOWN[0][2])


WORD = st.integers(0, (1 << 32) - 1)


@settings(deadline=None)
@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 1 << 20),
    WORD,
    st.lists(st.integers(0, 1 << 18), min_size=1, max_size=9),
)
def test_gumbel_is_what_the_design_says(
    seed: int, position: int, choice: int, ids: list[int]
) -> None:
    expected = [python_gumbel(seed, position, choice, token) for token in ids]
    tokens = torch.tensor(ids)
    values = gumbel(seed, position, choice, tokens)
    assert values.dtype == torch.float32
    assert values.tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()
    device_form = noise._gumbel_torch(seed, position, choice, tokens)
    assert torch.equal(device_form, values)


def test_key_words_are_low_then_high() -> None:
    ids = torch.arange(8)
    low, high = gumbel(1, 5, 0, ids), gumbel(1 << 32, 5, 0, ids)
    assert not torch.equal(low, high)
    assert low[0].item() == pytest.approx(python_gumbel(1, 5, 0, 0))


def test_positions_broadcast() -> None:
    ids = torch.tensor([[3, 9, 1], [4, 70, 2]])
    both = gumbel(77, torch.tensor([[10], [11]]), 2, ids)
    assert both.shape == (2, 3)
    for row, position in enumerate((10, 11)):
        assert torch.equal(both[row], gumbel(77, position, 2, ids[row]))
    assert gumbel(77, torch.arange(3), 0, torch.tensor([5])).shape == (3,)
    assert gumbel(77, 3, 0, torch.tensor(5)).shape == ()
    assert gumbel(77, 3, 0, torch.zeros(0, dtype=torch.int32)).shape == (0,)


def test_a_value_depends_on_nothing_else() -> None:
    whole = gumbel(5, 9, 1, torch.arange(1000))
    some = torch.tensor([999, 3, 500, 3])
    assert torch.equal(gumbel(5, 9, 1, some), whole[some])


@pytest.mark.parametrize("vocab_size", [1, 5, 4096, 70_001])
def test_vocabulary_words_equal_words_of_each(vocab_size: int) -> None:
    arguments = [np.array([v], np.uint64) for v in (12, 3, (5 << 32) + 6)]
    each = noise.token_words(np.arange(vocab_size), *arguments)
    assert np.array_equal(noise.vocabulary_words(vocab_size, 12, 3, (5 << 32) + 6), each)


def test_bounds() -> None:
    ends = noise.gumbel_of(np.array([0, (1 << 32) - 1], np.uint64))
    assert ends.dtype == np.float32
    assert GUMBEL_LOW < ends[1] < GUMBEL_LOW + 0.02
    assert GUMBEL_HIGH - 0.02 < ends[0] < GUMBEL_HIGH


def test_moments() -> None:
    values = gumbel(1234, 7, 0, torch.arange(200_000)).double()
    assert values.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert values.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
