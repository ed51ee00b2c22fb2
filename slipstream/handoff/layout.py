"""What lies where in the memory that a target shares with its draft.

One allocation of the target's GPU holds the context features, block tables that say in which
pages a slot's features lie, and for each set the rings of records and proposals. A segment of host
memory holds the flags. Both sides compute the same offsets from the same few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from slipstream.wire import DTYPES, ITEM_SIZE, MAX_NODES

RING = 8
"""Entries of a ring: more than the steps in flight, (depth + 1) x groups + 1 at most."""

SETS = 4
"""Sets of rings and flags: sessions whose peers may not all be gone yet."""

LINE = 16
"""64-bit words of a flag's own 128 bytes: no two flags share what a bus moves at once."""

RELEASED = 1 << 62
"""Value of a flag that ends every wait: above every step."""

RECORD_INTS = 8
"""64-bit words of a record, and of the header before a step's records."""

HEAD_INTS = 4
"""64-bit words of a proposed tree's head, and of the header before a step's heads."""


class Flag(IntEnum):
    """The flags of a set. Those before PLANNED only grow and are waited for on streams."""

    CONTEXT = 0  # last step whose context is published; the target's stream writes it
    PROPOSAL = 1  # last step whose proposal is published; the draft's stream
    CONSUMED = 2  # last step whose context was taken; the draft's stream
    PLANNED = 3  # last step that the draft has enqueued; its host
    DRAFT_BEAT = 4  # counts while the draft's process runs, RELEASED when it left the set; its host
    TARGET_BEAT = 5  # the same of the target


class Header(IntEnum):
    """Words of the header before a step's records. Times: the writer's GPU, in ns."""

    STEP = 0
    COUNT = 1  # entries of the plan: so many records follow
    BEGAN = 2  # when the step began after its wait
    ENDED = 3  # when its context was published


class Record(IntEnum):
    """Words of one record, `slipstream.handoff.base.ContextRecord`; entry i of a plan has row i."""

    SLOT = 0
    EPOCH = 1
    FIRST = 2
    COUNT = 3  # 0: nothing is published of this entry
    ANCHOR = 4
    CAUGHT_UP = 5


class Head(IntEnum):
    """Words of a tree's head; entry i of a plan has row i. Its nodes, (token, parent), begin at the
    entry's row offset in the plan: the sum of `nodes` of the entries before."""

    SLOT = 0
    EPOCH = 1
    NODES = 2  # 0: nothing is proposed


class ProposalHeader(IntEnum):
    """Words of the header before a step's heads."""

    STEP = 0
    COUNT = 1
    BEGAN = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of everything shared; offsets are in bytes.

    Attributes:
        slots: of the target, which are also the most entries of a plan.
        pages, page_size: of the target's cache.
        table_pages: pages of one slot at most.
        width, dtype: of a context feature.
    """

    slots: int
    pages: int
    page_size: int
    table_pages: int
    width: int
    dtype: str

    @property
    def rows(self) -> int:
        """Nodes of one step's proposal at most."""
        return self.slots * MAX_NODES

    @property
    def tables_at(self) -> int:
        item = ITEM_SIZE[DTYPES[self.dtype]]
        return _aligned(self.pages * self.page_size * self.width * item)

    @property
    def records_at(self) -> int:
        """(SETS * RING, 1 + slots, RECORD_INTS) int64."""
        return self.tables_at + _aligned(4 * self.slots * self.table_pages)

    @property
    def heads_at(self) -> int:
        """(SETS * RING, 1 + slots, HEAD_INTS) int64."""
        return self.records_at + _aligned(8 * SETS * RING * (1 + self.slots) * RECORD_INTS)

    @property
    def nodes_at(self) -> int:
        """(SETS * RING, rows, 2) int32."""
        return self.heads_at + _aligned(8 * SETS * RING * (1 + self.slots) * HEAD_INTS)

    @property
    def bytes(self) -> int:
        return self.nodes_at + _aligned(8 * SETS * RING * self.rows)

    @property
    def flag_words(self) -> int:
        """64-bit words of the segment."""
        return SETS * len(Flag) * LINE


def flag_word(which: int, flag: Flag) -> int:
    """Index of a flag of set `which` among the segment's 64-bit words."""
    return (which * len(Flag) + flag) * LINE


def ring_entry(which: int, step: int) -> int:
    """Index along the rings' first dimension of `step` in set `which`."""
    return which * RING + step % RING


def _aligned(size: int) -> int:
    return -(-size // 512) * 512
