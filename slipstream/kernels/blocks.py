"""Rows of a step laid out from a few numbers for each of its blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.drafting import ANCHOR, FIELDS, ROW, SLOT, START, Blocks
from slipstream.layers.device_rows import DeviceRows

_LANES = 128


def lay_out(blocks: Blocks, rows: DeviceRows, ids: Tensor | None = None, mask_id: int = 0) -> None:
    """Fills `rows`, apart from counts, bits and tables, with the rows of `blocks`.

    Args:
        blocks: E blocks, by ascending first row and without gaps; at most R rows in all.
        rows: for R rows of E entries.
        ids: (R,) int32, receives the anchor of each block, then `mask_id`.
    """
    most = max(rows.capacity, rows.most_entries + 1)
    _lay_out[(triton.cdiv(most, _LANES),)](
        blocks.counts, blocks.fields, rows.slots, rows.offsets, rows.starts, rows.entries,
        rows.positions, rows.entries if ids is None else ids,
        R=rows.capacity, E=rows.most_entries, HALVINGS=rows.most_entries.bit_length(),
        MASK=mask_id, IDS=ids is not None, LANES=_LANES, num_warps=4,
    )  # fmt: skip


def lay_out_reference(
    blocks: Blocks, rows: DeviceRows, ids: Tensor | None = None, mask_id: int = 0
) -> None:
    """What `lay_out` does, with the numbers on the host."""
    entries, total = blocks.counts.tolist()
    for name in ("slots", "starts", "positions"):
        getattr(rows, name).zero_()
    rows.entries.fill_(-1)
    rows.offsets.fill_(total)
    if ids is not None:
        ids.fill_(mask_id)
    fields = blocks.fields[:entries].tolist()
    for entry, (slot, start, anchor, _, count, row, *_) in enumerate(fields):
        rows.slots[entry], rows.starts[entry], rows.offsets[entry] = slot, start, row
        rows.entries[row : row + count] = entry
        rows.positions[row : row + count] = start + torch.arange(count)
        if ids is not None:
            ids[row] = anchor


@triton.jit
def _lay_out(
    counts, fields, slots, offsets, starts, entries, positions, ids,
    R: tl.constexpr, E: tl.constexpr, HALVINGS: tl.constexpr, MASK: tl.constexpr,
    IDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    blocks = tl.load(counts)
    total = tl.load(counts + 1)
    block = fields + at * FIELDS
    real = (at < blocks) & (at < E)
    tl.store(slots + at, tl.load(block + SLOT, mask=real, other=0), mask=at < E)
    tl.store(starts + at, tl.load(block + START, mask=real, other=0), mask=at < E)
    offset = tl.where(real, tl.load(block + ROW, mask=real, other=0), total)
    tl.store(offsets + at, offset, mask=at < E + 1)
    # The last block that begins at a row or before it, by bisection.
    inside = (at < total) & (at < R)
    entry = at * 0
    for halving in tl.static_range(HALVINGS):
        later = entry + (1 << (HALVINGS - 1 - halving))
        fits = inside & (later < blocks)
        begin = tl.load(fields + later * FIELDS + ROW, mask=fits, other=0)
        entry = tl.where(fits & (begin <= at), later, entry)
    chosen = fields + entry * FIELDS
    own = at - tl.load(chosen + ROW, mask=inside, other=0)
    start = tl.load(chosen + START, mask=inside, other=0)
    tl.store(entries + at, tl.where(inside, entry, -1), mask=at < R)
    tl.store(positions + at, tl.where(inside, start + own, 0), mask=at < R)
    if IDS:
        anchor = tl.load(chosen + ANCHOR, mask=inside, other=0)
        tl.store(ids + at, tl.where(inside & (own == 0), anchor, MASK), mask=at < R)
