"""Blocks from the slots' state, and trees into the target's memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.clock import now
from slipstream.kernels.drafting import ANCHOR as F_ANCHOR
from slipstream.kernels.drafting import COUNT as F_COUNT
from slipstream.kernels.drafting import FIELDS, Blocks
from slipstream.kernels.drafting import NODES as F_NODES
from slipstream.kernels.drafting import OUT as F_OUT
from slipstream.kernels.drafting import ROW as F_ROW
from slipstream.kernels.drafting import SLOT as F_SLOT
from slipstream.kernels.drafting import START as F_START
from slipstream.kernels.grow import NODE_INTS
from slipstream.kernels.peer import (
    A_COUNT,
    A_ENTRY,
    A_EPOCH,
    A_NODES,
    A_OUT,
    A_SLOT,
    ANCHOR,
    ASK_INTS,
    BEGAN,
    BLOCKS,
    CURSOR,
    ENTRIES,
    EPOCH,
    FIRST_ENTRY,
    HEADS,
    HELD,
    LIVE,
    MOST_NODES,
    NODES,
    PLAN_HEAD,
    RING_ENTRIES,
    ROWS,
    SLOTS,
    STATE_INTS,
    STEP,
    WARP_LANES,
)
from slipstream.kernels.ring_words import (
    HEAD_EPOCH,
    HEAD_NODES,
    HEAD_SLOT,
    HEAD_WORDS,
    PROPOSAL_BEGAN,
    PROPOSAL_COUNT,
    PROPOSAL_ENDED,
    PROPOSAL_STEP,
)

_STATE = tl.constexpr(STATE_INTS)
_ASK = tl.constexpr(ASK_INTS)
_AT = tl.constexpr(PLAN_HEAD)
_INTS = tl.constexpr(NODE_INTS)
_F_ENTRY = tl.constexpr(7)  # of `Blocks.fields`: the plan's entry; the head's layers do not read it


def open_blocks(peer: Tensor, plan: Tensor, state: Tensor, blocks: Blocks, *, most: int) -> None:
    """Makes blocks of the next `most` that the plan asks for, and moves it on to those after them.

    A slot that is not live, or is another request's by now, has no block. The plan's first blocks
    also empty the heads of all its entries.

    Args:
        peer: (PEER_INTS,) int64.
        plan: int64 words.
        state: (slots, STATE_INTS) int64.
        blocks: receives counts and fields; column 7 is the plan's entry.
    """
    lanes = max(16, triton.next_power_of_2(state.shape[0]))
    _open_blocks[(1,)](
        peer, plan, state, blocks.counts, blocks.fields,
        MOST=most, ALL=state.shape[0], N=lanes, REAL=plan.is_cuda,
        num_warps=1 if lanes <= WARP_LANES else 4,
    )  # fmt: skip


@triton.jit
def _open_blocks(
    peer, plan, state, counts, fields,
    MOST: tl.constexpr, ALL: tl.constexpr, N: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, N)
    if tl.load(plan + BEGAN) == 0:
        tl.store(plan + BEGAN, now(REAL))
    first = tl.load(plan + CURSOR)
    if first == 0:
        heads = _ring_heads(peer, tl.load(plan + STEP)) + (1 + lane) * HEAD_WORDS
        shared = (lane < tl.load(plan + ENTRIES)) & (lane < tl.load(peer + SLOTS))
        tl.store(heads + HEAD_NODES, tl.full((N,), 0, tl.int64), mask=shared)
    inside = (lane < MOST) & (first + lane < tl.load(plan + BLOCKS)) & (first + lane < ALL)
    ask = plan + _AT + (first + lane) * _ASK
    slot = tl.load(ask + A_SLOT, mask=inside, other=-1)
    inside = inside & (slot >= 0) & (slot < ALL)
    row = state + tl.where(inside, slot, 0) * _STATE
    open_ = inside & (tl.load(row + HELD, mask=inside, other=0) != 0)
    open_ = open_ & (tl.load(row + LIVE, mask=inside, other=0) != 0)
    epoch = tl.load(ask + A_EPOCH, mask=inside, other=0)
    open_ = open_ & (tl.load(row + EPOCH, mask=inside, other=0) == epoch)
    size = tl.load(ask + A_COUNT, mask=open_, other=0)
    after = tl.cumsum(size, 0)
    index = tl.cumsum(open_.to(tl.int32), 0) - 1
    block = fields + index * FIELDS
    tl.store(block + F_SLOT, slot.to(tl.int32), mask=open_)
    tl.store(block + F_START, tl.load(row + ROWS, mask=open_, other=0).to(tl.int32), mask=open_)
    tl.store(block + F_ANCHOR, tl.load(row + ANCHOR, mask=open_, other=0).to(tl.int32), mask=open_)
    tl.store(block + F_NODES, tl.load(ask + A_NODES, mask=open_, other=0).to(tl.int32), mask=open_)
    tl.store(block + F_COUNT, size.to(tl.int32), mask=open_)
    tl.store(block + F_ROW, (after - size).to(tl.int32), mask=open_)
    tl.store(block + F_OUT, tl.load(ask + A_OUT, mask=open_, other=0).to(tl.int32), mask=open_)
    tl.store(block + _F_ENTRY, tl.load(ask + A_ENTRY, mask=open_, other=0).to(tl.int32), mask=open_)
    tl.store(counts, tl.sum(open_.to(tl.int32), 0))
    tl.store(counts + 1, tl.sum(size, 0).to(tl.int32))
    tl.debug_barrier()  # a warp that is late must not read what another has written
    tl.store(plan + CURSOR, first + MOST)


@triton.jit
def _ring_heads(peer, step):
    """Address of the header before the heads of a step."""
    row = (tl.load(peer + FIRST_ENTRY) + step % RING_ENTRIES) * (1 + tl.load(peer + SLOTS))
    return tl.load(peer + HEADS).to(tl.pointer_type(tl.int64)) + row * HEAD_WORDS


def put(
    peer: Tensor, plan: Tensor, state: Tensor, blocks: Blocks, sizes: Tensor, nodes: Tensor,
    *, most: int,
) -> None:  # fmt: skip
    """Writes the trees of up to `most` blocks into the ring, and the header of the step.

    Args:
        peer: (PEER_INTS,) int64.
        plan: int64 words.
        state: (slots, STATE_INTS) int64.
        blocks: of `open_blocks`.
        sizes, nodes: of `slipstream.kernels.grow.grow`.
    """
    _put[(most + 1,)](
        peer, plan, state, blocks.counts, blocks.fields, sizes, nodes,
        MOST=most, REAL=plan.is_cuda, num_warps=4,
    )  # fmt: skip


@triton.jit
def _put(peer, plan, state, counts, fields, sizes, nodes, MOST: tl.constexpr, REAL: tl.constexpr):
    block = tl.program_id(0)
    shared = tl.load(peer + SLOTS)
    if shared == 0:
        return
    step = tl.load(plan + STEP)
    heads = _ring_heads(peer, step)
    if block == MOST:
        tl.store(heads + PROPOSAL_STEP, step)
        tl.store(heads + PROPOSAL_COUNT, tl.load(plan + ENTRIES))
        tl.store(heads + PROPOSAL_BEGAN, tl.load(plan + BEGAN))
        tl.store(heads + PROPOSAL_ENDED, now(REAL))
        return
    if block >= tl.load(counts):
        return
    field = fields + block * FIELDS
    slot = tl.load(field + F_SLOT)
    out = tl.load(field + F_OUT)
    size = tl.minimum(tl.load(sizes + block), MOST_NODES)
    head = heads + (1 + tl.load(field + _F_ENTRY)) * HEAD_WORDS
    tl.store(head + HEAD_SLOT, slot.to(tl.int64))
    tl.store(head + HEAD_EPOCH, tl.load(state + slot * _STATE + EPOCH))
    tl.store(head + HEAD_NODES, size.to(tl.int64))
    node = tl.arange(0, MOST_NODES)
    there = node < size
    source = nodes + (out + node) * _INTS
    entry = tl.load(peer + FIRST_ENTRY) + step % RING_ENTRIES
    target = tl.load(peer + NODES).to(tl.pointer_type(tl.int32))
    target += (entry * shared * MOST_NODES + out + node) * 2
    tl.store(target, tl.load(source, mask=there, other=0), mask=there)
    tl.store(target + 1, tl.load(source + 1, mask=there, other=-1), mask=there)
