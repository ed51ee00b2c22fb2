"""Context features from the target's pages to a buffer, and where their keys and values belong."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.peer import FEATURES, PAGE_SIZE, PAGES, TABLE_PAGES, TABLES
from slipstream.layers.device_rows import DeviceRows

_LANES = 128
_COLUMNS = 1024


def gather(peer: Tensor, begins: Tensor, done: Tensor, rows: DeviceRows, features: Tensor) -> None:
    """The next R of a step's fresh rows, `slipstream.kernels.accept`; those before `done` are over.

    A row lies where the target's block table of its slot says; where that names no page the row is
    zeros.

    Args:
        peer: (PEER_INTS,) int64.
        begins: (E + 1,) int32, first fresh row of each record; the last is their number.
        done: (1,) int32.
        rows: for R rows of E entries; slots and starts are those of the records. Receives offsets
            (which may be negative), entries and positions.
        features: (R, width) contiguous, receives the rows.
    """
    width, entries = features.shape[1], begins.shape[0] - 1
    _gather[(rows.capacity + triton.cdiv(entries + 1, _LANES),)](
        peer, begins, done, rows.slots, rows.starts, rows.offsets, rows.entries, rows.positions,
        features, R=rows.capacity, E=entries, HALVINGS=entries.bit_length(), WIDTH=width,
        LANES=_LANES, COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)),
        ALIGNED=math.gcd(16, width * features.element_size()), num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather(
    peer, begins, done, slots, starts, offsets, entries, positions, features,
    R: tl.constexpr, E: tl.constexpr, HALVINGS: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    before = tl.load(done)
    if row >= R:
        entry_at = (row - R) * LANES + tl.arange(0, LANES)
        real = entry_at < E + 1
        begin = tl.load(begins + entry_at, mask=real, other=0)
        tl.store(offsets + entry_at, begin - before, mask=real)
        return
    fresh = before + row
    if fresh >= tl.load(begins + E):
        tl.store(entries + row, -1)
        tl.store(positions + row, 0)
        return
    # The last record that begins at this row or before it, by bisection.
    entry = row * 0
    for halving in tl.static_range(HALVINGS):
        later = tl.minimum(entry + (1 << (HALVINGS - 1 - halving)), E)
        entry = tl.where(tl.load(begins + later) <= fresh, later, entry)
    position = tl.load(starts + entry) + fresh - tl.load(begins + entry)
    tl.store(entries + row, entry)
    tl.store(positions + row, position)
    size = tl.load(peer + PAGE_SIZE)
    index = position // size
    known = (index >= 0) & (index < tl.load(peer + TABLE_PAGES))
    table = tl.load(peer + TABLES).to(tl.pointer_type(tl.int32))
    table += tl.load(slots + entry) * tl.load(peer + TABLE_PAGES)
    page = tl.load(table + tl.where(known, index, 0)).to(tl.int64)
    known = known & (page >= 0) & (page < tl.load(peer + PAGES))
    source = tl.where(known, page * size + position % size, 0) * WIDTH
    base = tl.load(peer + FEATURES).to(tl.pointer_type(features.dtype.element_ty)) + source
    base = tl.multiple_of(base, ALIGNED)
    target = features + row.to(tl.int64) * WIDTH
    width = tl.where(known, WIDTH, 0)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(base + column, mask=column < width, other=0.0)
        tl.store(target + column, values, mask=column < WIDTH)
