"""The records of a step against the slots' state: `services.draft.session.Session.take`.

One program does a step: a lane for each record. A record is input from another process. Records of
one slot twice in a step race for its state; whatever wins, the rows that the state then counts are
written, as each of them takes the rows from the state's on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.clock import now
from slipstream.kernels.peer import (
    ANCHOR,
    BAD_ANCHOR,
    BAD_END,
    BAD_ROWS,
    BEGAN,
    BEHIND,
    CAPACITY,
    E_CAPACITY,
    E_EPOCH,
    E_FEED,
    E_HELD,
    E_RESET,
    E_SLOT,
    EDIT_INTS,
    EDITS,
    EPOCH,
    FIRST_ENTRY,
    GAP,
    HELD,
    IS_LIVE,
    LIMITS,
    LIVE,
    NEXT,
    NO_PAGES,
    NOT_AT_START,
    NOT_BEHIND,
    RECORDS,
    RING_ENTRIES,
    ROWS,
    SILENT,
    SLOTS,
    STARVED,
    STATE_INTS,
    TOO_MANY,
    V_ANCHOR,
    V_CODE,
    V_COUNT,
    V_EPOCH,
    V_FIRST,
    V_HAD,
    V_LIVE,
    V_ROWS,
    V_SLOT,
    V_STARVED,
    VERDICT_INTS,
    VERDICTS,
    WARP_LANES,
)
from slipstream.kernels.ring_words import (
    HEADER_COUNT,
    HEADER_STEP,
    RECORD_ANCHOR,
    RECORD_CAUGHT_UP,
    RECORD_COUNT,
    RECORD_EPOCH,
    RECORD_FIRST,
    RECORD_SLOT,
    RECORD_WORDS,
)

_STATE = tl.constexpr(STATE_INTS)
_EDIT = tl.constexpr(EDIT_INTS)
_VERDICT = tl.constexpr(VERDICT_INTS)
_KEPT = tl.constexpr(VERDICTS)
_NOT_BEHIND = tl.constexpr(NOT_BEHIND)
_MOST_COUNT = tl.constexpr(1 << 31)  # so that no sum of rows overflows


def edit_slots(plan: Tensor, state: Tensor, *, edits_at: int) -> None:
    """Applies the plan's edits, at word `edits_at` of it, to the slots' state.

    Args:
        plan: int64 words, `slipstream.kernels.peer`.
        state: (slots, STATE_INTS) int64.
    """
    slots = state.shape[0]
    lanes = max(16, triton.next_power_of_2(slots))
    _edit_slots[(1,)](plan, state, AT=edits_at, MOST=slots, N=lanes, num_warps=4)


@triton.jit
def _edit_slots(plan, state, AT: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr):
    lane = tl.arange(0, N)
    inside = (lane < tl.load(plan + EDITS)) & (lane < MOST)
    edit = plan + AT + lane * _EDIT
    slot = tl.load(edit + E_SLOT, mask=inside, other=-1)
    inside = inside & (slot >= 0) & (slot < MOST)
    row = state + tl.where(inside, slot, 0) * _STATE
    reset = inside & (tl.load(edit + E_RESET, mask=inside, other=0) != 0)
    fed = inside & (tl.load(edit + E_FEED, mask=inside, other=0) != 0)
    none = tl.full((N,), 0, tl.int64)
    tl.store(row + HELD, tl.load(edit + E_HELD, mask=reset, other=0), mask=reset)
    tl.store(row + EPOCH, tl.load(edit + E_EPOCH, mask=reset, other=0), mask=reset)
    tl.store(row + ROWS, none, mask=reset)
    tl.store(row + ANCHOR, none - 1, mask=reset)
    tl.store(row + LIVE, none, mask=reset)
    tl.store(row + BEHIND, none + _NOT_BEHIND, mask=reset)
    tl.store(row + STARVED, none, mask=reset | fed)
    tl.store(row + CAPACITY, tl.load(edit + E_CAPACITY, mask=inside, other=0), mask=inside)


def accept(
    peer: Tensor,
    plan: Tensor,
    state: Tensor,
    verdicts: Tensor,
    slots: Tensor,
    starts: Tensor,
    begins: Tensor,
    done: Tensor,
    *,
    vocab_size: int,
) -> None:
    """Takes the records of the plan's next step, and moves the plan on to the one after it.

    A ring entry of another step, or with a count that cannot be, has no records.

    Args:
        peer: (PEER_INTS,) int64.
        plan: int64 words.
        state: (slots, STATE_INTS) int64; the slots' new state.
        verdicts: (VERDICTS, 1 + slots, VERDICT_INTS) int64; entry step % VERDICTS receives the
            step, and how many records there were (-1: nothing of that step), then what became of
            each.
        slots, starts: (slots,) int32, receive slot and first fresh row of each record.
        begins: (slots + 1,) int32, receives the fresh rows of all records before; the last is the
            sum, which is at most what the plan allows.
        done: (1,) int32, becomes 0: none of these rows was gathered.
    """
    lanes = max(16, triton.next_power_of_2(state.shape[0]))
    _accept[(1,)](
        peer, plan, state, verdicts, slots, starts, begins, done,
        MOST=state.shape[0], VOCAB=vocab_size, N=lanes, REAL=plan.is_cuda,
        num_warps=1 if lanes <= WARP_LANES else 4,
    )  # fmt: skip


@triton.jit
def _accept(
    peer, plan, state, verdicts, slots, starts, begins, done,
    MOST: tl.constexpr, VOCAB: tl.constexpr, N: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, N)
    step = tl.load(plan + NEXT)
    if tl.load(plan + BEGAN) == 0:
        tl.store(plan + BEGAN, now(REAL))
    limit = tl.load(plan + LIMITS + step % RING_ENTRIES)
    shared = tl.load(peer + SLOTS)
    ring_row = (tl.load(peer + FIRST_ENTRY) + step % RING_ENTRIES) * (1 + shared)
    ring = tl.load(peer + RECORDS).to(tl.pointer_type(tl.int64)) + ring_row * RECORD_WORDS
    # Masks are made of lanes throughout: an interpreted scalar is none.
    all_shared = tl.full((N,), 0, tl.int64) + shared
    header = tl.load(ring + lane, mask=(lane < RECORD_WORDS) & (all_shared > 0), other=-1)
    given = tl.sum(tl.where(lane == HEADER_STEP, header, 0), 0)
    count = tl.sum(tl.where(lane == HEADER_COUNT, header, 0), 0)
    fits = (count >= 0) & (count <= shared) & (count <= MOST)
    count = tl.where((given == step) & fits, count, -1)

    there = (lane < count) & (all_shared > 0)
    record = ring + (1 + lane) * RECORD_WORDS
    slot = tl.load(record + RECORD_SLOT, mask=there, other=-1)
    epoch = tl.load(record + RECORD_EPOCH, mask=there, other=0)
    first = tl.load(record + RECORD_FIRST, mask=there, other=0)
    number = tl.load(record + RECORD_COUNT, mask=there, other=0)
    anchor = tl.load(record + RECORD_ANCHOR, mask=there, other=0)
    caught_up = tl.load(record + RECORD_CAUGHT_UP, mask=there, other=0) != 0

    # The target has tables of its own slots only, which may be fewer.
    inside = there & (slot >= 0) & (slot < MOST) & (slot < all_shared) & (number != 0)
    row = state + tl.where(inside, slot, 0) * _STATE
    held = tl.load(row + HELD, mask=inside, other=0) != 0
    mine = inside & held & (tl.load(row + EPOCH, mask=inside, other=0) == epoch)
    mine = mine & (tl.load(row + STARVED, mask=inside, other=1) == 0)
    rows = tl.load(row + ROWS, mask=mine, other=0)
    was_live = tl.load(row + LIVE, mask=mine, other=0) != 0
    behind = tl.load(row + BEHIND, mask=mine, other=_NOT_BEHIND)
    capacity = tl.load(row + CAPACITY, mask=mine, other=0)

    # `Session._fault`: the first that applies, so the last that is written.
    end = first + number
    code = tl.where(mine & caught_up & (end < rows), BAD_END, tl.full((N,), SILENT, tl.int32))
    bad_anchor = caught_up & ((anchor < 0) | (anchor >= VOCAB) | (end == 0))
    code = tl.where(mine & bad_anchor, BAD_ANCHOR, code)
    code = tl.where(mine & (first > rows), GAP, code)
    bad_rows = (first < 0) | (number < 0) | (number > _MOST_COUNT)
    code = tl.where(mine & bad_rows, BAD_ROWS, code)
    # `Session._place`
    wanted = mine & (code == SILENT) & (end > rows)
    code = tl.where(wanted & (end > capacity), NO_PAGES, code)
    starved = code == NO_PAGES
    fresh = tl.where(wanted & (code == SILENT), end - rows, 0)
    over = (fresh > 0) & (tl.cumsum(fresh, 0) > limit)
    code = tl.where(over, TOO_MANY, code)
    fresh = tl.where(over, 0, fresh)
    after = tl.cumsum(fresh, 0)
    total = tl.sum(fresh, 0)
    # `Session._settle`
    good = mine & (code == SILENT)
    live = good & caught_up
    left = tl.where(code == BAD_END, 0, rows + fresh)
    tl.debug_barrier()  # a warp that is late must not read what another has written
    said = tl.where(first == behind, SILENT, code)
    said = tl.where(live & (was_live == 0), IS_LIVE, said)
    said = tl.where(good & was_live & (live == 0), NOT_AT_START, said)

    tl.store(row + ROWS, left, mask=mine)
    tl.store(row + ANCHOR, anchor, mask=live)
    tl.store(row + LIVE, live.to(tl.int64), mask=mine)
    tl.store(row + BEHIND, tl.where(good, _NOT_BEHIND, end), mask=mine)
    tl.store(row + STARVED, starved.to(tl.int64), mask=mine)

    real = lane < MOST
    tl.store(slots + lane, tl.where(mine, slot, 0).to(tl.int32), mask=real)
    tl.store(starts + lane, rows.to(tl.int32), mask=real)
    tl.store(begins + lane, (after - fresh).to(tl.int32), mask=real)
    tl.store(begins + MOST, total.to(tl.int32))
    tl.store(done, 0)

    out = verdicts + step % _KEPT * ((1 + MOST) * _VERDICT)
    tl.store(out, step)
    tl.store(out + 1, tl.where(shared > 0, count, -1))
    verdict = out + (1 + lane) * _VERDICT
    tl.store(verdict + V_SLOT, tl.where(mine, slot, -1), mask=real)
    tl.store(verdict + V_EPOCH, epoch, mask=real)
    tl.store(verdict + V_CODE, said.to(tl.int64), mask=real)
    tl.store(verdict + V_ROWS, left, mask=real)
    tl.store(verdict + V_FIRST, first, mask=real)
    tl.store(verdict + V_COUNT, number, mask=real)
    tl.store(verdict + V_ANCHOR, anchor, mask=real)
    tl.store(verdict + V_HAD, rows, mask=real)
    tl.store(verdict + V_LIVE, live.to(tl.int64), mask=real)
    tl.store(verdict + V_STARVED, starved.to(tl.int64), mask=real)
    tl.store(plan + NEXT, step + 1)
