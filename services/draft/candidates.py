"""From the logits of a block to the best tokens of every depth, with what each is worth.

A tree builder wants, per depth, candidates in order and the log-probability of each being the token
that the target will draw. Without shared noise that is the draft's log-softmax l over the full
vocabulary, at any temperature: the head was trained on what targets draw.

With shared noise the draft knows part of the draw. The target takes argmax(its logits / T + G(v))
and G(v) is a function of seed, position and v (`slipstream.noise`); what the draft does not know is
how far the target's logits lie from its own. Were those distances independent Gumbel variables, the
draw given the noise would be softmax(a l + b G) for some a and b: all knowledge of G and the same
trust in l would be a = 1, b = T at small distances, none of it b = 0. Maximum likelihood over what
SmolLM2-135M draws at T 0.7 and 1 puts a between 0.93 and 1.01 and b near 0.7 T, under a causal and
a bidirectional head alike. Hence

    P(v) ~ exp(l(v) + s G(v)),   s = NOISE_SHARE x T,

which is the greedy case at T = 0. Ranking by l / T + G, as if the draft's logits were the target's,
gives away half of the gain in accepted tokens.

Noise is drawn for NOISY_CANDIDATES tokens per depth only. All the others enter the normalisation
by their mass times E[exp(s G)] = Gamma(1 - s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.draft.runner import Drafting
from slipstream.noise import gumbel
from slipstream.params import GREEDY_BELOW
from slipstream.tree import candidates_needed

NOISY_CANDIDATES = 32
NOISE_SHARE = 0.7
MOST_SHARE = 0.75  # in Gamma(1 - s), which grows without bound towards s = 1
CHUNK = 64  # vocabulary ids that compete as one in the first round of `best`


@dataclass(frozen=True, slots=True)
class Block:
    """Which rows of the logits belong to one request: `depths` rows, depth d at `start` + d."""

    depths: int
    start: int
    drafting: Drafting

    @property
    def noisy(self) -> bool:
        """Whether its candidates are ranked with the request's noise."""
        return self.drafting.tree.shared_noise and self.drafting.temperature >= GREEDY_BELOW

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted, or the order alone."""
        return not self.drafting.tree.is_chain

    @property
    def width(self) -> int:
        """Candidates per depth that are looked at."""
        needed = candidates_needed(self.drafting.tree)
        return max(needed, NOISY_CANDIDATES) if self.noisy else needed


@dataclass(frozen=True, slots=True)
class Candidates:
    """Per depth, best first; `logprobs` is empty for a chain."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def choose(logits: Tensor, blocks: Sequence[Block]) -> list[Candidates]:
    """The candidates of every block.

    `logits` is (rows, vocabulary) fp32, the blocks' depths one after the other.
    """
    if not any(block.noisy or block.scored for block in blocks):
        tokens = best(logits, 1)[1].tolist()
        return [Candidates(tokens[i:j], []) for i, j in _spans(blocks)]
    values, ids = best(logits, max(block.width for block in blocks))
    chosen = []
    for block, (i, j) in zip(blocks, _spans(blocks), strict=True):
        rows = logits[i:j] if block.scored else None
        if block.noisy:
            chosen.append(_with_noise(block, values[i:j], ids[i:j], rows))
        else:
            chosen.append(_plain(block, values[i:j], ids[i:j], rows))
    return chosen


def _spans(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    spans, at = [], 0
    for block in blocks:
        spans.append((at, at + block.depths))
        at += block.depths
    return spans


def _plain(block: Block, values: Tensor, ids: Tensor, logits: Tensor | None) -> Candidates:
    width = block.width
    logprobs: list[list[float]] = []
    if logits is not None:
        logprobs = (values[:, :width] - log_mass(logits, ids)).tolist()
    return Candidates(ids[:, :width].tolist(), logprobs)


def _with_noise(block: Block, values: Tensor, ids: Tensor, logits: Tensor | None) -> Candidates:
    drafting = block.drafting
    needed = candidates_needed(drafting.tree)
    values, ids = values[:, : block.width], ids[:, : block.width]
    positions = torch.arange(1, block.depths + 1, device=ids.device)[:, None] + block.start
    noise = gumbel(drafting.seed, positions, drafting.choice, ids)  # (depths, width)
    share = NOISE_SHARE * drafting.temperature
    scores = values + share * noise
    ranked, order = scores.topk(min(needed, scores.shape[1]))
    tokens = ids.gather(1, order).tolist()
    if logits is None:
        return Candidates(tokens, [])
    mass = log_mass(logits, ids)
    inside = (values.logsumexp(-1, keepdim=True) - mass).clamp_(max=-1e-7)  # log of a share
    outside = mass + torch.log(-torch.expm1(inside)) + math.lgamma(1 - min(share, MOST_SHARE))
    total = torch.cat([scores, outside], 1).logsumexp(-1, keepdim=True)
    return Candidates(tokens, (ranked - total).tolist())


def log_mass(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-sum-exp of every row, (rows, 1); `ids` (rows, any) holds the best id of each row first.

    Torch's fused log-softmax is twice as fast as its log-sum-exp on a CPU.
    """
    top = ids[:, :1]
    return logits.gather(1, top) - torch.log_softmax(logits, -1).gather(1, top)


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row and their ids, (rows, count) each; lower id first in a tie.

    Two rounds: the best `count` values lie in the `count` chunks of the vocabulary with the largest
    maxima, and finding those is one pass at the speed of memory: over 49,152 ids three to five
    times as fast as `argmax` and `topk`. Which of several equal values at the end of a list of more
    than one are taken is up to `topk`.
    """
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    chunks = vocabulary // CHUNK
    if vocabulary % CHUNK or chunks < 2 * count:
        if count == 1:
            return logits.max(-1, keepdim=True)
        values, ids = logits.topk(count, sorted=False)
    else:
        view = logits.view(rows, chunks, CHUNK)
        peaks = view.amax(-1)
        if count == 1:
            picked = peaks.argmax(-1, keepdim=True)
            values, where = view.gather(1, picked[..., None].expand(-1, 1, CHUNK)).max(-1)
            return values, picked * CHUNK + where
        picked = peaks.topk(count, sorted=False).indices  # (rows, count)
        inside = view.gather(1, picked[..., None].expand(-1, -1, CHUNK)).view(rows, -1)
        values, where = inside.topk(count, sorted=False)
        ids = picked.gather(1, where // CHUNK) * CHUNK + where % CHUNK
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
