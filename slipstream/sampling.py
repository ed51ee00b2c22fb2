"""Drawing tokens: the whole pipeline, plainly, and log-probabilities.

The order is: bias, penalties and bans; the grammar; temperature; min-p; top-k; top-p; then the
token with the largest sum of logit / T and its Gumbel value (see `slipstream.noise`). Everything is
fp32, except that probability masses are summed in fp64. Of equal values the lower id comes first,
in every filter and in the argmax.

`draw` is the reference for one row; `draw_rows` gives the same tokens for many rows, faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream import races
from slipstream.noise import gumbel
from slipstream.params import History, RowSampling, SamplingParams, fp32, tree_rows

__all__ = [
    "NOTHING",
    "History",
    "RowSampling",
    "SamplingParams",
    "apply_edits",
    "draw",
    "draw_rows",
    "logprobs_of",
    "tree_rows",
]


NOTHING = -1
"""Drawn where a grammar and the bans leave no token."""


def apply_edits(logits: Tensor, row: RowSampling) -> Tensor:
    """A copy of `logits` (V,) fp32 with bias, penalties, bans and grammar applied."""
    params, history = row.params, row.history or History()
    logits = logits.clone()

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=logits.device)

    for token, bias in params.logit_bias.items():
        logits[token] += number(bias)
    counts = history.output + Counter(row.path)
    if params.repetition_penalty != 1.0:
        factor = number(params.repetition_penalty)
        for token in history.prompt | counts.keys():
            value = logits[token]
            logits[token] = value / factor if value > 0 else value * factor
    for token, count in counts.items():
        logits[token] -= number(params.frequency_penalty) * count
        logits[token] -= number(params.presence_penalty)
    if row.position < row.banned_until:
        logits[list(row.banned)] = -math.inf
    logits[list(params.banned_ids)] = -math.inf
    if row.allowed is not None:
        allowed = torch.from_numpy(races.allowed_ids(row.allowed, len(logits)))
        logits[~allowed.to(logits.device)] = -math.inf
    return logits


def draw(logits: Tensor, row: RowSampling) -> int:
    """The token of one row: the reference.

    `logits` is (V,) fp32, raw. NaN counts as -inf; a row without any finite logit gives id 0, with
    a grammar NOTHING.
    """
    params = row.params
    edited = apply_edits(logits, row)
    edited = torch.where(edited.isnan(), -math.inf, edited)
    if row.allowed is not None and edited.max() == -math.inf:
        return NOTHING
    if params.greedy:
        return int(edited.argmax())
    scaled = edited / torch.tensor(params.temperature, dtype=torch.float32, device=edited.device)
    values, order = scaled.sort(descending=True, stable=True)
    kept = values > -math.inf
    if params.min_p > 0:
        kept &= values >= values[0] - torch.tensor(params.min_p_depth).float()
    if params.top_k > 0:
        kept[params.top_k :] = False
    if params.top_p < 1:
        mass = torch.where(kept, (values.double() - values[0].double()).exp(), 0.0)
        before = mass.cumsum(0) - mass
        kept &= before < fp32(params.top_p) * mass.sum()
    kept[0] = True
    ids = order[kept].sort().values
    scores = scaled[ids] + gumbel(params.seed, row.position, params.choice, ids)
    return int(ids[scores.argmax()])


def draw_rows(logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """The token of every row of `logits` (R, V), raw: `draw` of each, faster.

    A token depends on its own row alone. The few rows whose nucleus ends too close to the winner
    for the fast path's sums go to `draw`.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows to draw for {logits.shape[0]} rows of logits")
    host = logits.detach().to(device="cpu", dtype=torch.float32)
    drawn = races.run(host.numpy(), rows)
    return [
        draw(host[index], rows[index]) if token is None else token
        for index, token in enumerate(drawn)
    ]


def logprobs_of(
    logits: Tensor, tokens: Sequence[int], top: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-softmax of raw logits (R, V) at one token per row, and the `top` best of each row.

    The best come first; of equal ones the lower id.
    """
    if len(tokens) != logits.shape[0]:
        raise ValueError(f"{len(tokens)} tokens for {logits.shape[0]} rows")
    exact = logits.double()
    logprobs = exact - exact.logsumexp(-1, keepdim=True)  # (R, V)
    index = torch.tensor(list(tokens), device=logits.device).unsqueeze(-1)
    own = logprobs.gather(-1, index).squeeze(-1).float().tolist()
    return [(value, _best(row, top)) for value, row in zip(own, logprobs, strict=True)]


def _best(logprobs: Tensor, top: int) -> list[tuple[int, float]]:
    top = min(top, logprobs.shape[0])
    if top == 0:
        return []
    edge = logprobs.topk(top).values[-1]
    ids = (logprobs >= edge).nonzero().squeeze(-1)  # ascending, more than `top` when the edge ties
    values, order = logprobs[ids].sort(descending=True, stable=True)
    pairs = zip(ids[order].tolist(), values.float().tolist(), strict=True)
    return list(pairs)[:top]
