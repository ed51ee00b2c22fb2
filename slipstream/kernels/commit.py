"""What stays of a step's rows: KV is moved together, features are normed and put beside it.

Indices in a slot are turned into places by the block tables: index s lies at row s % page_size of
page tables[slot, s // page_size].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.walk import HEADER, Walks
from slipstream.layers.device_rows import DeviceRows

_STEPS = 16
_LANES = 256
_HEADER = tl.constexpr(HEADER)


@triton.jit
def flat_row(tables, slot, index, mask, PAGES: tl.constexpr, PAGE: tl.constexpr):
    """Row of `index` of a slot among all pages' rows, int64; 0 outside of `mask`."""
    page = tl.load(tables + slot * PAGES + index // PAGE, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, page * PAGE + index % PAGE, 0)


def move_kv(kv: Tensor, rows: DeviceRows, walks: Walks) -> None:
    """Moves the KV of each entry's node path[i] to index start + i of its slot, in all layers.

    `rows.starts` are the starts before the step. Must run after `walk`; reads no slot state.

    Args:
        kv: (layers, 2, pages, page_size, kv_heads, head_dim), contiguous.
    """
    layers, _, pages, page_size, kv_heads, head_dim = kv.shape
    width = kv_heads * head_dim
    lanes = min(_LANES, triton.next_power_of_2(width))
    most = walks.path.shape[1]
    _move_kv[(rows.most_entries, layers * 2, triton.cdiv(width, lanes))](
        kv,
        rows.counts,
        rows.slots,
        rows.starts,
        rows.tables,
        walks.result,
        walks.path,
        PLANE=pages * page_size * width,
        WIDTH=width,
        PAGE=page_size,
        PAGES=rows.tables.shape[1],
        MOST=most,
        STEPS=min(_STEPS, triton.next_power_of_2(most)),
        LANES=lanes,
        num_warps=4,
    )


@triton.jit
def _move_kv(
    kv,
    counts,
    slots,
    starts,
    tables,
    result,
    path,
    PLANE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    MOST: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program moves some columns of one entry in one of the planes.

    The order makes it safe that sources are also destinations. path ascends and begins with 0, so
    path[i] >= i. A group of STEPS moves loads all its sources before it stores anything, and the
    groups ascend: what groups up to i have written are indices up to i, and every source that is
    still to be read is path[j] >= j > i. Other programs touch other columns, planes or slots.
    """
    entry = tl.program_id(0)
    if entry >= tl.load(counts):
        return
    length = tl.load(result + entry * (MOST + _HEADER))
    slot = tl.load(slots + entry).to(tl.int64)
    start = tl.load(starts + entry)
    base = kv + tl.program_id(1).to(tl.int64) * PLANE
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    first = length * 0
    while first < length:
        step = first + tl.arange(0, STEPS)
        node = tl.load(path + entry * MOST + step, mask=step < length, other=0)
        moved = (step < length) & (node > step)
        if tl.max(moved.to(tl.int32), 0) > 0:
            source = flat_row(tables, slot, start + node, moved, PAGES, PAGE)
            target = flat_row(tables, slot, start + step, moved, PAGES, PAGE)
            mask = moved[:, None] & (lane < WIDTH)[None, :]
            values = tl.load(base + source[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
            tl.debug_barrier()  # all warps have loaded
            tl.store(base + target[:, None] * WIDTH + lane[None, :], values, mask=mask)
            tl.debug_barrier()
        first += STEPS


def norm_scatter(
    projected: Tensor,
    weight: Tensor,
    eps: float,
    row_dest: Tensor,
    rows: DeviceRows,
    features: Tensor,
    page_size: int,
) -> None:
    """features[place of row_dest[r]] = RMS norm of projected[r], for rows that have a destination.

    Rounded as `RMSNorm` does it: fp32 inside, then the type of `projected`, then that of
    `features`.

    Args:
        projected: (n, H), n <= R; row r is row r of the step.
        weight: (H,).
        row_dest: (R,) int32, index in its slot or -1, as `walk` says; in prefill the positions.
        features: (pages * page_size, H).
    """
    count, width = projected.shape
    _norm_scatter[(count,)](
        projected,
        weight,
        rows.entries,
        rows.slots,
        rows.tables,
        row_dest,
        features,
        STRIDE=projected.stride(0),
        EPS=eps,
        H=width,
        PAGE=page_size,
        PAGES=rows.tables.shape[1],
        BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 1024 else 4,
    )


@triton.jit
def _norm_scatter(
    projected,
    weight,
    entries,
    slots,
    tables,
    row_dest,
    features,
    STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + row)
    index = tl.load(row_dest + row)
    if (entry < 0) | (index < 0):
        return
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(projected + row * STRIDE + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + EPS)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * scale * weights).to(x.dtype)
    slot = tl.load(slots + entry).to(tl.int64)
    place = flat_row(tables, slot, index, index >= 0, PAGES, PAGE)
    tl.store(features + place * H + column, normed.to(features.dtype.element_ty), mask=inside)


def gather_rows(features: Tensor, indices: Tensor, count: int, out: Tensor) -> None:
    """out[i] = features[indices[i]] for i < count.

    Args:
        features: (rows, H), contiguous.
        indices: (n,) int32, n >= count.
        out: (n, H) of the features' type, contiguous.
    """
    width = out.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    grid = (count, triton.cdiv(width, block))
    _gather_rows[grid](features, indices, out, H=width, BLOCK=block)


@triton.jit
def _gather_rows(features, indices, out, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(indices + row).to(tl.int64)
    value = tl.load(features + source * H + column, mask=column < H, other=0.0)
    tl.store(out + row.to(tl.int64) * H + column, value, mask=column < H)
