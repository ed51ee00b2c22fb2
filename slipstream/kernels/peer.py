"""What kernels of a draft know of its session: the target's memory, the plan, the slots.

All of it is device data in int64 words, so that recorded work serves every session: where the
target's memory lies is an address that is loaded.
"""

from __future__ import annotations

from typing import Protocol

import triton.language as tl
from torch import Tensor

from slipstream.handoff.layout import RING, Layout
from slipstream.wire import MAX_NODES


class Memory(Protocol):
    """A target's memory, mapped; see `slipstream.handoff.layout`."""

    @property
    def layout(self) -> Layout: ...

    @property
    def features(self) -> Tensor: ...

    @property
    def tables(self) -> Tensor: ...

    @property
    def records(self) -> Tensor: ...

    @property
    def heads(self) -> Tensor: ...

    @property
    def nodes(self) -> Tensor: ...


PEER_INTS = 16
"""Words of the peer's row."""

# Words of the peer's row; those up to NODES are addresses.
FEATURES = tl.constexpr(0)
TABLES = tl.constexpr(1)
RECORDS = tl.constexpr(2)
HEADS = tl.constexpr(3)
NODES = tl.constexpr(4)
FIRST_ENTRY = tl.constexpr(5)  # first ring entry of the session's set
SLOTS = tl.constexpr(6)  # 0: no session, nothing is touched
PAGES = tl.constexpr(7)
PAGE_SIZE = tl.constexpr(8)
TABLE_PAGES = tl.constexpr(9)

STATE_INTS = 8
"""Words of a slot's state."""

# Words of a slot's state; `services.draft.session.Slot` says what they mean.
HELD = tl.constexpr(0)
EPOCH = tl.constexpr(1)
ROWS = tl.constexpr(2)
ANCHOR = tl.constexpr(3)
LIVE = tl.constexpr(4)
BEHIND = tl.constexpr(5)  # NOT_BEHIND where there is no such row
STARVED = tl.constexpr(6)
CAPACITY = tl.constexpr(7)  # rows that the slot's pages hold beside a block

NOT_BEHIND = -(1 << 62)

VERDICTS = 2 * RING
"""Steps whose verdicts are kept."""

VERDICT_INTS = 10
"""Words of a verdict, and of the header before those of a step."""

# Words of a verdict.
V_SLOT = tl.constexpr(0)  # -1: the record was of no request
V_EPOCH = tl.constexpr(1)
V_CODE = tl.constexpr(2)  # what is to be said of the slot
V_ROWS = tl.constexpr(3)
V_FIRST = tl.constexpr(4)
V_COUNT = tl.constexpr(5)
V_ANCHOR = tl.constexpr(6)
V_HAD = tl.constexpr(7)  # rows before the record
V_LIVE = tl.constexpr(8)
V_STARVED = tl.constexpr(9)

# Values of V_CODE.
SILENT = tl.constexpr(0)
IS_LIVE = tl.constexpr(1)
NOT_AT_START = tl.constexpr(2)
BAD_ROWS = tl.constexpr(3)
GAP = tl.constexpr(4)
BAD_ANCHOR = tl.constexpr(5)
BAD_END = tl.constexpr(6)
NO_PAGES = tl.constexpr(7)
TOO_MANY = tl.constexpr(8)

# Words of the plan.
STEP = tl.constexpr(0)
NEXT = tl.constexpr(1)  # step whose records are next; `accept` moves it on
ENTRIES = tl.constexpr(2)
BLOCKS = tl.constexpr(3)
CURSOR = tl.constexpr(4)  # block with which the next pass begins; `open_blocks` moves it on
BEGAN = tl.constexpr(5)  # 0 until the first kernel after the waits
EDITS = tl.constexpr(6)
LIMITS = tl.constexpr(8)  # most fresh rows of each step, by step % RING

PLAN_HEAD = 8 + RING
"""Words of the plan before its blocks."""

EDIT_INTS = 8
"""Words of an edit of a slot's state."""

# Words of an edit.
E_SLOT = tl.constexpr(0)
E_RESET = tl.constexpr(1)  # whether HELD and EPOCH are new, and all else is as at the beginning
E_HELD = tl.constexpr(2)
E_EPOCH = tl.constexpr(3)
E_CAPACITY = tl.constexpr(4)
E_FEED = tl.constexpr(5)  # whether the slot is no longer starved

ASK_INTS = 8
"""Words of a block that is asked for."""

# Words of a block that is asked for.
A_SLOT = tl.constexpr(0)
A_EPOCH = tl.constexpr(1)
A_NODES = tl.constexpr(2)
A_COUNT = tl.constexpr(3)  # rows of the block
A_OUT = tl.constexpr(4)  # first node of the entry in the plan
A_ENTRY = tl.constexpr(5)

WARP_LANES = 128
"""Slots that one warp does in a kernel of one program."""

RING_ENTRIES = tl.constexpr(RING)
MOST_NODES = tl.constexpr(MAX_NODES)


def plan_ints(slots: int) -> int:
    """Words of a plan: its head, `slots` blocks, `slots` edits."""
    return PLAN_HEAD + slots * (ASK_INTS + EDIT_INTS)


def peer_row(memory: Memory, which: int) -> list[int]:
    """The peer's row for set `which` of `memory`."""
    layout = memory.layout
    parts = (memory.features, memory.tables, memory.records, memory.heads, memory.nodes)
    row = [part.data_ptr() for part in parts]
    row += [which * RING, layout.slots, layout.pages, layout.page_size, layout.table_pages]
    return row + [0] * (PEER_INTS - len(row))
