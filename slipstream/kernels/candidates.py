"""From the logits of block rows to the best tokens of every depth, with what each is worth.

The reference is `services.draft.candidates`, where the scores are explained. Two passes: the
largest logit of every CHUNK ids and the row's mass, at the speed of memory; then one program for
each row.

Tokens are ordered by (logit, lower id first); no two are equal. Chunks are ordered by their best
tokens, which is the order by (largest logit, lower chunk first), as a lower chunk has the lower
ids. So the best k tokens lie in the best k chunks: a token outside of them comes after the best
tokens of those k.

Both orders are of integers that hold value and id in one. The k largest are found by bisection for
a threshold that exactly k of them reach; the time does not depend on k, and the k stay unsorted
until their scores are known. Then each is ranked by counting the larger ones.

NaN counts as -inf, and so does the mask token, which is never a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.drafting import (
    CHOICE,
    COUNT,
    FIELDS,
    INTS,
    LOOKED_AT,
    NEEDED,
    NODES,
    NOISY,
    OUTSIDE,
    REALS,
    ROW,
    SEED_HIGH,
    SEED_LOW,
    SHARE,
    SLOT,
    START,
    Blocks,
    Specs,
)
from slipstream.kernels.noise import gumbel

CHUNK = 64
PART_CHUNKS = 64  # chunks of one program of the first pass
MOST_VOCABULARY = 1 << 18  # chunks of a row that are held in registers: 4,096

_CHUNK = tl.constexpr(CHUNK)
_ID_BITS = tl.constexpr(20)
_IDS = tl.constexpr((1 << 20) - 1)
_SPREAD = tl.constexpr(16.0)  # how far below the largest logit the last candidate may well lie
_TILE = 64  # candidates that others are counted against at a time


@dataclass(frozen=True, slots=True)
class CandidateScratch:
    """What passes between the kernels, for `rows` rows of logits.

    Attributes:
        peaks: (rows, chunks) fp32, largest logit of every chunk.
        mass: (rows, parts, 2) fp32: largest logit m of each part, and the sum of exp(logit - m).
        chunks: (rows, ranks) int32, the best chunks.
        keys: (2, rows, ranks) int64, the best tokens and their scores.
    """

    peaks: Tensor
    mass: Tensor
    chunks: Tensor
    keys: Tensor

    @classmethod
    def allocate(
        cls, rows: int, vocab_size: int, ranks: int, device: torch.device
    ) -> CandidateScratch:
        """Raises ValueError when the vocabulary is larger than MOST_VOCABULARY."""
        if vocab_size > MOST_VOCABULARY:
            raise ValueError(f"a vocabulary of {vocab_size} is more than {MOST_VOCABULARY}")
        parts = triton.cdiv(vocab_size, CHUNK * PART_CHUNKS)
        return cls(
            torch.empty(rows, parts * PART_CHUNKS, device=device),
            torch.empty(rows, parts, 2, device=device),
            torch.empty(rows, ranks, dtype=torch.int32, device=device),
            torch.empty(2, rows, ranks, dtype=torch.int64, device=device),
        )

    def narrow(self, ranks: int) -> CandidateScratch:
        """The same memory for at most as many ranks."""
        rows = len(self.chunks)
        chunks = self.chunks.view(-1)[: rows * ranks].view(rows, ranks)
        keys = self.keys.view(-1)[: 2 * rows * ranks].view(2, rows, ranks)
        return CandidateScratch(self.peaks, self.mass, chunks, keys)


def candidates(
    logits: Tensor,
    entries: Tensor,
    blocks: Blocks,
    specs: Specs,
    tokens: Tensor,
    logprobs: Tensor,
    found: Tensor,
    scratch: CandidateScratch,
    *,
    ranks: int,
    mask_id: int,
    first_row: int = 0,
) -> None:
    """Writes the candidates of n block rows, of those that may become nodes.

    Args:
        logits: (n, V) fp32 contiguous, of rows first_row .. first_row + n - 1.
        entries: (R,) int32, the block of each row, -1 where there is none.
        specs: of every slot with LOOKED_AT at most `ranks`.
        tokens: (R, ranks) int32 and
        logprobs: (R, ranks) fp32 contiguous, receive the first NEEDED candidates of a row.
        found: (R,) int32, receives how many of those have a finite log-probability.
        ranks: 1, for steps that have chains without noise only: then the best token is written and
            neither `logprobs` nor `found`; else a power of two from 16 to 256.
        scratch: for at least n rows and `ranks` ranks; overwritten.
    """
    rows, vocab_size = logits.shape
    parts = scratch.mass.shape[1]
    scored = ranks > 1
    where = (blocks.fields, entries, first_row)
    _peaks[(rows, parts)](
        logits, *where, scratch.peaks, scratch.mass,
        VOCABULARY=vocab_size, MASK=mask_id, PARTS=parts, CHUNKS=PART_CHUNKS, SCORED=scored,
        num_warps=4,
    )  # fmt: skip
    if not scored:
        _first[(rows,)](
            logits, *where, scratch.peaks, tokens,
            VOCABULARY=vocab_size, MASK=mask_id, CHUNKS=parts * PART_CHUNKS,
            LANES=triton.next_power_of_2(parts * PART_CHUNKS), RANKS=tokens.shape[1], num_warps=4,
        )  # fmt: skip
        return
    _pick[(rows,)](
        logits, *where, specs.ints, specs.reals,
        scratch.peaks, scratch.mass, scratch.chunks, scratch.keys[0], scratch.keys[1],
        tokens, logprobs, found,
        VOCABULARY=vocab_size, MASK=mask_id, PARTS=parts, CHUNKS=parts * PART_CHUNKS,
        LANES=triton.next_power_of_2(parts * PART_CHUNKS),
        PART_LANES=triton.next_power_of_2(parts), RANKS=ranks, TILE=min(_TILE, ranks),
        num_warps=4 if ranks <= 64 else 8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _drafts(row, fields, entries):
    """The block of a row, or -1 when the row is none that may become a node."""
    entry = tl.load(entries + row)
    block = fields + tl.maximum(entry, 0) * FIELDS
    own = row - tl.load(block + ROW)
    end = tl.minimum(tl.load(block + NODES), tl.load(block + COUNT))
    return tl.where((entry >= 0) & (own > 0) & (own < end), entry, -1)


@triton.jit
def _read(logits, ids, VOCABULARY: tl.constexpr, MASK: tl.constexpr):
    """Logits of `ids`: -inf for NaN, the mask token and what is no token."""
    usable = (ids < VOCABULARY) & (ids != MASK)
    x = tl.load(logits + ids, mask=usable, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit(do_not_specialize=["first_row"])
def _peaks(
    logits, fields, entries, first_row, peaks, mass,
    VOCABULARY: tl.constexpr, MASK: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    SCORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    if _drafts(first_row + row, fields, entries) < 0:
        return
    wide_row = row.to(tl.int64)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    ids = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    x = _read(logits + wide_row * VOCABULARY, ids, VOCABULARY, MASK)
    largest = tl.max(x, 1)
    tl.store(peaks + wide_row * (PARTS * CHUNKS) + chunk, largest)
    if SCORED:
        top = tl.max(largest, 0)
        base = tl.where(top > float("-inf"), top, 0.0)
        at = mass + (wide_row * PARTS + part) * 2
        tl.store(at, top)
        tl.store(at + 1, tl.sum(tl.sum(tl.exp(x - base), 1), 0))


@triton.jit(do_not_specialize=["first_row"])
def _first(
    logits, fields, entries, first_row, peaks, tokens,
    VOCABULARY: tl.constexpr, MASK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """The best token of a row."""
    row = tl.program_id(0)
    if _drafts(first_row + row, fields, entries) < 0:
        return
    wide_row = row.to(tl.int64)
    lane = tl.arange(0, LANES)
    peak = tl.load(peaks + wide_row * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf"))
    largest = tl.max(peak, 0)
    chunk = tl.min(tl.where(peak == largest, lane, LANES), 0)
    ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
    x = _read(logits + wide_row * VOCABULARY, ids, VOCABULARY, MASK)
    token = tl.min(tl.where(x == tl.max(x, 0), ids, VOCABULARY - 1), 0)
    tl.store(tokens + (first_row + wide_row) * RANKS, token)


@triton.jit
def _ordered(value):
    """int64 in [0, 2^32) in the order of fp32 values; zeros of both signs are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    low = bits.to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits < 0, 0xFFFFFFFF - low, low + 0x80000000)


@triton.jit
def _key(value, index):
    """int64 >= 0 whose order is (value, lower index first)."""
    return (_ordered(value) << _ID_BITS) | (index ^ _IDS).to(tl.int64)


@triton.jit
def _value(key):
    """The value of a key, fp32."""
    ordered = key >> _ID_BITS
    low = tl.where(ordered >= 0x80000000, ordered - 0x80000000, 0xFFFFFFFF - ordered)
    return low.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(keys, count, middle, NUMEL: tl.constexpr):
    """What exactly `count` (1 .. NUMEL) of the keys reach, all of which differ.

    The bisection begins at `middle`, of any value: halves of all keys there may be would need some
    ten more steps.
    """
    low = tl.full((), 0, tl.int64)
    high = tl.max(keys, 0) + 1
    # `count` keys or more reach `low`, fewer reach `high`. When they are next to each other, one
    # key at most makes the difference, so that `low` is reached by `count` keys.
    reached = tl.full((), NUMEL, tl.int32)
    while reached != count:
        reached = tl.sum((keys >= middle).to(tl.int32), 0)
        low = tl.where(reached >= count, middle, low)
        high = tl.where(reached >= count, high, middle)
        middle = (low + high) >> 1
    return low


@triton.jit
def _gather(
    logits, peaks, chunks, keys, count,
    VOCABULARY: tl.constexpr, MASK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Writes the keys of the best `count` tokens of a row, in no order."""
    lane = tl.arange(0, LANES)
    peak = tl.load(peaks + lane, mask=lane < CHUNKS, other=float("-inf"))
    # What is no chunk comes after all chunks.
    key = tl.where(lane < CHUNKS, _key(peak, lane), (lane ^ _IDS).to(tl.int64))
    wanted = tl.minimum(count, LANES)
    near = _ordered(tl.max(peak, 0) - _SPREAD) << _ID_BITS
    threshold = _threshold(key, wanted, near, LANES)
    best = key >= threshold
    tl.store(chunks + tl.cumsum(best.to(tl.int32), 0) - 1, lane, mask=best)
    tl.debug_barrier()
    place = tl.arange(0, RANKS * _CHUNK)
    rank = place // _CHUNK
    chunk = tl.load(chunks + rank, mask=rank < wanted, other=0)
    ids = chunk * _CHUNK + place % _CHUNK
    real = (rank < wanted) & (ids < VOCABULARY)
    x = _read(logits, tl.where(real, ids, VOCABULARY), VOCABULARY, MASK)
    key = tl.where(real, _key(x, ids), (place ^ _IDS).to(tl.int64))
    # The last of those chunks' best tokens is the `count`-th best at least.
    best = key >= _threshold(key, count, threshold >> _ID_BITS << _ID_BITS, RANKS * _CHUNK)
    tl.store(keys + tl.cumsum(best.to(tl.int32), 0) - 1, key, mask=best)
    tl.debug_barrier()


@triton.jit
def _log_total(top, total, value, score, outside):
    """Log of the noisy scores' mass: of the ranked tokens and, in the mean, of all others.

    `top` and `total` are the row's: its mass is total x exp(top).
    """
    inside = tl.sum(tl.exp(value.to(tl.float64) - top), 0) / total
    rest = top + tl.log(total) + tl.log(1.0 - tl.minimum(inside, 1.0 - 1e-7)) + outside
    wide = score.to(tl.float64)
    highest = tl.maximum(tl.max(wide, 0), rest)
    return highest + tl.log(tl.sum(tl.exp(wide - highest), 0) + tl.exp(rest - highest))


@triton.jit(do_not_specialize=["first_row"])
def _pick(
    logits, fields, entries, first_row, ints, reals,
    peaks, mass, chunks, keys, score_keys, tokens, logprobs, found,
    VOCABULARY: tl.constexpr, MASK: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr, PART_LANES: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    entry = _drafts(first_row + row, fields, entries)
    if entry < 0:
        return
    block = fields + entry * FIELDS
    slot = tl.load(block + SLOT)
    spec = ints + slot * INTS
    wide_row = row.to(tl.int64)
    keys += wide_row * RANKS
    score_keys += wide_row * RANKS
    count = tl.minimum(tl.minimum(tl.load(spec + LOOKED_AT), RANKS), VOCABULARY)
    _gather(
        logits + wide_row * VOCABULARY, peaks + wide_row * CHUNKS, chunks + wide_row * RANKS,
        keys, count, VOCABULARY, MASK, CHUNKS, LANES, RANKS,
    )  # fmt: skip
    lane = tl.arange(0, RANKS)
    there = lane < count
    key = tl.load(keys + lane, mask=there, other=0)
    token = ((key & _IDS) ^ _IDS).to(tl.int32)
    value = tl.where(there, _value(key), float("-inf"))
    part = tl.arange(0, PART_LANES)
    at = mass + (wide_row * PARTS + part) * 2
    tops = tl.load(at, mask=part < PARTS, other=float("-inf"))
    sums = tl.load(at + 1, mask=part < PARTS, other=0.0).to(tl.float64)
    top = tl.max(tops, 0)
    top = tl.where(top > float("-inf"), top, 0.0).to(tl.float64)
    total = tl.sum(sums * tl.exp(tops.to(tl.float64) - top), 0)
    score = value
    if tl.load(spec + NOISY) > 0:
        real = reals + slot * REALS
        position = tl.load(block + START) + first_row + row - tl.load(block + ROW)
        noise = gumbel(
            tl.load(spec + SEED_LOW), tl.load(spec + SEED_HIGH), position,
            tl.load(spec + CHOICE), token,
        )  # fmt: skip
        score = value + tl.load(real + SHARE).to(tl.float32) * noise
        outside = _log_total(top, total, value, score, tl.load(real + OUTSIDE))
    else:
        outside = top + tl.log(total)
    score_key = tl.where(there, _key(score, token), -1)
    tl.store(score_keys + lane, score_key)
    tl.debug_barrier()
    rank = tl.zeros((RANKS,), tl.int32)
    for first in range(0, RANKS, TILE):
        others = tl.load(score_keys + first + tl.arange(0, TILE))
        rank += tl.sum((others[None, :] > score_key[:, None]).to(tl.int32), 1)
    needed = tl.minimum(tl.load(spec + NEEDED), count)
    kept = there & (rank < needed)
    out = (first_row + wide_row) * RANKS + rank
    tl.store(tokens + out, token, mask=kept)
    finite = value > float("-inf")
    logprob = tl.where(finite, (score.to(tl.float64) - outside).to(tl.float32), float("-inf"))
    tl.store(logprobs + out, logprob, mask=kept)
    tl.store(found + first_row + row, tl.sum((kept & finite).to(tl.int32), 0))
