"""What the host writes into tables of slots: pages of block tables, lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def update_tables(
    tables: Tensor, updates: Tensor, count: Tensor, copy: Tensor | None = None
) -> None:
    """Writes pages into block tables.

    Args:
        tables: (slots, P) int32.
        updates: (U, 3) int32, (slot, index, page); what lies outside the tables is ignored.
        count: (1,) int32, how many there are.
        copy: like `tables`, receives the same.
    """
    block = 256
    _update_tables[(triton.cdiv(updates.shape[0], block),)](
        tables,
        tables if copy is None else copy,
        updates,
        count,
        SLOTS=tables.shape[0],
        PAGES=tables.shape[1],
        MOST=updates.shape[0],
        BLOCK=block,
    )


@triton.jit
def _update_tables(
    tables,
    copy,
    updates,
    count,
    SLOTS: tl.constexpr,
    PAGES: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < tl.load(count)) & (at < MOST)
    slot = tl.load(updates + at * 3, mask=mask, other=-1)
    index = tl.load(updates + at * 3 + 1, mask=mask, other=-1)
    page = tl.load(updates + at * 3 + 2, mask=mask, other=0)
    mask = (slot >= 0) & (slot < SLOTS) & (index >= 0) & (index < PAGES)
    place = slot.to(tl.int64) * PAGES + index
    tl.store(tables + place, page, mask=mask)
    tl.store(copy + place, page, mask=mask)


def set_starts(start: Tensor, slots: Tensor, values: Tensor, counts: Tensor) -> None:
    """start[slots[e]] = values[e] for the first counts[0] entries.

    Args:
        start: (slots,) int32, of `SlotState`.
        slots, values: (E,) int32.
        counts: (1,) or more int32, the number of entries first.
    """
    entries = slots.shape[0]
    _set_starts[(1,)](
        start, slots, values, counts, BLOCK=triton.next_power_of_2(entries), E=entries
    )


@triton.jit
def _set_starts(start, slots, values, counts, E: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.arange(0, BLOCK)
    mask = (entry < tl.load(counts)) & (entry < E)
    slot = tl.load(slots + entry, mask=mask, other=0)
    tl.store(start + slot, tl.load(values + entry, mask=mask, other=0), mask=mask)
