"""From logits to candidates: order, log-probabilities, the request's own noise."""

from __future__ import annotations

import pytest
import torch

from services.draft import candidates
from services.draft.candidates import Block, best, choose, log_mass
from services.draft.runner import Drafting
from slipstream.noise import gumbel
from slipstream.tree import TreeSpec, candidates_needed, resolve_spec

B = 8
CHAIN = resolve_spec("chain", block_size=B)
TREE = resolve_spec("top2gap", 4, 16, block_size=B)
WIDE = resolve_spec("best_first", None, 32, block_size=B)
QUIET = resolve_spec("accum_logp", 4, 16, block_size=B, shared_noise=False)


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3


@pytest.mark.parametrize("vocabulary", [7, 320, 1024, 49152])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_best_is_topk_with_the_lower_id_first(vocabulary: int, count: int) -> None:
    logits = (logits_of(5, vocabulary) * 4).round() / 4  # many ties
    values, ids = best(logits, count)
    count = min(count, vocabulary)
    assert values.shape == ids.shape == (5, count)
    assert torch.equal(values, logits.topk(count).values)
    assert torch.equal(logits.gather(1, ids), values)
    if count == 1:
        assert torch.equal(ids[:, 0], logits.argmax(-1))
    for row, found in zip(values.tolist(), ids.tolist(), strict=True):
        assert len(set(found)) == count
        assert found == [i for _, i in sorted(zip([-v for v in row], found, strict=True))]


def test_log_mass_is_log_sum_exp() -> None:
    logits = logits_of(4, 512)
    mass = log_mass(logits, logits.argmax(-1, keepdim=True))
    torch.testing.assert_close(mass, logits.logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("vocabulary", [320, 7, 1024])
def test_chains_only_take_the_argmax(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "log_mass", None)
    logits = (logits_of(10, vocabulary) * 2).round() / 2  # ties: the lower id
    blocks = [Block(3, 5, Drafting(CHAIN)), Block(7, 9, Drafting(CHAIN))]
    first, second = choose(logits, blocks)
    tokens = [row[0] for row in (*first.tokens, *second.tokens)]
    assert tokens == logits.argmax(-1).tolist()
    assert first.logprobs == second.logprobs == []


@pytest.mark.parametrize("spec", [TREE, WIDE])
def test_greedy_trees_get_full_log_probabilities(spec: TreeSpec) -> None:
    logits = logits_of(9, 1024)
    found = choose(logits, [Block(2, 0, Drafting(CHAIN)), Block(7, 4, Drafting(spec))])[1]
    count = candidates_needed(spec)
    expected = logits[2:].log_softmax(-1).topk(count)
    assert found.tokens == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(found.logprobs), expected.values)


def test_noise_is_ignored_where_it_is_not_shared_or_not_drawn() -> None:
    logits = logits_of(7, 1024)
    plain = choose(logits, [Block(7, 4, Drafting(QUIET))])
    assert choose(logits, [Block(7, 4, Drafting(QUIET, 1.0, 5))]) == plain
    assert choose(logits, [Block(7, 4, Drafting(TREE, 0.0, 5))]) == choose(
        logits, [Block(7, 4, Drafting(TREE, 0.0, 6))]
    )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_the_noise_is_the_targets(
    spec: TreeSpec, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target draws argmax(logits / T + noise) at the position that depth d decides; a draft
    with the target's logits, which knows it, is right every time."""
    monkeypatch.setattr(candidates, "NOISE_SHARE", 1.0)
    logits = logits_of(7, 1024) * 2
    start, seed, choice = 40, (7 << 40) + 3, 2
    other = Block(2, 9, Drafting(TREE, 0.9, 77))
    both = torch.cat([logits_of(2, 1024, 9), logits])
    drafting = Drafting(spec, temperature, seed, choice)
    found = choose(both, [other, Block(7, start, drafting)])[1]
    for depth in range(7):
        noise = gumbel(seed, start + depth + 1, choice, torch.arange(1024))
        drawn = (logits[depth] / temperature + noise).argmax().item()
        assert found.tokens[depth][0] == drawn


def test_noisy_log_probabilities_are_ordered_and_proper() -> None:
    logits = logits_of(7, 1024)
    found = choose(logits, [Block(7, 4, Drafting(WIDE, 0.8, 3))])[0]
    for tokens, logprobs in zip(found.tokens, found.logprobs, strict=True):
        assert len(set(tokens)) == len(tokens) == 31
        assert logprobs == sorted(logprobs, reverse=True)
        assert torch.tensor(logprobs).exp().sum() < 1.0


def test_at_low_temperature_noise_changes_nothing() -> None:
    logits = logits_of(7, 1024)
    noisy = choose(logits, [Block(7, 4, Drafting(TREE, 2e-5, 3))])[0]
    greedy = choose(logits, [Block(7, 4, Drafting(TREE))])[0]
    assert noisy.tokens == greedy.tokens


def test_infinite_logits_stay_at_the_end() -> None:
    logits = logits_of(3, 1024)
    logits[:, 5:] = -torch.inf
    found = choose(logits, [Block(3, 4, Drafting(WIDE, 0.8, 3))])[0]
    assert all(max(row[:5]) < 5 for row in found.tokens)
    assert all(value == -torch.inf for row in found.logprobs for value in row[5:])
    assert not torch.tensor(found.logprobs).isnan().any()
