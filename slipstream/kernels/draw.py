"""Draws at every row of a step: `slipstream.sampling.draw` and its `logprobs_of`, on the device.

Logits come in slices of rows. Each row's vocabulary is split over programs, which write their best
into scratch; one program per row combines those. Filters are asked afterwards
(`slipstream.kernels.nucleus`). Raw logits are never changed: edits are computed on the fly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.best import combined, store_logprobs
from slipstream.kernels.draw_buffers import CHUNK as _CHUNK
from slipstream.kernels.draw_buffers import Draws as Draws
from slipstream.kernels.draw_buffers import DrawScratch as DrawScratch
from slipstream.kernels.draw_buffers import RowMasks as RowMasks
from slipstream.kernels.draw_greedy import draw_greedy as draw_greedy
from slipstream.kernels.edits import LOWEST, edited, key_id, key_value, number, order_key
from slipstream.kernels.intake import TreeRows
from slipstream.kernels.noise import gumbel_run
from slipstream.kernels.nucleus import first_kept, relative_mass
from slipstream.kernels.slot_state import (
    CHOICE,
    FLAGS,
    GRAMMAR,
    GREEDY,
    HAS_MIN_P,
    HAS_TOP_P,
    LOGPROBS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    WORDS,
    SlotState,
)
from slipstream.layers.device_rows import DeviceRows

_BLOCK = 4096
_COLUMNS = tl.constexpr(WORDS)


def draw_full(
    logits: Tensor,
    row0: int,
    rows: DeviceRows,
    trees: TreeRows,
    state: SlotState,
    draws: Draws,
    scratch: DrawScratch,
    masks: RowMasks | None = None,
) -> None:
    """Each row by its slot's whole pipeline, and logprobs where the slot wants them.

    The draw at a row decides the position after the row's own; a row's path counts as output.
    Rows of no entry, and padding within an entry, are skipped. Where a slot's grammar and bans
    leave no token, -1 is drawn and no logprobs are written.

    Args:
        logits: (n, V) fp32, rows contiguous; n at most the scratch's rows.
        row0: row of the step that logits[0] is.
        masks: None only when no slot has a grammar.
    """
    count, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK)
    inputs = (
        logits,
        rows.entries,
        rows.positions,
        rows.slots,
        rows.offsets,
        trees.ids,
        trees.parents,
        state.words,
        state.stop_bits,
        state.prompt_bits,
        state.counts,
        state.bias,
        state.stop_bits if masks is None else masks.bits,
        draws.tokens if masks is None else masks.index,
        scratch.keys,
        scratch.sums,
        row0,
    )
    whole = max(64, triton.next_power_of_2(vocab_size))
    plane = scratch.keys.stride(0)
    bitmap = state.stop_bits.shape[1]
    _race[(count, chunks)](
        *inputs,
        STRIDE=logits.stride(0),
        V=vocab_size,
        BITMAP=bitmap,
        PLANE=plane,
        CHUNKS=chunks,
        CHUNK=min(_CHUNK, whole),
        num_warps=8,
        enable_fp_fusion=False,
    )
    _decide[(count,)](
        *inputs,
        draws.tokens,
        draws.logprobs,
        draws.top_ids,
        draws.top_values,
        STRIDE=logits.stride(0),
        V=vocab_size,
        BITMAP=bitmap,
        PLANE=plane,
        CHUNKS=chunks,
        CHUNK=min(_CHUNK, whole),
        LANES=triton.next_power_of_2(chunks),
        MOST=draws.top_ids.shape[1],
        BLOCK=min(_BLOCK, whole),
        num_warps=16,
        enable_fp_fusion=False,
    )


@triton.jit
def _row_of(
    row,
    entry,
    positions,
    slots,
    offsets,
    ids,
    parents,
    words,
    stop_bits,
    prompt_bits,
    counts,
    bias,
    allowed,
    masked,
    V: tl.constexpr,
    BITMAP: tl.constexpr,
):
    """Where a row's state lies: position to decide, node, its tree, its slot's tables, its mask."""
    base = tl.load(offsets + entry)
    slot = tl.load(slots + entry).to(tl.int64)
    return (
        tl.load(positions + row) + 1,
        row - base,
        ids + base,
        parents + base,
        words + slot * _COLUMNS,
        stop_bits + slot * BITMAP,
        prompt_bits + slot * BITMAP,
        counts + slot * V,
        bias + slot * V,
        allowed + tl.maximum(masked, 0).to(tl.int64) * BITMAP,
    )


@triton.jit
def _mask_of(row, entry, slots, words, mask_rows):
    """Row of the bits that hold for a row; -1: nothing may be drawn; 0 without a grammar."""
    flags = tl.load(words + tl.load(slots + entry).to(tl.int64) * _COLUMNS + FLAGS)
    return tl.load(mask_rows + row, mask=flags & GRAMMAR != 0, other=0)


@triton.jit
def _is_drawn(row, entries, offsets, parents):
    """Whether a row is a node of a tree."""
    entry = tl.load(entries + row)
    base = tl.load(offsets + tl.maximum(entry, 0))
    return (entry >= 0) & ((row == base) | (tl.load(parents + row) >= 0))


@triton.jit(do_not_specialize=["row0"])
def _race(
    logits,
    entries,
    positions,
    slots,
    offsets,
    ids,
    parents,
    words,
    stop_bits,
    prompt_bits,
    counts,
    bias,
    allowed,
    mask_rows,
    keys,
    sums,
    row0,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    BITMAP: tl.constexpr,
    PLANE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best of a chunk of a row.

    Planes of `keys`: the winner by score (greedy: by value), its value, the top value, the top raw
    logit; of `sums`: masses relative to the third and the fourth. Each only where it is read.
    """
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    if not _is_drawn(row0 + index, entries, offsets, parents):
        return
    entry = tl.load(entries + row0 + index)
    row = _row_of(
        row0 + index,
        entry,
        positions,
        slots,
        offsets,
        ids,
        parents,
        words,
        stop_bits,
        prompt_bits,
        counts,
        bias,
        allowed,
        _mask_of(row0 + index, entry, slots, words, mask_rows),
        V,
        BITMAP,
    )
    own = row[4]
    flags = tl.load(own + FLAGS)
    first = chunk * CHUNK
    token = first + tl.arange(0, CHUNK)
    inside = token < V
    raw = tl.load(logits + index.to(tl.int64) * STRIDE + token, mask=inside, other=float("-inf"))
    value = edited(
        raw,
        token,
        inside,
        row[0],
        row[1],
        row[2],
        row[3],
        own,
        row[5],
        row[6],
        row[7],
        row[8],
        row[9],
    )
    at = index * CHUNKS + chunk
    if flags & GREEDY != 0:
        tl.store(keys + at, tl.max(tl.where(inside, order_key(value, token), LOWEST), 0))
    else:
        scaled = tl.div_rn(value, number(own, TEMPERATURE) + tl.zeros_like(value))
        low = tl.load(own + SEED_LOW)
        high = tl.load(own + SEED_HIGH)
        noise = gumbel_run(low, high, row[0], tl.load(own + CHOICE), first, CHUNK)
        race = tl.where(inside, order_key(scaled + noise, token), LOWEST)
        key = tl.where(inside, order_key(scaled, token), LOWEST)
        winner = tl.max(race, 0)
        tl.store(keys + at, winner)
        tl.store(keys + PLANE + at, tl.max(tl.where(race == winner, key, LOWEST), 0))
        top = tl.max(key, 0)
        tl.store(keys + 2 * PLANE + at, top)
        if (flags & HAS_TOP_P != 0) & (flags & HAS_MIN_P == 0) & (tl.load(own + TOP_K) == 0):
            here = inside & (scaled > float("-inf"))
            tl.store(sums + at, tl.sum(relative_mass(scaled, key_value(top), here), 0))
    if tl.load(own + LOGPROBS) >= 0:
        raw_top = tl.max(tl.where(inside, order_key(raw, token), LOWEST), 0)
        here = inside & (raw > float("-inf"))
        tl.store(keys + 3 * PLANE + at, raw_top)
        tl.store(sums + PLANE + at, tl.sum(relative_mass(raw, key_value(raw_top), here), 0))


@triton.jit(do_not_specialize=["row0"])
def _decide(
    logits,
    entries,
    positions,
    slots,
    offsets,
    ids,
    parents,
    words,
    stop_bits,
    prompt_bits,
    counts,
    bias,
    allowed,
    mask_rows,
    keys,
    sums,
    row0,
    tokens,
    logprobs,
    top_ids,
    top_values,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    BITMAP: tl.constexpr,
    PLANE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a row from its chunks' best, and its logprobs."""
    index = tl.program_id(0)
    at_row = row0 + index
    if not _is_drawn(at_row, entries, offsets, parents):
        return
    entry = tl.load(entries + at_row)
    masked = _mask_of(at_row, entry, slots, words, mask_rows)
    row = _row_of(
        at_row,
        entry,
        positions,
        slots,
        offsets,
        ids,
        parents,
        words,
        stop_bits,
        prompt_bits,
        counts,
        bias,
        allowed,
        masked,
        V,
        BITMAP,
    )
    own = row[4]
    flags = tl.load(own + FLAGS)
    at = index * CHUNKS
    lane = tl.arange(0, LANES)
    there = lane < CHUNKS
    races = tl.load(keys + at + lane, mask=there, other=LOWEST)
    winner = tl.max(races, 0)
    token = key_id(winner)
    mine = logits + index.to(tl.int64) * STRIDE
    nothing = (masked < 0) | (key_value(winner) == float("-inf"))
    some = (flags & GRAMMAR == 0) | (nothing == 0)
    filtered = (flags & (HAS_TOP_P | HAS_MIN_P) != 0) | (tl.load(own + TOP_K) > 0)
    if (flags & GREEDY == 0) & filtered & some:
        values = tl.load(keys + PLANE + at + lane, mask=there, other=LOWEST)
        key = tl.max(tl.where(races == winner, values, LOWEST), 0)
        top, whole, _ = combined(keys + 2 * PLANE, sums, at, CHUNKS, LANES)
        token = key_id(first_kept(mine, row, key, top, whole, V, BLOCK))
    tl.store(tokens + at_row, tl.where(some, token, -1))
    wanted = tl.load(own + LOGPROBS)
    if (wanted >= 0) & some:
        store_logprobs(
            mine,
            token,
            wanted,
            keys + 3 * PLANE,
            sums + PLANE,
            at,
            logprobs + at_row,
            top_ids + at_row * MOST,
            top_values + at_row * MOST,
            V,
            CHUNKS,
            CHUNK,
            LANES,
            MOST,
        )
