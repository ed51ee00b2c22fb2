"""Draws over the vocabulary of Qwen3-8B, from logits as a sure model has them, or flat ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cases.bench import FP32, QWEN, Bench, Case, Errors, Probe, ragged
from services.target.device_slots import DeviceSlots
from services.target.runner import SlotAdmit
from slipstream.kernels.draw import Draws, DrawScratch, draw_full, draw_greedy
from slipstream.sampling import SamplingParams, draw, logprobs_of, tree_rows

MOST_LOGPROBS = 20
CHECKED = 8  # rows that the reference draws too: tens of ms each
LIKELY = 64
ENTRY = 16
LOGPROB_LIMIT = 1e-5
PLAIN = SamplingParams(temperature=1.0)


def logits_of(bench: Bench, rows: int, vocab: int, *, flat: bool = False) -> Tensor:
    """(rows, vocab) fp32: 64 tokens of a row have most of its mass, unless it is flat."""
    logits = bench.randn(rows, vocab, dtype=FP32, scale=2.0)
    if not flat:
        likely = torch.randint(vocab, (rows, LIKELY), device=bench.device)
        logits.scatter_add_(1, likely, 8 + 4 * torch.rand(likely.shape, device=bench.device))
    return logits


def _greedy(bench: Bench, rows: int) -> Probe:
    rows, vocab = bench.size(rows), bench.model(QWEN).vocab
    moved = 4 * rows * vocab
    logits = [logits_of(bench, rows, vocab) for _ in range(bench.sets(moved))]
    tokens = bench.ints([-7] * rows)
    scratch = DrawScratch(rows, vocab, bench.device)
    calls = [partial(draw_greedy, part, 0, tokens, scratch) for part in logits]

    def check() -> Errors:
        calls[0]()
        return {"wrong": float((tokens != logits[0].argmax(-1)).float().mean())}

    return Probe(calls, moved, check, torch=[partial(torch.argmax, x, -1) for x in logits])


def _full(
    bench: Bench,
    rows: int,
    sampling: SamplingParams,
    plain: Callable[[Tensor, Tensor], object],
    logprobs: int | None = None,
    flat: bool = False,
) -> Probe:
    """Entries of a chain each, every one with its own seed."""
    rows, vocab = bench.size(rows), bench.model(QWEN).vocab
    count = min(rows, ENTRY)
    rag = ragged(bench, rows // count, count, bench.size(1024), vocab, tree=False)
    rows = rag.rows.capacity
    slots = DeviceSlots(rag.rows.most_entries, vocab, MOST_LOGPROBS, bench.device)
    params = [replace(sampling, seed=bench.rng.getrandbits(64)) for _ in rag.shapes]
    for slot, own in enumerate(params):
        admit = SlotAdmit([1] * 4, [], 1 << 20, 0, frozenset(), own, logprobs, False)
        slots.admit(slot, admit)
    moved = 4 * rows * vocab
    logits = [logits_of(bench, rows, vocab, flat=flat) for _ in range(bench.sets(moved))]
    draws = Draws.allocate(rows, MOST_LOGPROBS, bench.device)
    scratch = DrawScratch(rows, vocab, bench.device)
    calls = [
        partial(draw_full, part, 0, rag.rows, rag.trees, slots.state, draws, scratch)
        for part in logits
    ]

    def check() -> Errors:
        calls[0]()
        plans = [
            plan
            for tree, own in zip(rag.shapes, params, strict=True)
            for plan in tree_rows(tree, rag.context, own)
        ]
        picked = range(0, rows, max(1, rows // CHECKED))
        host, tokens = logits[0][list(picked)].cpu(), draws.tokens.tolist()
        wanted = [draw(part, plans[row]) for part, row in zip(host, picked, strict=True)]
        wrong = sum(tokens[row] != token for row, token in zip(picked, wanted, strict=True))
        errors = {"wrong": wrong / len(wanted)}
        if logprobs is not None:
            errors["logprobs"] = _logprob_error(host, wanted, logprobs, draws, list(picked))
            errors["wrong"] += errors["logprobs"] > LOGPROB_LIMIT
        return errors

    noise = -torch.empty_like(logits[0]).exponential_().log_()
    return Probe(calls, moved, check, torch=[partial(plain, part, noise) for part in logits])


def _logprob_error(
    logits: Tensor, tokens: list[int], best: int, draws: Draws, rows: list[int]
) -> float:
    """The largest difference of log-probabilities; infinite if best tokens differ."""
    largest = 0.0
    for row, (own, top) in zip(rows, logprobs_of(logits, tokens, best), strict=True):
        if draws.top_ids[row, :best].tolist() != [token for token, _ in top]:
            return float("inf")
        got = [float(draws.logprobs[row]), *draws.top_values[row, :best].tolist()]
        wanted = [own, *(value for _, value in top)]
        largest = max(largest, *(abs(a - b) for a, b in zip(got, wanted, strict=True)))
    return largest


def _race(logits: Tensor, noise: Tensor) -> Tensor:
    """What torch needs at least: noise that is there already."""
    return (logits + noise).argmax(-1)


def _nucleus(logits: Tensor, noise: Tensor) -> Tensor:
    values, order = logits.sort(-1, descending=True)
    mass = values.softmax(-1)
    values.masked_fill_(mass.cumsum(-1) - mass >= 0.95, -torch.inf)
    return order.gather(-1, values.add_(noise).argmax(-1, keepdim=True))


def _top_k(logits: Tensor, noise: Tensor) -> Tensor:
    values, order = logits.topk(min(50, logits.shape[-1]))
    mass = values.softmax(-1)
    values.masked_fill_(mass.cumsum(-1) - mass >= 0.95, -torch.inf)
    values.add_(noise[:, : values.shape[-1]])
    return order.gather(-1, values.argmax(-1, keepdim=True))


def _logprobs(logits: Tensor, noise: Tensor) -> Tensor:
    logits.log_softmax(-1).topk(5)
    return _race(logits, noise)


_TOP_P = replace(PLAIN, top_p=0.95)
_KINDS = {
    "T 1": partial(_full, sampling=PLAIN, plain=_race),
    "top-p .95": partial(_full, sampling=_TOP_P, plain=_nucleus),
    "top-p .95, flat": partial(_full, sampling=_TOP_P, plain=_nucleus, flat=True),
    "top-k 50, top-p": partial(_full, sampling=replace(_TOP_P, top_k=50), plain=_top_k),
    "T 1, logprobs 5": partial(_full, sampling=PLAIN, plain=_logprobs, logprobs=5),
}

CASES = [
    *(Case("draw_greedy", "", f"{rows}", partial(_greedy, rows=rows)) for rows in (16, 64, 512)),
    *(
        Case("draw_full", kind, f"{rows}", partial(make, rows=rows))
        for kind, make in _KINDS.items()
        for rows in (16, 64, 512)
    ),
]
