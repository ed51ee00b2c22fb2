"""Draws on a device are those of `slipstream.sampling`, whatever the parameters and the logits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from services.target.device_slots import DeviceSlots
from services.target.runner import SlotAdmit
from slipstream.grammar import Grammar, GrammarKind
from slipstream.kernels.draw import Draws, DrawScratch, RowMasks, draw_full, draw_greedy
from slipstream.kernels.intake import TreeRows
from slipstream.layers.device_rows import DeviceRows
from slipstream.sampling import NOTHING, History, SamplingParams, draw, logprobs_of, tree_rows
from slipstream.tree import Tree

POISON = -7
MOST = 6


@dataclass
class _Entry:
    slot: int
    start: int
    tree: Tree
    admit: SlotAdmit
    padding: int = 0
    first: int = field(default=0)
    masks: list[bytes | None] = field(default_factory=list)  # of each node, with a grammar


def _admit(
    rng: random.Random, vocab: int, sampling: SamplingParams, logprobs: int | None = None
) -> SlotAdmit:
    def some(most: int) -> list[int]:
        return [rng.randrange(min(vocab, 30)) for _ in range(rng.randint(1, most))]

    return SlotAdmit(
        some(20),
        some(9),
        1000,
        rng.choice((0, 0, 4, 12)),
        frozenset(some(3)),
        sampling,
        logprobs,
        False,
    )


def _sampling(rng: random.Random, vocab: int) -> SamplingParams:
    penalised = rng.random() < 0.4
    bias = {rng.randrange(vocab): rng.choice((-100.0, 3.3, 0.1)) for _ in range(rng.randint(0, 4))}
    return SamplingParams(
        temperature=rng.choice((0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 2.5)),
        top_p=rng.choice((1.0, 1.0, 0.9999, 0.95, 0.5, 0.1)),
        top_k=rng.choice((0, 0, 1, 3, 20, 400, 1 << 31)),
        min_p=rng.choice((0.0, 0.0, 0.01, 0.2, 1.0)),
        presence_penalty=rng.choice((0.0, 0.7)) if penalised else 0.0,
        frequency_penalty=rng.choice((0.0, 0.3, -1.1)) if penalised else 0.0,
        repetition_penalty=rng.choice((1.0, 1.3, 0.8)) if penalised else 1.0,
        logit_bias=bias if rng.random() < 0.3 else {},
        seed=rng.getrandbits(64),
        choice=rng.choice((0, 2)),
        banned_ids=frozenset((0, 7, 11)) if rng.random() < 0.2 else frozenset(),
    )


def _logits(rng: random.Random, rows: int, vocab: int, broken: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    logits = torch.randn(rows, vocab, generator=generator) * rng.choice((0.1, 2.0, 8.0))
    kind = rng.random()
    if kind < 0.4:
        logits = (logits * 2).round() / 2  # ties
    if kind > 0.9:
        logits = torch.zeros(rows, vocab)
    if broken:
        where = torch.rand(rows, vocab, generator=generator)
        logits[where < 0.2] = -math.inf
        logits[where > 0.95] = math.nan
        logits[0] = rng.choice((-math.inf, math.nan))
    return logits


def _tree(rng: random.Random, vocab: int, nodes: int) -> Tree:
    tree = Tree([rng.randrange(vocab)], [-1], [0])
    for node in range(1, nodes):
        parent = rng.randint(max(0, node - 3), node - 1)
        taken = {t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == parent}
        token = rng.choice([t for t in range(min(vocab, 30)) if t not in taken])
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
    return tree


def _rows(
    entries: Sequence[_Entry], capacity: int, most: int, device: torch.device
) -> tuple[DeviceRows, TreeRows]:
    rows = DeviceRows.allocate(capacity, most, torch.zeros(8, 4, dtype=torch.int32), device, 1)
    trees = TreeRows.allocate(capacity, most, device)
    rows.entries.fill_(-1)
    offsets = [0]
    for index, entry in enumerate(entries):
        entry.first = at = offsets[-1]
        used = len(entry.tree)
        end = at + used + entry.padding
        rows.entries[at:end] = index
        rows.positions[at:end] = entry.start
        rows.positions[at : at + used] = torch.tensor(entry.tree.depths).to(device) + entry.start
        trees.ids[at : at + used] = torch.tensor(entry.tree.tokens).to(device)
        trees.parents[at : at + used] = torch.tensor(entry.tree.parents).to(device)
        rows.slots[index], rows.starts[index], trees.used[index] = entry.slot, entry.start, used
        offsets.append(end)
    rows.offsets[: len(offsets)] = torch.tensor(offsets).to(device)
    rows.offsets[len(offsets) :] = offsets[-1]
    rows.counts.copy_(torch.tensor([len(entries), offsets[-1]]))
    return rows, trees


def _draws(rows: int, vocab: int, device: torch.device) -> tuple[Draws, DrawScratch]:
    draws, scratch = Draws.allocate(rows, MOST, device), DrawScratch(rows, vocab, device)
    draws.tokens.fill_(POISON)
    draws.top_ids.fill_(POISON)
    draws.logprobs.fill_(math.nan)
    draws.top_values.fill_(math.nan)
    scratch.keys.fill_(2**62)
    scratch.sums.fill_(math.nan)
    return draws, scratch


def _expected(entry: _Entry, logits: Tensor) -> list[int]:
    admit = entry.admit
    history = History(admit.prompt_ids, admit.output_ids) if admit.sampling.penalised else None
    until = len(admit.prompt_ids) + admit.min_tokens
    plans = tree_rows(entry.tree, entry.start, admit.sampling, history, admit.stop_ids, until)
    for node, mask in enumerate(entry.masks):
        nothing = bytes(4)
        plans[node] = replace(plans[node], allowed=nothing if mask is None else mask)
    return [draw(logits[entry.first + node], plan) for node, plan in enumerate(plans)]


def _case(
    rng: random.Random, vocab: int, device: torch.device, sampling: SamplingParams | None = None
) -> None:
    """Entries of random requests, their rows drawn in two slices."""
    broken = rng.random() < 0.2
    slots = DeviceSlots(8, vocab, MOST, device)
    entries = []
    for slot in rng.sample(range(8), rng.randint(1, 3)):
        logprobs = None if broken else rng.choice((None, 0, 3, MOST))
        admit = _admit(rng, vocab, sampling or _sampling(rng, vocab), logprobs)
        slots.admit(slot, _admit(rng, vocab, _sampling(rng, vocab)))  # whom it replaces
        if rng.random() < 0.4:
            admit = replace(admit, grammar=Grammar(GrammarKind.JSON_OBJECT))
        slots.admit(slot, admit)
        start = admit.known_len + rng.randint(0, 5)
        entry = _Entry(slot, start, _tree(rng, vocab, rng.randint(1, 4)), admit, slot % 2)
        if admit.grammar is not None:
            entry.masks = [_mask(rng, vocab) for _ in entry.tree.tokens]
        entries.append(entry)
    capacity = sum(len(e.tree) + e.padding for e in entries) + 2
    rows, trees = _rows(entries, capacity, 4, device)
    logits = _logits(rng, capacity, vocab, broken)
    draws, scratch = _draws(capacity, vocab, device)
    masks = _row_masks(entries, capacity, vocab, device)
    split = rng.randint(1, capacity - 1)
    for first, last in ((0, split), (split, capacity)):
        part = logits[first:last].to(device)
        draw_full(part, first, rows, trees, slots.state, draws, scratch, masks)
    _check(entries, logits, draws)


def _mask(rng: random.Random, vocab: int) -> bytes | None:
    """Bits of few or many tokens; None where the grammar lets nobody come."""
    kind = rng.random()
    if kind < 0.1:
        return None
    chance = rng.choice((0.0, 3 / vocab, 0.5, 1.0))
    words = [
        sum(1 << bit for bit in range(32) if rng.random() < chance) for _ in range(-(-vocab // 32))
    ]
    return b"".join(word.to_bytes(4, "little") for word in words)


def _row_masks(
    entries: Sequence[_Entry], capacity: int, vocab: int, device: torch.device
) -> RowMasks:
    index = torch.full((capacity,), -1, dtype=torch.int32)
    bits = []
    for entry in entries:
        for node, mask in enumerate(entry.masks):
            if mask is not None:
                index[entry.first + node] = len(bits)
                bits.append(torch.frombuffer(bytearray(mask), dtype=torch.int32))
    empty = torch.zeros(-(-vocab // 32), dtype=torch.int32)
    return RowMasks(torch.stack([*bits, empty]).to(device), index.to(device))


def _check(entries: Sequence[_Entry], logits: Tensor, draws: Draws) -> None:
    tokens, written = draws.tokens.tolist(), set()
    for entry in entries:
        first, last = entry.first, entry.first + len(entry.tree)
        written |= set(range(first, last))
        expected = _expected(entry, logits)
        assert tokens[first:last] == expected, entry
        want = entry.admit.logprobs
        if want is None:
            assert draws.logprobs[first:last].isnan().all()
            continue
        reference = logprobs_of(logits[first:last], [max(0, token) for token in expected], want)
        for row, (own, best) in enumerate(reference, first):
            if tokens[row] == NOTHING:
                assert draws.logprobs[row].isnan()
                continue
            assert math.isclose(draws.logprobs[row], own, rel_tol=1e-6, abs_tol=1e-6)
            ids, values = draws.top_ids[row].tolist(), draws.top_values[row].tolist()
            assert ids[: len(best)] == [token for token, _ in best]
            assert values[: len(best)] == pytest.approx([v for _, v in best], abs=1e-6)
            assert ids[len(best) :] == [-1] * (MOST - len(best))
            assert values[len(best) :] == [-math.inf] * (MOST - len(best))
    assert all(token == POISON for row, token in enumerate(tokens) if row not in written)


@pytest.mark.parametrize("vocab", [50, 500, pytest.param(5003, marks=pytest.mark.slow)])
def test_tokens_and_logprobs(device: torch.device, cases: int, vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(max(5, cases // 100)):
        _case(rng, vocab, device)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 7, 900])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_of_flat_rows(
    device: torch.device, cases: int, top_p: float, top_k: int, min_p: float
) -> None:
    """Where winners are often not kept, so that races are run again."""
    rng = random.Random(int(top_k + 100 * (top_p + min_p)))
    for _ in range(max(1, cases // 100)):
        seed = rng.getrandbits(64)
        _case(
            rng,
            1200,
            device,
            SamplingParams(temperature=3.0, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed),
        )


@pytest.mark.parametrize("vocab", [1, 50, 4096, 9001])
def test_greedy(device: torch.device, vocab: int) -> None:
    rng = random.Random(vocab)
    logits = _logits(rng, 9, vocab, True)
    logits[3] = 1.5
    logits[4, vocab // 2] = math.inf
    logits[5] = torch.where(torch.arange(vocab) % 7 == 0, 0.0, -0.0)
    draws, scratch = _draws(20, vocab, device)
    draw_greedy(logits.to(device), 4, draws.tokens, scratch)
    wanted = torch.where(logits.isnan(), -math.inf, logits).argmax(-1).tolist()
    assert draws.tokens.tolist() == [POISON] * 4 + wanted + [POISON] * 7


def test_sampler_class() -> None:
    slots = DeviceSlots(1, 40)
    rng = random.Random(1)

    def sampler_of(
        sampling: SamplingParams,
        logprobs: int | None = None,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset((7,)),
    ) -> list[str]:
        plain = _admit(rng, 40, sampling)
        admit = SlotAdmit([1] * 5, [2], 50, min_tokens, stop_ids, sampling, logprobs, False)
        slots.admit(0, plain)
        slots.admit(0, admit)
        return [slots.sampler_class(0, position) for position in (6, 7, 8)]

    assert sampler_of(SamplingParams()) == ["greedy"] * 3
    assert sampler_of(SamplingParams(temperature=9e-6, top_k=3)) == ["greedy"] * 3
    assert sampler_of(SamplingParams(temperature=0.1)) == ["full"] * 3
    assert sampler_of(SamplingParams(presence_penalty=0.1)) == ["full"] * 3
    assert sampler_of(SamplingParams(logit_bias={3: 1.0})) == ["full"] * 3
    assert sampler_of(SamplingParams(banned_ids=frozenset({3}))) == ["full"] * 3
    assert sampler_of(SamplingParams(), logprobs=0) == ["full"] * 3
    assert sampler_of(SamplingParams(), min_tokens=3) == ["full", "full", "greedy"]
    assert sampler_of(SamplingParams(), min_tokens=1) == ["greedy"] * 3
    assert sampler_of(SamplingParams(), min_tokens=9, stop_ids=frozenset()) == ["greedy"] * 3
