"""Draws through a wide tree follow the exact distribution, and are those of plain decoding."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from slipstream.params import SamplingParams
from slipstream.tree import resolve_spec
from tests.pairloop import PairLoop
from tests.tiny import Pair, make_pair

VOCAB = 12
PROMPT = [3, 1, 4, 1, 5]
LENGTH = 3
SLOTS = 50
SAMPLING = {"temperature": 0.35, "top_p": 0.97, "top_k": 9}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp("pair")
    return make_pair(folder, "qwen3", "jetspec", vocab=VOCAB)


def filtered(logits: torch.Tensor) -> list[float]:
    """Temperature, top-k, then top-p, written out: the independent version."""
    p = torch.softmax(logits.double() / SAMPLING["temperature"], -1)
    order = sorted(range(VOCAB), key=lambda v: (-p[v].item(), v))[: int(SAMPLING["top_k"])]
    kept, mass, whole = [], 0.0, sum(p[v].item() for v in order)
    for v in order:
        if mass >= SAMPLING["top_p"] * whole:
            break
        kept.append(v)
        mass += p[v].item()
    return [p[v].item() / mass if v in kept else 0.0 for v in range(VOCAB)]


def exact(pair: Pair) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    prefixes = list(itertools.product(range(VOCAB), repeat=LENGTH - 1))
    with torch.inference_mode():
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        logits = model(ids).logits[:, len(PROMPT) - 1 :]
    result = {}
    for prefix, rows in zip(prefixes, logits, strict=True):
        steps = [filtered(row) for row in rows]
        head = steps[0][prefix[0]] * steps[1][prefix[1]]
        for last in range(VOCAB):
            result[(*prefix, last)] = head * steps[2][last]
    return result


def draws(pair: Pair, count: int) -> tuple[list[tuple[int, ...]], int]:
    """Continuations by seed, through width 4 trees of 24 nodes; and how many drafts were taken."""
    loop = PairLoop(pair, SLOTS, resolve_spec("top2gap", 4, 24, block_size=8))
    taken, accepted = [], 0
    for first in range(0, count, SLOTS):
        sampling = [SamplingParams(**SAMPLING, seed=first + i) for i in range(SLOTS)]
        for row in loop.run([PROMPT] * SLOTS, sampling, LENGTH):
            taken.append(tuple(row.tokens))
            accepted += row.accepted
    return taken, accepted


def p_value(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square over cells with at least 5 expected draws; the rest is one cell."""
    total = sum(seen.values())
    assert all(expected[outcome] > 0 for outcome in seen), "a draw the filters exclude"
    big = [outcome for outcome, p in expected.items() if p * total >= 5]
    observed = [seen[outcome] for outcome in big]
    wanted = [expected[outcome] * total for outcome in big]
    rest = total - sum(observed)
    small = max(total - sum(wanted), 0.0)
    if small > 1e-6 * total:
        observed.append(rest)
        wanted.append(small)
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [w * scale for w in wanted]).pvalue)


@pytest.mark.parametrize(
    "count", [pytest.param(2_000, id="2k"), pytest.param(20_000, id="20k", marks=pytest.mark.slow)]
)
def test_continuations_follow_the_exact_distribution(pair: Pair, count: int) -> None:
    taken, accepted = draws(pair, count)
    assert accepted > count / 10, "the trees were hardly used"
    assert p_value(Counter(taken), exact(pair)) > 0.01


def test_draws_are_those_of_plain_decoding(pair: Pair) -> None:
    drafted, _ = draws(pair, 2 * SLOTS)
    loop = PairLoop(pair, SLOTS, None)
    plain = []
    for first in (0, SLOTS):
        sampling = [SamplingParams(**SAMPLING, seed=first + i) for i in range(SLOTS)]
        plain += [tuple(r.tokens) for r in loop.run([PROMPT] * SLOTS, sampling, LENGTH)]
    assert drafted == plain
