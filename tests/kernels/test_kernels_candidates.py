"""The kernels' candidates against `services.draft.candidates` and against a sort of all tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.draft.candidates import MOST_SHARE, NOISE_SHARE, Block, choose
from services.draft.runner import Drafting
from slipstream.kernels.candidates import CandidateScratch, candidates
from slipstream.kernels.drafting import BLOCK_INTS, SPEC_INTS, SPEC_REALS, Blocks, Specs, spec_row
from slipstream.tree import TreeSpec, candidates_needed, resolve_spec

B = 5
CHAIN = resolve_spec("chain", block_size=B)
TREE = resolve_spec("top2gap", 4, 16, block_size=B)
QUIET = resolve_spec("accum_logp", 7, 16, block_size=B, shared_noise=False)
FIRST = resolve_spec("best_first", None, 64, block_size=B)
WIDEST = resolve_spec("best_first", 255, 256, block_size=B)
MASK_ID = 3


@dataclass(frozen=True, slots=True)
class Found:
    """(R, ranks) tokens and log-probabilities, and how many of each row count."""

    tokens: Tensor
    logprobs: Tensor
    counts: list[int]


def table_row(drafting: Drafting) -> tuple[list[int], list[float]]:
    block = Block(1, 0, drafting)
    return spec_row(
        drafting.tree,
        looked_at=block.width,
        noisy=block.noisy,
        seed=drafting.seed,
        choice=drafting.choice,
        share=NOISE_SHARE * drafting.temperature,
        most_share=MOST_SHARE,
    )


def run(
    logits: Tensor,
    blocks: list[tuple[Drafting, int, int]],
    device: torch.device,
    ranks: int,
    slice_rows: int = 1000,
) -> Found:
    """Candidates of (drafting, start, nodes) blocks of B rows; `logits` is of all rows."""
    slots = len(blocks) + 1
    ints = torch.full((slots, SPEC_INTS), -7, dtype=torch.int32)
    reals = torch.full((slots, SPEC_REALS), math.nan, dtype=torch.float64)
    fields = torch.full((len(blocks) + 1, BLOCK_INTS), -7, dtype=torch.int32)
    rows = len(logits)
    entries = torch.full((rows,), -1, dtype=torch.int32)
    for index, (drafting, start, nodes) in enumerate(blocks):
        slot = slots - 1 - index
        spec_ints, spec_reals = table_row(drafting)
        ints[slot], reals[slot] = torch.tensor(spec_ints), torch.tensor(spec_reals).double()
        fields[index] = torch.tensor([slot, start, 9, nodes, B, index * B, 0, 0])
        entries[index * B : index * B + B] = index
    counts = torch.tensor([len(blocks), B * len(blocks)], dtype=torch.int32)
    tokens = torch.full((rows, ranks), -7, dtype=torch.int32, device=device)
    logprobs = torch.full((rows, ranks), math.nan, device=device)
    found = torch.full((rows,), -7, dtype=torch.int32, device=device)
    scratch = CandidateScratch.allocate(min(rows, slice_rows), logits.shape[1], ranks, device)
    for buffer in (scratch.peaks, scratch.mass):
        buffer.fill_(math.nan)
    scratch.chunks.fill_(-7)
    scratch.keys.fill_(-7)
    for first in range(0, rows, slice_rows):
        candidates(
            logits[first : first + slice_rows].to(device),
            entries.to(device),
            Blocks(counts.to(device), fields.to(device)),
            Specs(ints.to(device), reals.to(device)),
            tokens,
            logprobs,
            found,
            scratch,
            ranks=ranks,
            mask_id=MASK_ID,
            first_row=first,
        )
    return Found(tokens.cpu(), logprobs.cpu(), found.tolist())


def ordered(row: Tensor, count: int) -> list[int]:
    """The best ids, the lower first in a tie; NaN and the mask token are worth nothing."""
    row = row.nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf)
    row[MASK_ID] = -math.inf
    return [i for _, i in sorted(zip([-x for x in row.tolist()], range(len(row)), strict=True))][
        :count
    ]


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3


@pytest.mark.parametrize("vocabulary", [40, 320, 4096, 9001])
def test_chains_take_the_best_token(vocabulary: int, device: torch.device) -> None:
    logits = (logits_of(2 * B + 3, vocabulary) * 2).round() / 2  # ties: the lower id
    logits[:, MASK_ID] = 50.0
    logits[2, 7] = math.nan
    logits[3] = -math.inf
    blocks = [(Drafting(CHAIN), 5, B), (Drafting(CHAIN), 9, 3)]
    found = run(logits, blocks, device, 1)
    want = [-7] * len(logits)
    for row in (1, 2, 3, 4, B + 1, B + 2):
        want[row] = ordered(logits[row], 1)[0]
    assert found.tokens[:, 0].tolist() == want
    assert found.counts == [-7] * len(logits)


@pytest.mark.parametrize("vocabulary", [40, 320, 9001])
@pytest.mark.parametrize("step", [None, 0.5, 100.0])
def test_order_is_exact(vocabulary: int, step: float | None, device: torch.device) -> None:
    """Also in ties, of few values or of none but one; zeros of both signs are one value."""
    logits = logits_of(3 * B, vocabulary)
    if step is not None:
        logits = (logits / step).round() * step
    logits[:, MASK_ID] = 50.0
    logits[1, ::2] = math.nan
    logits[2, 5:] = -math.inf
    blocks = [(Drafting(spec), 5, B) for spec in (TREE, QUIET, FIRST)]
    found = run(logits, blocks, device, 64)
    for index, (drafting, _, _) in enumerate(blocks):
        needed = min(candidates_needed(drafting.tree), vocabulary)
        for row in range(index * B + 1, index * B + B):
            assert found.tokens[row, :needed].tolist() == ordered(logits[row], needed)
            assert found.tokens[row, needed:].tolist() == [-7] * (64 - needed)
    assert found.counts[2] == 4
    assert math.isfinite(found.logprobs[2, 3].item())


def test_log_probabilities_are_of_the_whole_vocabulary(device: torch.device) -> None:
    logits = logits_of(2 * B, 9001)
    found = run(logits, [(Drafting(QUIET), 5, B), (Drafting(FIRST), 5, 4)], device, 64, 3)
    logits[:, MASK_ID] = -math.inf
    want = logits.double().log_softmax(-1)
    for row in [*range(1, B), *range(B + 1, B + 4)]:
        count = found.counts[row]
        assert count == (7 if row < B else min(candidates_needed(FIRST), 63))
        got = found.logprobs[row, :count].double()
        expected = want[row].gather(0, found.tokens[row, :count].long())
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-6)
    assert found.counts[0] == found.counts[B] == found.counts[2 * B - 1] == -7


@pytest.mark.parametrize("vocabulary", [40, 4096, 9001])
def test_noise_ranks_as_the_reference_does(vocabulary: int, device: torch.device) -> None:
    blocks = [
        (Drafting(TREE, 0.7, 2**63 + 12345, 2), 5, B),
        (Drafting(CHAIN, 1.0, 77), 9, B),
        (Drafting(FIRST, 1.5, 2**32 - 1), 0, B),
        (Drafting(QUIET, 1.0, 3), 1, B),
        (Drafting(TREE, 0.0, 3), 1, B),
    ]
    logits = logits_of(B * len(blocks), vocabulary)
    found = run(logits, blocks, device, 64)
    rows = [row for row in range(len(logits)) if row % B]
    dense = logits[rows].clone()
    dense[:, MASK_ID] = -math.inf
    wanted = choose(dense, [Block(B - 1, start, drafting) for drafting, start, _ in blocks])
    for index, want in enumerate(wanted):
        for depth, tokens in enumerate(want.tokens):
            row = index * B + 1 + depth
            assert found.tokens[row, : len(tokens)].tolist() == tokens
            if want.logprobs:
                got = found.logprobs[row, : found.counts[row]]
                expected = torch.tensor(want.logprobs[depth][: len(got)])
                assert len(got) >= len(tokens) - 1  # the mask token may be the last
                torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("ranks", [16, 32, 128, 256])
def test_any_number_of_candidates(ranks: int, device: torch.device) -> None:
    spec = TreeSpec(WIDEST.mode, ranks - 1, 256)
    logits = (logits_of(B, 4500, ranks) * 8).round() / 8
    found = run(logits, [(Drafting(spec), 5, 3)], device, ranks)
    for row in (1, 2):
        assert found.tokens[row, : ranks - 1].tolist() == ordered(logits[row], ranks - 1)
        assert found.counts[row] == ranks - 1


def test_random_rows_of_a_real_vocabulary(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("minutes without a GPU")
    for seed in range(50):
        logits = logits_of(3 * B, 151_936, seed)
        if seed % 2:
            logits = logits.bfloat16().float()
        blocks = [(Drafting(spec, 0.0), 5, B) for spec in (TREE, QUIET, FIRST)]
        found = run(logits, blocks, device, 64)
        for index, (drafting, _, _) in enumerate(blocks):
            needed = candidates_needed(drafting.tree)
            for row in range(index * B + 1, index * B + B):
                values = logits[row].clone()
                values[MASK_ID] = -math.inf
                best = values.sort(descending=True, stable=True).indices[:needed]
                assert found.tokens[row, :needed].tolist() == best.tolist()
