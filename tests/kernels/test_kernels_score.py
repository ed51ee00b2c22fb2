"""Scores of given tokens on a device are those of `slipstream.sampling.logprobs_of`."""

from __future__ import annotations

import math
import random

import pytest
import torch

from slipstream.kernels.draw import Draws, DrawScratch
from slipstream.kernels.score import score
from slipstream.sampling import logprobs_of

MOST = 5


@pytest.mark.parametrize("vocab", [40, 2048, 5003])
def test_scores(device: torch.device, vocab: int) -> None:
    rng = random.Random(vocab)
    rows, split = 11, 4
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[2] = logits[2].round()  # ties
    tokens = [rng.randrange(vocab) for _ in range(rows)]
    wanted = [rng.choice((-1, 0, 2, MOST)) for _ in range(rows)]
    scores, scratch = Draws.allocate(rows, MOST, device), DrawScratch(rows, vocab, device)
    scores.logprobs.fill_(math.nan)
    on_device = torch.tensor(tokens, dtype=torch.int32, device=device)
    best = torch.tensor(wanted, dtype=torch.int32, device=device)
    for first, last in ((0, split), (split, rows)):
        score(logits[first:last].to(device), first, on_device, best, scores, scratch)
    assert len(set(wanted)) > 2
    for row, want in enumerate(wanted):
        if want < 0:
            assert scores.logprobs[row].isnan()
            continue
        ((own, top),) = logprobs_of(logits[row : row + 1], tokens[row : row + 1], want)
        assert float(scores.logprobs[row]) == pytest.approx(own, abs=1e-6)
        assert scores.top_ids[row].tolist() == [t for t, _ in top] + [-1] * (MOST - want)
        values = scores.top_values[row, :want].tolist()
        assert values == pytest.approx([value for _, value in top], abs=1e-6)
        mine = dict(zip(scores.top_ids[row].tolist(), values, strict=False))
        assert mine.get(tokens[row], float(scores.logprobs[row])) == float(scores.logprobs[row])
