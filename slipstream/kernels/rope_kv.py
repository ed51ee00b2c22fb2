"""Head norms and RoPE of fresh queries and keys, and the scatter of keys and values into pages.

A row's place in the cache is found through `DeviceRows`; rows without an entry (padding) are left
alone. Page offsets are 64-bit: a cache has more elements than 32 bits can count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.rope import Rope

TABLE_CHUNK = 8192
HEADS = 8  # most heads of one program


def rope_table(rope: Rope, positions: int) -> Tensor:
    """Cosines and sines of positions 0 .. positions - 1: (positions, 2, dim / 2) fp32.

    The values are those of `rope`, bit for bit. Made once: it fills its memory in pieces.
    """
    half, device = rope.dim // 2, rope.frequencies.device
    table = torch.empty(positions, 2, half, device=device)
    for first in range(0, positions, TABLE_CHUNK):
        last = min(positions, first + TABLE_CHUNK)
        cos, sin = rope(torch.arange(first, last, device=device))
        table[first:last, 0] = cos[:, 0, :half]
        table[first:last, 1] = sin[:, 0, half:]
    return table


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """What of R rows is the same in every layer, found once for a forward pass.

    A layer's kernel that looked it up itself would follow entry, slot and page from one load to the
    next, and take most of its time for that.

    Attributes:
        places: (R,) int64, the row's place in the cache seen as (pages * page_size) of them: row i
            of entry e lies at index starts[e] + i of its slot; -1 of a row without an entry.
        rotations: (R, 2, dim / 2) fp32, of `rope_table` what belongs to the row's position.
    """

    places: Tensor
    rotations: Tensor

    @classmethod
    def allocate(cls, rows: int, cos_sin: Tensor) -> PlacedRows:
        """Room for `rows` rows, which `cos_sin` will rotate."""
        return cls(
            torch.empty(rows, dtype=torch.int64, device=cos_sin.device),
            torch.empty(rows, *cos_sin.shape[1:], device=cos_sin.device),
        )

    def first(self, rows: int) -> PlacedRows:
        """The same memory seen as room for `rows` rows."""
        return PlacedRows(self.places[:rows], self.rotations[:rows])

    def find(self, rows: DeviceRows, cos_sin: Tensor, page_size: int) -> PlacedRows:
        """Fills both for `rows` of as many rows; returns itself.

        `cos_sin` is `rope_table`, longer than any of the rows' positions.
        """
        dim = 2 * cos_sin.shape[2]
        _find_rows[(self.places.shape[0],)](
            cos_sin, self.places, self.rotations,
            rows.entries, rows.positions, rows.slots, rows.offsets, rows.starts, rows.tables,
            rows.tables.stride(0), PAGE=page_size, DIM=dim, LANES=triton.next_power_of_2(dim),
            num_warps=1,
        )  # fmt: skip
        return self


def rope_write(
    qkv: Tensor,
    placed: PlacedRows,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_out: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    value_scale: float = 1.0,
) -> None:
    """Norms and rotates the queries and keys of R rows; scatters keys and values to their pages.

    Args:
        qkv: (R, (heads + 2 * kv) * hd) contiguous; left as it is.
        placed: where each row goes, and its rotation.
        q_norm, k_norm: (hd,) each, or both None.
        q_out: (R, heads, hd) contiguous, receives the queries of every row that has an entry.
        k_pages, v_pages: (pages, page_size, kv, hd) contiguous.
        value_scale: factor on the values.
    """
    heads, dim = q_out.shape[1:]
    kv = k_pages.shape[2]
    block = min(HEADS, triton.next_power_of_2(kv))
    q_blocks, kv_blocks = triton.cdiv(heads, block), triton.cdiv(kv, block)
    none = qkv  # never read
    _rope_write[(qkv.shape[0], q_blocks + 2 * kv_blocks)](
        qkv, none if q_norm is None else q_norm, none if k_norm is None else k_norm, eps,
        q_out, k_pages, v_pages, value_scale, placed.places, placed.rotations,
        HEADS=heads, KV=kv, HD=dim, DIM=2 * placed.rotations.shape[2],
        NORM=q_norm is not None, Q_BLOCKS=q_blocks, KV_BLOCKS=kv_blocks, BLOCK=block,
        LANES=triton.next_power_of_2(dim), num_warps=4 if block * dim > 512 else 2,
    )  # fmt: skip


def rope_context(
    both: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    rows: DeviceRows,
    k_cache: Tensor,
    v_cache: Tensor,
    value_scale: float = 1.0,
) -> None:
    """Writes the context keys and values of T rows to the pages of all L layers.

    Args:
        both: (T, L * 2 * kv * hd) contiguous, of each layer k, then v.
        norm: (L * kv, hd), the head norms of the keys.
        cos_sin: `rope_table`.
        rows: of T rows; row i of entry e is written to index starts[e] + i of its slot, and
            rotated by positions[row].
        k_cache, v_cache: (L, pages, page_size, kv, hd) contiguous.
        value_scale: factor on the values.
    """
    layers, pages, page_size, kv, dim = k_cache.shape
    block = min(HEADS, triton.next_power_of_2(kv))
    blocks = triton.cdiv(kv, block)
    _rope_context[(both.shape[0], layers * blocks)](
        both, norm, eps, cos_sin, k_cache, v_cache, value_scale,
        rows.entries, rows.positions, rows.slots, rows.offsets, rows.starts, rows.tables,
        rows.tables.stride(0), PAGE=page_size, LAYERS=layers, KV=kv, HD=dim,
        LAYER_STRIDE=k_cache.stride(0), DIM=2 * cos_sin.shape[2], BLOCKS=blocks, BLOCK=block,
        LANES=triton.next_power_of_2(dim), num_warps=4 if block * dim > 512 else 2,
    )  # fmt: skip


def rope_reference(
    x: Tensor, norm: Tensor | None, eps: float, cos_sin: Tensor, positions: Tensor
) -> Tensor:
    """x (R, heads, hd) with the head norm (hd,) or (heads, hd), rotated; in x's type."""
    if norm is not None:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * norm
    cos, sin = cos_sin[positions.long()].unsqueeze(2).unbind(1)  # (R, 1, dim / 2) each
    half = cos.shape[-1]
    first, second, rest = x.float().tensor_split((half, 2 * half), -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*turned, rest], -1).to(x.dtype)


def scatter_reference(pages: Tensor, rows: DeviceRows, values: Tensor) -> None:
    """Writes values (R, kv, hd) of the rows that have an entry to their places in `pages`."""
    size = pages.shape[1]
    for row, entry in enumerate(rows.entries.tolist()):
        if entry >= 0:
            index = int(rows.starts[entry]) + row - int(rows.offsets[entry])
            page = int(rows.tables[int(rows.slots[entry]), index // size])
            pages[page, index % size] = values[row].to(pages.dtype)


@triton.jit
def _place(row, entry, slots, offsets, starts, tables, table_stride, PAGE: tl.constexpr):
    """Index of a row in the cache seen as (pages * page_size) places, 64 bits; -1 of a row without
    an entry, whose is -1."""
    has_entry = entry >= 0
    entry = tl.maximum(entry, 0)
    index = tl.load(starts + entry) + row - tl.load(offsets + entry)
    index = tl.where(has_entry, index, 0)
    slot = tl.load(slots + entry).to(tl.int64)
    page = tl.load(tables + slot * table_stride + index // PAGE).to(tl.int64)
    return tl.where(has_entry, page * PAGE + index % PAGE, -1)


@triton.jit
def _rotated(
    source, heads_at, present, weight, weight_at, eps, rotation,
    HD: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """(BLOCK, LANES) fp32: heads at source + heads_at (BLOCK, 1), normed and rotated.

    Each element's partner in the rotation is read again: it is in the nearest cache.
    """
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, LANES)[None, :]
    inside = present & (lane < HD)
    turns = lane < DIM
    partner = tl.where(turns, tl.where(lane < HALF, lane + HALF, lane - HALF), lane)
    x = tl.load(source + heads_at + lane, mask=inside, other=0.0)
    y = tl.load(source + heads_at + partner, mask=inside, other=0.0)
    x_wide = x.to(tl.float32)
    y_wide = y.to(tl.float32)
    if NORM:
        x_weight = tl.load(weight + weight_at + lane, mask=inside, other=0.0).to(tl.float32)
        y_weight = tl.load(weight + weight_at + partner, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_wide * x_wide, 1) / HD + eps)[:, None]
        x_wide = ((x_wide * scale).to(x.dtype).to(tl.float32) * x_weight).to(x.dtype)
        y_wide = ((y_wide * scale).to(x.dtype).to(tl.float32) * y_weight).to(x.dtype)
        x_wide = x_wide.to(tl.float32)
        y_wide = y_wide.to(tl.float32)
    angle = tl.where(lane < HALF, lane, lane - HALF)
    cos = tl.load(rotation + angle, mask=turns, other=1.0)
    sin = tl.load(rotation + HALF + angle, mask=turns, other=0.0)
    return x_wide * cos + y_wide * tl.where(lane < HALF, -sin, sin)


@triton.jit(do_not_specialize=["table_stride"])
def _find_rows(
    cos_sin, places, rotations, entries, positions, slots, offsets, starts, tables, table_stride,
    PAGE: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    entry = tl.load(entries + row)
    position = tl.load(positions + row)
    position = tl.where(entry >= 0, position, 0).to(tl.int64)
    place = _place(row, entry, slots, offsets, starts, tables, table_stride, PAGE)
    lane = tl.arange(0, LANES)
    rotation = tl.load(cos_sin + position * DIM + lane, mask=lane < DIM)
    tl.store(rotations + row.to(tl.int64) * DIM + lane, rotation, mask=lane < DIM)
    tl.store(places + row, place)


@triton.jit
def _rope_write(
    qkv, q_norm, k_norm, eps, q_out, k_pages, v_pages, value_scale, places, rotations,
    HEADS: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    Q_BLOCKS: tl.constexpr, KV_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    # Nothing branches on the place, for loads after a branch would wait for it; a row without one
    # has no heads to store.
    place = tl.load(places + row)
    heads = tl.where(place >= 0, HEADS, 0)
    kv_heads = tl.where(place >= 0, KV, 0)
    wide_row = row.to(tl.int64)
    rotation = rotations + wide_row * DIM
    source = qkv + wide_row * ((HEADS + 2 * KV) * HD)
    lane = tl.arange(0, LANES)[None, :]
    if part < Q_BLOCKS:
        head = part * BLOCK + tl.arange(0, BLOCK)[:, None]
        present = head < HEADS
        q = _rotated(
            source, head * HD, present, q_norm, head * 0, eps, rotation, HD, LANES, DIM, NORM
        )
        target = q_out + wide_row * (HEADS * HD) + head * HD + lane
        tl.store(target, q.to(q_out.dtype.element_ty), mask=(head < heads) & (lane < HD))
    elif part < Q_BLOCKS + KV_BLOCKS:
        head = (part - Q_BLOCKS) * BLOCK + tl.arange(0, BLOCK)[:, None]
        present = head < KV
        k = _rotated(
            source + HEADS * HD, head * HD, present, k_norm, head * 0, eps, rotation,
            HD, LANES, DIM, NORM,
        )  # fmt: skip
        target = k_pages + place * (KV * HD) + head * HD + lane
        tl.store(target, k.to(k_pages.dtype.element_ty), mask=(head < kv_heads) & (lane < HD))
    else:
        head = (part - Q_BLOCKS - KV_BLOCKS) * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside = (head < KV) & (lane < HD)
        v = tl.load(source + (HEADS + KV) * HD + head * HD + lane, mask=inside, other=0.0)
        v = (v.to(tl.float32) * value_scale).to(v_pages.dtype.element_ty)
        target = v_pages + place * (KV * HD) + head * HD + lane
        tl.store(target, v, mask=(head < kv_heads) & (lane < HD))


@triton.jit(do_not_specialize=["table_stride"])
def _rope_context(
    both, norm, eps, cos_sin, k_cache, v_cache, value_scale,
    entries, positions, slots, offsets, starts, tables, table_stride,
    PAGE: tl.constexpr, LAYERS: tl.constexpr, KV: tl.constexpr,
    HD: tl.constexpr, LAYER_STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    layer = tl.program_id(1) // BLOCKS
    entry = tl.load(entries + row)
    if entry < 0:
        return
    place = _place(row, entry, slots, offsets, starts, tables, table_stride, PAGE)
    rotation = cos_sin + tl.load(positions + row).to(tl.int64) * DIM
    source = both + row.to(tl.int64) * (LAYERS * 2 * KV * HD) + layer * (2 * KV * HD)
    lane = tl.arange(0, LANES)[None, :]
    head = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)[:, None]
    present = head < KV
    inside = present & (lane < HD)
    weight = norm + layer * (KV * HD)
    k = _rotated(source, head * HD, present, weight, head * HD, eps, rotation, HD, LANES, DIM, True)
    target = layer.to(tl.int64) * LAYER_STRIDE + place * (KV * HD) + head * HD + lane
    tl.store(k_cache + target, k.to(k_cache.dtype.element_ty), mask=inside)
    v = tl.load(source + KV * HD + head * HD + lane, mask=inside, other=0.0)
    v = (v.to(tl.float32) * value_scale).to(v_cache.dtype.element_ty)
    tl.store(v_cache + target, v, mask=inside)
