"""The tiles of an attention pass: which rows a program takes, found out on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.layers.device_rows import DeviceRows

TILE_INTS = 8
"""Ints of a tile: the five that it has, and room up to the 32 bytes that are read at once."""

TILE_WORDS = tl.constexpr(TILE_INTS)
TILE_COUNT = tl.constexpr(0)  # rows of its entry; 0: no tile, and none after it
TILE_FIRST = tl.constexpr(1)  # its first row within the entry
TILE_OFFSET = tl.constexpr(2)  # the entry's first row
TILE_START = tl.constexpr(3)  # keys before the entry's own
TILE_SLOT = tl.constexpr(4)
BLOCK = 32  # tiles of one program


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory of `TritonAttention`s that run one after the other; its content means nothing.

    Attributes:
        tiles: (N, TILE_INTS) int32, the words above of each tile, then those of no tile.
        partial: (parts, hd) fp32, of each row, head and part of the keys its output.
        lse: (parts,) fp32, the base-2 log-sum-exp of its scores; -inf without keys.
    """

    tiles: Tensor
    partial: Tensor
    lse: Tensor

    @classmethod
    def allocate(
        cls, tiles: int, parts: int, head_dim: int, device: torch.device
    ) -> AttentionScratch:
        """Room for so many tiles, those that are none included, and parts."""
        return cls(
            torch.empty(tiles, TILE_INTS, dtype=torch.int32, device=device),
            torch.empty(parts, head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
        )


def plan_tiles(rows: DeviceRows, tiles: Tensor, tile: int, most: int) -> None:
    """Cuts every entry's rows into tiles of `tile` rows; writes `most`, of which some are none.

    Args:
        tiles: see `AttentionScratch`.
    """
    _plan_tiles[(triton.cdiv(most, BLOCK),)](
        rows.offsets, rows.starts, rows.slots, tiles, rows.most_entries, most,
        TILE=tile, ENTRIES=triton.next_power_of_2(rows.most_entries), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["most_entries", "most_tiles"])
def _plan_tiles(
    offsets, starts, slots, tiles, most_entries, most_tiles,
    TILE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.arange(0, ENTRIES)
    real = entry < most_entries
    begin = tl.load(offsets + entry, mask=real, other=0)
    count = (tl.load(offsets + entry + 1, mask=real, other=0) - begin + TILE - 1) // TILE
    ends = tl.cumsum(count, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = ends[None, :] <= tile[:, None]  # entries whose tiles all come before
    owner = tl.sum(passed.to(tl.int32), 1)
    skipped = tl.sum(tl.where(passed, count[None, :], 0), 1)
    inside = tile < most_tiles
    live = inside & (tile < tl.sum(count, 0))
    own = tiles + tile * TILE_WORDS
    offset = tl.load(offsets + owner, mask=live, other=0)
    end = tl.load(offsets + owner + 1, mask=live, other=0)
    tl.store(own + TILE_COUNT, end - offset, mask=inside)
    tl.store(own + TILE_FIRST, (tile - skipped) * TILE, mask=live)
    tl.store(own + TILE_OFFSET, offset, mask=live)
    tl.store(own + TILE_START, tl.load(starts + owner, mask=live, other=0), mask=live)
    tl.store(own + TILE_SLOT, tl.load(slots + owner, mask=live, other=0), mask=live)
