"""Attention of ragged rows over paged keys and values whose lengths are known only to the device.

A program takes a tile of an entry's rows, with all query heads of one key head, over one part of
its keys: the prefix, which every row sees, is cut into parts of about the same size on the device;
the entry's own rows, masked, are the last part. Partial results are merged by their log-sum-exp.
The grid depends on capacities alone: programs go through the tiles that there are, and a part
without work writes nothing but "no keys".

The plain version is `slipstream.layers.attention_device.TorchAttention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_tiles import (
    TILE_COUNT,
    TILE_FIRST,
    TILE_OFFSET,
    TILE_SLOT,
    TILE_START,
    TILE_WORDS,
    AttentionScratch,
    plan_tiles,
)
from slipstream.layers.device_rows import DeviceRows, Mask

MOST_SPLITS = 32
ONE_SPLIT_ROWS = 512  # from here on the tiles alone fill the card
RESIDENT = 2  # programs that a multiprocessor holds, up to heads of 128
LOG2_E = math.log2(math.e)


def choose_splits(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Into how many parts the prefix is cut for a bucket of `rows` rows, so that programs abound.

    16 rows of one entry give each multiprocessor a program; more rows two. From ONE_SPLIT_ROWS on
    nothing is cut: prefix and own rows are one program's work, and there is nothing to merge.
    """
    if rows >= ONE_SPLIT_ROWS:
        return 1
    programs = kv_heads * -(-rows // 16)
    most = min(MOST_SPLITS, max(1, multiprocessors // kv_heads))
    return max(1, min(most, 2 * multiprocessors // programs))


class TritonAttention:
    """Attention for one bucket of rows: `plan` once for a forward pass, then a call per layer.

    Neither allocates nor waits: both can be captured in a CUDA graph.
    """

    def __init__(
        self,
        rows: DeviceRows,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        splits: int | None = None,
        scratch: AttentionScratch | None = None,
        multiprocessors: int | None = None,
    ) -> None:
        """For rows of the capacity of `rows`.

        Args:
            dtype: of queries, pages and output.
            splits: parts of the prefix; 1: nothing to merge. Default: `choose_splits`.
            scratch: memory to share with other instances; by default its own.
            multiprocessors: of the card; by default of the rows' device.

        Raises ValueError when `scratch` is too small.
        """
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.page_size, self.dtype = page_size, dtype
        device = rows.entries.device
        if multiprocessors is None:
            multiprocessors = _multiprocessors(device)
        if splits is None:
            splits = choose_splits(rows.capacity, kv_heads, multiprocessors)
        self.splits = splits
        # fp32 products run outside the tensor cores on twice the bytes: smaller blocks.
        self._height = 64 if dtype != torch.float32 else 32
        self._block = self._height
        self._padded_group = triton.next_power_of_2(heads // kv_heads)
        self.tile = max(1, self._height // self._padded_group)
        self.tiles = min(rows.capacity, rows.most_entries) + rows.capacity // self.tile
        self.parts = rows.capacity * heads * (splits + 1) if splits > 1 else 0
        # There may be as many tiles as entries, of one row each, but few steps have them: programs
        # for all of them would mostly come and go. Those that the card holds at once go round.
        self._grid = kv_heads, splits + 1 if splits > 1 else 1
        resident = RESIDENT * multiprocessors // math.prod(self._grid)
        self._rounds = min(self.tiles, max(resident, -(-rows.capacity // self.tile)))
        self.planned = self.tiles + self._rounds  # each program comes upon one that is none
        if scratch is None:
            scratch = AttentionScratch.allocate(self.planned, self.parts, head_dim, device)
        if len(scratch.tiles) < self.planned or len(scratch.lse) < self.parts:
            raise ValueError(f"scratch must hold {self.planned} tiles and {self.parts} parts")
        self.scratch = scratch

    @classmethod
    def for_buckets(
        cls,
        rows: DeviceRows,
        buckets: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> dict[int, TritonAttention]:
        """An instance for `rows.first(bucket)` of each bucket, all in the same scratch."""
        device = rows.entries.device
        shape = (heads, kv_heads, head_dim, page_size, dtype)
        # Which bucket needs most is not obvious: few rows have many splits.
        meta = DeviceRows.allocate(
            rows.capacity, rows.most_entries, rows.tables.to("meta"), "meta", 1
        )
        count = _multiprocessors(device)  # which "meta" has not
        sizes = [cls(meta.first(b), *shape, multiprocessors=count) for b in buckets]
        scratch = AttentionScratch.allocate(
            max(s.planned for s in sizes), max(s.parts for s in sizes), head_dim, device
        )
        return {b: cls(rows.first(b), *shape, scratch=scratch) for b in buckets}

    def plan(self, rows: DeviceRows) -> None:
        """Maps tiles to rows: once `rows` is filled, before the first layer."""
        plan_tiles(rows, self.scratch.tiles, self.tile, self.planned)

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: DeviceRows,
        scale: float,
        window: int | None,
        mask: Mask,
        out: Tensor,
    ) -> Tensor:
        """Writes the attention of q to `out` and returns it.

        Args:
            q: (R, heads, hd) contiguous.
            k_pages, v_pages: (pages, page_size, kv, hd) contiguous; own rows have been written.
            rows: those of `plan`.
            window: a key is visible when |q_pos - k_pos| < window; None: all are.
            mask: what a row sees of its own entry's rows.
            out: (R, heads * hd) contiguous; zeros in rows without an entry.
        """
        scratch, lanes = self.scratch, triton.next_power_of_2(self.head_dim)
        wide = lanes > 128 or self.dtype == torch.float32
        _attend[(*self._grid, self._rounds)](
            q, k_pages, v_pages, out, scratch.tiles, scratch.partial, scratch.lse,
            rows.counts, rows.positions, rows.bits,
            rows.tables, scale * LOG2_E, q.shape[0], rows.tables.stride(0),
            PAGE=self.page_size, WORDS=rows.bits.shape[1],
            HEADS=self.heads, KV=self.kv_heads, GROUP=self.heads // self.kv_heads,
            PADDED_GROUP=self._padded_group, HD=self.head_dim, LANES=lanes, TILE=self.tile,
            BLOCK=self._block, SPLITS=self.splits, WINDOW=window or 0, MASK=int(mask),
            num_warps=8 if self.dtype == torch.float32 else 4, num_stages=2 if wide else 3,
        )  # fmt: skip
        if self.splits > 1:
            _merge[(q.shape[0], self.heads)](
                scratch.partial, scratch.lse, rows.entries, out,
                HEADS=self.heads, HD=self.head_dim, LANES=lanes, PARTS=self.splits + 1,
                PADDED_PARTS=triton.next_power_of_2(self.splits + 1), num_warps=4,
            )  # fmt: skip
        return out


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted: enough for the prefix to be cut
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _places(table, index, inside, PAGE: tl.constexpr):
    """Places of keys in the cache seen as (pages * page_size) of them, 64 bits."""
    page = tl.load(table + index // PAGE, mask=inside, other=0).to(tl.int64)
    return page * PAGE + index % PAGE


@triton.jit
def _read(pages, places, inside, stride: tl.constexpr, HD: tl.constexpr, LANES: tl.constexpr):
    """(n, LANES) of the elements at `places` (n,); zeros where not `inside`."""
    lane = tl.arange(0, LANES)
    at = pages + places[:, None] * stride + lane[None, :]
    if HD == LANES:
        return tl.load(at, mask=inside[:, None], other=0.0)
    else:
        return tl.load(at, mask=inside[:, None] & (lane[None, :] < HD), other=0.0)


@triton.jit
def _absorb(q, k, v, visible, scale, top, total, mixed):
    """One more block of keys into the running maximum, sum and output of each row."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may have seen no key yet
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(top - base)
    total = total * keep + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * keep[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit(do_not_specialize=["capacity", "table_stride"])
def _attend(
    q, k_pages, v_pages, out, tiles, partial, lse,
    counts, positions, bits, tables, scale, capacity, table_stride,
    PAGE: tl.constexpr, WORDS: tl.constexpr, HEADS: tl.constexpr,
    KV: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HD: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    first = tl.program_id(2)
    step = tl.num_programs(2)
    if SPLITS == 1:
        # Without a merge it falls to these programs to clear the rows past the last one.
        rows = tl.load(counts + 1)
        for at in range(rows // TILE + first, tl.cdiv(capacity, TILE), step):
            _clear(
                out, at * TILE, rows, capacity, kv_head, HEADS, GROUP, PADDED_GROUP, HD, LANES, TILE
            )
    # The count is asked for first: what else a tile has comes with it into the nearest cache.
    own = tiles + first * TILE_WORDS
    while tl.load(own + TILE_COUNT) > 0:
        _attend_tile(
            q, k_pages, v_pages, out, own, partial, lse,
            positions, bits, tables, scale, table_stride, kv_head, part,
            PAGE, WORDS, HEADS, KV, GROUP, PADDED_GROUP, HD, LANES, TILE, BLOCK, SPLITS, WINDOW,
            MASK,
        )  # fmt: skip
        own += step * TILE_WORDS


@triton.jit
def _clear(
    out, at, rows, capacity, kv_head, HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, HD: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows from `at` on that are not below `rows`, for one key head."""
    lane = tl.arange(0, LANES)[None, :]
    member = tl.arange(0, TILE * PADDED_GROUP)
    in_group = member % PADDED_GROUP
    row = at + member // PADDED_GROUP
    past = (row >= rows) & (row < capacity) & (in_group < GROUP)
    spot = row.to(tl.int64) * HEADS + kv_head * GROUP + in_group
    zeros = tl.zeros((TILE * PADDED_GROUP, LANES), dtype=out.dtype.element_ty)
    tl.store(out + spot[:, None] * HD + lane, zeros, mask=past[:, None] & (lane < HD))


@triton.jit
def _attend_tile(
    q, k_pages, v_pages, out, own, partial, lse,
    positions, bits, tables, scale, table_stride, kv_head, part,
    PAGE: tl.constexpr, WORDS: tl.constexpr, HEADS: tl.constexpr,
    KV: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HD: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One part of the keys for the tile at `own`, and one key head."""
    lane = tl.arange(0, LANES)
    member = tl.arange(0, TILE * PADDED_GROUP)  # a row and a query head of this key head
    in_group = member % PADDED_GROUP
    head = kv_head * GROUP + in_group
    count = tl.load(own + TILE_COUNT)
    first = tl.load(own + TILE_FIRST)
    offset = tl.load(own + TILE_OFFSET)
    start = tl.load(own + TILE_START)
    table = tables + tl.load(own + TILE_SLOT).to(tl.int64) * table_stride
    node = first + member // PADDED_GROUP
    present = (node < count) & (in_group < GROUP)
    row = (offset + node).to(tl.int64)
    spot = row * HEADS + head

    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(start - WINDOW + 1, 0) // BLOCK * BLOCK
    reach = tl.cdiv(tl.cdiv(tl.maximum(start - oldest, 0), BLOCK), SPLITS) * BLOCK
    begin = oldest + part * reach
    end = tl.minimum(begin + reach, start)
    limit = count
    if MASK == 0:
        limit = tl.minimum(count, first + TILE)
    if SPLITS > 1:
        limit = tl.where(part == SPLITS, limit, 0)
    if (begin >= end) & (limit == 0):
        tl.store(lse + spot * (SPLITS + 1) + part, float("-inf"), mask=present)
    else:
        k_head = k_pages + kv_head * HD
        v_head = v_pages + kv_head * HD
        query = tl.load(
            q + spot[:, None] * HD + lane[None, :],
            mask=present[:, None] & (lane[None, :] < HD), other=0.0,
        )  # fmt: skip
        position = tl.load(positions + row, mask=present, other=0)
        top = tl.full((TILE * PADDED_GROUP,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE * PADDED_GROUP,), dtype=tl.float32)
        mixed = tl.zeros((TILE * PADDED_GROUP, LANES), dtype=tl.float32)
        column = tl.arange(0, BLOCK)

        # Blocks of the prefix, then of the own rows, in one loop: most programs go through it once,
        # and a second loop would be code to fetch and nothing more.
        before = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
        for block in range(before + tl.cdiv(limit, BLOCK)):
            at = (block - before) * BLOCK  # among the own rows; negative in the prefix
            index = tl.where(at < 0, begin + block * BLOCK, start + at) + column
            inside = index < tl.where(at < 0, end, start + limit)
            other = index - start
            places = _places(table, index, inside, PAGE)
            k = _read(k_head, places, inside, KV * HD, HD, LANES)
            v = _read(v_head, places, inside, KV * HD, HD, LANES)
            visible = inside[None, :]
            if MASK == 0:
                visible = visible & (other[None, :] <= node[:, None])
            if MASK == 1:
                known = tl.where(present, at, -1)
                known = (known >= 0) & (known < 64 * WORDS)
                word = tl.load(bits + row * WORDS + at // 64, mask=known, other=0)
                word = tl.where(at < 0, -1, word)  # all of the prefix is seen
                shift = ((at & 63) + column).to(tl.int64)
                visible = visible & (((word[:, None] >> shift[None, :]) & 1) != 0)
            if WINDOW > 0:
                own_key = inside & (other >= 0)
                theirs = tl.load(positions + offset + other, mask=own_key, other=0)
                apart = position[:, None] - tl.where(own_key, theirs, index)[None, :]
                visible = visible & (apart < WINDOW) & (apart > -WINDOW)
            top, total, mixed = _absorb(query, k, v, visible, scale, top, total, mixed)

        seen = total > 0
        mixed = mixed / tl.where(seen, total, 1.0)[:, None]
        stored = present[:, None] & (lane[None, :] < HD)
        if SPLITS == 1:
            result = mixed.to(out.dtype.element_ty)
            tl.store(out + spot[:, None] * HD + lane[None, :], result, mask=stored)
        else:
            slot = spot * (SPLITS + 1) + part
            sum_log = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
            tl.store(lse + slot, sum_log, mask=present)
            tl.store(partial + slot[:, None] * HD + lane[None, :], mixed, mask=stored)


@triton.jit
def _merge(
    partial, lse, entries, out,
    HEADS: tl.constexpr, HD: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    spot = row.to(tl.int64) * HEADS + tl.program_id(1)
    lane = tl.arange(0, LANES)
    part = tl.arange(0, PADDED_PARTS)
    # All loads go out at once: one after the other they would be most of this kernel's time.
    present = tl.load(entries + row) >= 0
    logs = tl.load(lse + spot * PARTS + part, mask=part < PARTS, other=float("-inf"))
    results = tl.load(
        partial + (spot * PARTS + part)[:, None] * HD + lane[None, :],
        mask=(part < PARTS)[:, None] & (lane[None, :] < HD), other=0.0,
    )  # fmt: skip
    # Of a row without an entry nothing was written, of a part without keys only the sum of logs:
    # what lies in the rest may be anything, even NaN.
    logs = tl.where(present, logs, float("-inf"))
    highest = tl.max(logs, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp2(logs - highest)
    results = tl.where((shares > 0)[:, None], results, 0.0)
    total = tl.sum(shares, 0)
    mixed = tl.sum(results * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + spot * HD + lane, mixed.to(out.dtype.element_ty), mask=lane < HD)
