"""The target's ends of the rings: a step's proposal taken in, its context published.

What a draft wrote is input: `take_proposal` copies it to private memory and keeps of it what the
plan has room for; what the nodes say is left to `slipstream.kernels.intake`. Where things lie in a
ring is said in `slipstream.handoff.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.handoff.layout import HEAD_INTS, RECORD_INTS
from slipstream.kernels.clock import now
from slipstream.kernels.ring_words import (
    HEAD_EPOCH,
    HEAD_NODES,
    HEAD_SLOT,
    HEAD_WORDS,
    HEADER_BEGAN,
    HEADER_COUNT,
    HEADER_ENDED,
    HEADER_STEP,
    PROPOSAL_BEGAN,
    PROPOSAL_ENDED,
    PROPOSAL_STEP,
    RECORD_ANCHOR,
    RECORD_CAUGHT_UP,
    RECORD_COUNT,
    RECORD_EPOCH,
    RECORD_FIRST,
    RECORD_SLOT,
    RECORD_WORDS,
)

LINK_HEAD = 8
"""64-bit words of `StepLink.head`."""

LINK_COLUMNS = 8
"""64-bit words of a row of `StepLink.entries`."""

# Words of the head.
RING = tl.constexpr(0)  # entry of the rings; -1: nobody takes part
STEP = tl.constexpr(1)
COUNT = tl.constexpr(2)  # entries of the plan
FIRST_JOB = tl.constexpr(3)  # the job that is entry 0 of this part of the step
LAST = tl.constexpr(4)  # whether this part is the last one: it publishes

# Columns of an entry.
SLOT = tl.constexpr(0)
EPOCH = tl.constexpr(1)
MOST = tl.constexpr(2)  # most context rows to publish
FIRST_NODE = tl.constexpr(3)  # its first node among those of the step's proposal
JOB = tl.constexpr(4)  # its number among the entries that are computed; -1: it is not
LIVE = tl.constexpr(5)  # whether its rows end at an anchor

# Words of the stamps, all in ns. The first three are those of the step that runs; the four from
# DONE on are those of the last one that ended: BEGAN, DRAFT_BEGAN, DRAFT_ENDED and its end.
BEGAN = 0
DRAFT_BEGAN = 1
DRAFT_ENDED = 2
DONE = 4
ENDED = 7
STAMPS = 8

_HEAD = tl.constexpr(LINK_HEAD)
_COLUMNS = tl.constexpr(LINK_COLUMNS)
_BEGAN = tl.constexpr(BEGAN)
_ENDED = tl.constexpr(ENDED)
_DONE = tl.constexpr(DONE)
_DRAFT_BEGAN = tl.constexpr(DRAFT_BEGAN)
_DRAFT_ENDED = tl.constexpr(DRAFT_ENDED)

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class StepLink:
    """What a step exchanges with a draft, as the host says it; all int64.

    Attributes:
        head: (LINK_HEAD,), the words above.
        entries: (E, LINK_COLUMNS), all entries of the plan in order.
    """

    head: Tensor
    entries: Tensor


@dataclass(frozen=True, slots=True)
class Rings:
    """The shared memory that a target's step touches, as `slipstream.handoff.layout` has it.

    Attributes:
        records: (N, 1 + E, RECORD_INTS) int64.
        heads: (N, 1 + E, HEAD_INTS) int64.
        nodes: (N, R, 2) int32.
    """

    records: Tensor
    heads: Tensor
    nodes: Tensor

    @classmethod
    def none(cls, entries: int, device: torch.device | str) -> Rings:
        """For a target without a draft: one entry that nobody reads."""
        return cls(
            torch.zeros(1, 1 + entries, RECORD_INTS, dtype=torch.int64, device=device),
            torch.zeros(1, 1 + entries, HEAD_INTS, dtype=torch.int64, device=device),
            torch.zeros(1, 1, 2, dtype=torch.int32, device=device),
        )


def take_proposal(
    link: StepLink,
    rings: Rings,
    counts: Tensor,
    offsets: Tensor,
    proposal_counts: Tensor,
    proposal_tokens: Tensor,
    proposal_parents: Tensor,
    stamps: Tensor,
) -> None:
    """Copies the proposal of the step out of its ring entry, and notes when the step began.

    A wrong step, slot, epoch or number of nodes leaves an entry without a proposal. Without a ring
    entry nothing is touched but the stamps.

    Args:
        counts: (2,) int32, entries and rows of this part of the step.
        offsets: (E' + 1,) int32, its rows.
        proposal_counts: (E',) int32; proposal_tokens, proposal_parents: (R',) int32, at `offsets`.
        stamps: (STAMPS,) int64; those of the step that runs are written.
    """
    _take_proposal[(link.entries.shape[0],)](
        link.head,
        link.entries,
        rings.heads,
        rings.nodes,
        counts,
        offsets,
        proposal_counts,
        proposal_tokens,
        proposal_parents,
        stamps,
        RINGS=rings.heads.shape[0],
        ROWS=rings.heads.shape[1],
        NODES=rings.nodes.shape[1],
        ENTRIES=proposal_counts.shape[0],
        BLOCK=_BLOCK,
        REAL=stamps.is_cuda,
    )


@triton.jit
def _take_proposal(
    head,
    entries,
    heads,
    nodes,
    counts,
    offsets,
    proposal_counts,
    proposal_tokens,
    proposal_parents,
    stamps,
    RINGS: tl.constexpr,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    REAL: tl.constexpr,
):
    index = tl.program_id(0)
    ring = tl.load(head + RING)
    here = (ring >= 0) & (ring < RINGS)
    ring = tl.where(here, ring, 0)
    header = heads + ring * ROWS * HEAD_WORDS
    right = here & (tl.load(header + PROPOSAL_STEP) == tl.load(head + STEP))
    if index == 0:
        if tl.load(head + FIRST_JOB) == 0:
            tl.store(stamps + _BEGAN, now(REAL))
            began = tl.load(header + PROPOSAL_BEGAN)
            ended = tl.load(header + PROPOSAL_ENDED)
            tl.store(stamps + _DRAFT_BEGAN, tl.where(right, began, 0))
            tl.store(stamps + _DRAFT_ENDED, tl.where(right, ended, 0))
    own = entries + index * _COLUMNS
    entry = tl.load(own + JOB) - tl.load(head + FIRST_JOB)
    most = tl.minimum(tl.load(counts), ENTRIES)
    given = here & (index < tl.load(head + COUNT)) & (tl.load(own + JOB) >= 0)
    if given & (entry >= 0) & (entry < most):
        tree = header + (1 + index) * HEAD_WORDS
        first = tl.load(own + FIRST_NODE)
        base = tl.load(offsets + entry)
        rows = tl.load(offsets + entry + 1) - base
        count = tl.load(tree + HEAD_NODES)
        right = right & (tl.load(tree + HEAD_SLOT) == tl.load(own + SLOT))
        right = right & (tl.load(tree + HEAD_EPOCH) == tl.load(own + EPOCH))
        right = right & (count >= 1) & (count <= rows) & (first >= 0) & (first + count <= NODES)
        count = tl.where(right, count, 0).to(tl.int32)
        tl.store(proposal_counts + entry, count)
        node = tl.arange(0, BLOCK)
        source = nodes + (ring * NODES + tl.where(right, first, 0) + node) * 2
        token = tl.load(source, mask=node < count, other=-1)
        parent = tl.load(source + 1, mask=node < count, other=-1)
        tl.store(proposal_tokens + base + node, token, mask=node < count)
        tl.store(proposal_parents + base + node, parent, mask=node < count)


def mark(link: StepLink, stamps: Tensor) -> None:
    """Notes when a step without proposals began; `stamps` as in `take_proposal`."""
    _mark[(1,)](link.head, stamps, REAL=stamps.is_cuda, num_warps=1)


@triton.jit
def _mark(head, stamps, REAL: tl.constexpr):
    if tl.load(head + FIRST_JOB) == 0:
        tl.store(stamps + _BEGAN, now(REAL))
        none = tl.load(head + FIRST_JOB)
        tl.store(stamps + _DRAFT_BEGAN, none)
        tl.store(stamps + _DRAFT_ENDED, none)


def publish_context(
    link: StepLink,
    rings: Rings,
    start: Tensor,
    anchor: Tensor,
    cursor: Tensor,
    stamps: Tensor,
) -> None:
    """Writes the step's context records, moves the cursors on and notes when the step ended.

    Runs once everything that the records name is in memory; nothing but the stamp is written
    before the last part of a step, or without a ring entry.

    Args:
        start, anchor: (slots,) int32, of `SlotState`, after the commit.
        cursor: (slots,) int32, feature rows that the session's draft was given.
        stamps: (STAMPS,) int64; those from DONE on are written.
    """
    _publish_context[(link.entries.shape[0],)](
        link.head,
        link.entries,
        rings.records,
        start,
        anchor,
        cursor,
        stamps,
        RINGS=rings.records.shape[0],
        ROWS=rings.records.shape[1],
        SLOTS=start.shape[0],
        REAL=stamps.is_cuda,
        num_warps=1,
    )


@triton.jit
def _publish_context(
    head,
    entries,
    records,
    start,
    anchor,
    cursor,
    stamps,
    RINGS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    REAL: tl.constexpr,
):
    index = tl.program_id(0)
    ring = tl.load(head + RING)
    here = (ring >= 0) & (ring < RINGS) & (tl.load(head + LAST) != 0)
    ring = tl.where(here, ring, 0)
    header = records + ring * ROWS * RECORD_WORDS
    count = tl.minimum(tl.load(head + COUNT), ROWS - 1)
    if index == 0:
        ended = now(REAL)
        began = tl.load(stamps + _BEGAN)
        tl.store(stamps + _DONE + _BEGAN, began)
        tl.store(stamps + _DONE + _DRAFT_BEGAN, tl.load(stamps + _DRAFT_BEGAN))
        tl.store(stamps + _DONE + _DRAFT_ENDED, tl.load(stamps + _DRAFT_ENDED))
        tl.store(stamps + _ENDED, ended)
        if here:
            tl.store(header + HEADER_STEP, tl.load(head + STEP))
            tl.store(header + HEADER_COUNT, count)
            tl.store(header + HEADER_BEGAN, began)
            tl.store(header + HEADER_ENDED, ended)
    if here & (index < count):
        own = entries + index * _COLUMNS
        record = header + (1 + index) * RECORD_WORDS
        slot = tl.load(own + SLOT)
        job = tl.load(own + JOB)
        known = (slot >= 0) & (slot < SLOTS)
        place = tl.where(known, slot, 0)
        computed = known & (job >= 0)
        rows = tl.load(start + place)
        # The cursor of an entry that is not computed may be moved by another of the same slot.
        first = tl.load(cursor + place, mask=computed, other=0)
        most = tl.where(computed, tl.load(own + MOST), 0)  # may be beyond 32 bits
        publish = tl.maximum(tl.minimum((rows - first).to(tl.int64), most), 0).to(tl.int32)
        caught_up = computed & (first + publish == rows) & (tl.load(own + LIVE) != 0)
        tl.store(record + RECORD_SLOT, slot)
        tl.store(record + RECORD_EPOCH, tl.load(own + EPOCH))
        tl.store(record + RECORD_FIRST, first.to(tl.int64))
        tl.store(record + RECORD_COUNT, publish.to(tl.int64))
        tl.store(record + RECORD_ANCHOR, tl.load(anchor + place).to(tl.int64))
        tl.store(record + RECORD_CAUGHT_UP, caught_up.to(tl.int64))
        if publish > 0:
            tl.store(cursor + place, first + publish)
