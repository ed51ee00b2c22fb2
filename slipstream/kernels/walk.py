"""From the tokens drawn at every node to what each entry commits: `slipstream.tree.walk` and `cut`.

A repaired tree has no equal siblings, so the nodes whose token was drawn at their parent, and whose
ancestors all are such nodes, are one path from the root: the walk. Doubling the length of the
parents' jumps finds them in log2(nodes) rounds.

What a host reads: `Walks.result` says how many tokens an entry committed; the draws that gave them
are at the rows offsets[e] + path[i], and so are their logprobs and best tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.edits import has_bit
from slipstream.kernels.intake import TreeRows
from slipstream.kernels.slot_state import (
    FLAGS,
    HAS_STOPS,
    MIN_UNTIL,
    PENALISED,
    WORDS,
    SlotState,
)
from slipstream.layers.device_rows import DeviceRows
from slipstream.wire import MAX_NODES

FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LIMIT = 2
FINISH_OVER = 3
"""The slot's request ended in an earlier step: nothing is committed."""

HEADER = 4
"""Words of a result before its tokens: their number, finish, accepted nodes uncut, nodes used."""

_TAIL = 1024
_COLUMNS = tl.constexpr(WORDS)
_HEADER = tl.constexpr(HEADER)
_NONE = tl.constexpr(FINISH_NONE)
_STOP = tl.constexpr(FINISH_STOP)
_LIMIT = tl.constexpr(FINISH_LIMIT)
_OVER = tl.constexpr(FINISH_OVER)


@dataclass(frozen=True, slots=True)
class Walks:
    """What a step commits; all int32. Of entries from S on nothing is written.

    Attributes:
        result: (E, HEADER + N), the header, then the tokens that become committed, then -1 as far
            as an entry of the step could reach.
        path: (E, N), nodes whose rows stay, as many as tokens, root first, then -1 likewise.
        row_dest: (R,), index in its slot at which the row's KV and feature belong; -1 for rows that
            do not stay.
    """

    result: Tensor
    path: Tensor
    row_dest: Tensor

    @classmethod
    def allocate(
        cls, rows: int, entries: int, most_nodes: int, device: torch.device | str
    ) -> Walks:
        """For up to `rows` rows of up to `entries` entries of at most `most_nodes` nodes each."""

        def ints(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return cls(ints(entries, HEADER + most_nodes), ints(entries, most_nodes), ints(rows))

    def first(self, rows: int) -> Walks:
        """The same memory seen as room for `rows` rows, as `DeviceRows.first`."""
        entries = min(rows, len(self.result))
        return Walks(self.result[:entries], self.path[:entries], self.row_dest[:rows])


def walk(
    rows: DeviceRows,
    trees: TreeRows,
    tokens: Tensor,
    state: SlotState,
    walks: Walks,
    *,
    full: bool = True,
    most_commits: int = MAX_NODES,
) -> None:
    """Walks every entry's tree and commits tokens to its slot.

    `state` moves on by what is committed: start, anchor, and counts where penalties read them; a
    slot that reached a stop id or its limit is finished, and commits nothing until it is admitted
    again, nor does one that has no room. KV and features are left to `slipstream.kernels.commit`.

    Args:
        tokens: (R,) int32, drawn at each row; -1 where nothing may be drawn: the walk ends at the
            node before, and an entry whose root it is commits nothing.
        walks: may be made for more rows and entries than `rows`.
        full: False when no slot of the step has penalties.
        most_commits: tokens that an entry commits at most; its walk ends there.
    """
    most = walks.path.shape[1]
    block = triton.next_power_of_2(min(most, rows.capacity))
    tails = triton.cdiv(rows.capacity, _TAIL)
    _walk[(rows.most_entries + tails,)](
        rows.counts,
        rows.slots,
        rows.offsets,
        rows.starts,
        trees.used,
        trees.ids,
        trees.parents,
        tokens,
        state.start,
        state.anchor,
        state.limit,
        state.finished,
        state.words,
        state.stop_bits,
        state.counts,
        walks.result,
        walks.path,
        walks.row_dest,
        E=rows.most_entries,
        R=rows.capacity,
        V=state.vocab_size,
        BITMAP=state.stop_bits.shape[1],
        MOST=most,
        FULL=full,
        CAP=most_commits,
        N=block,
        ROUNDS=max(1, (block - 1).bit_length()),
        TAIL=_TAIL,
        num_warps=1 if block <= 64 else 4,
    )


@triton.jit
def _on_path(ids, parents, tokens, base, used, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Whether each node is walked through (int32), and the token drawn at it."""
    node = tl.arange(0, N)
    inside = node < used
    drawn = tl.load(tokens + base + node, mask=inside, other=-1)
    token = tl.load(ids + base + node, mask=inside, other=-2)
    parent = tl.load(parents + base + node, mask=inside & (node > 0), other=0)
    jump = tl.minimum(tl.maximum(parent, 0), N - 1)
    match = inside & (token == tl.gather(drawn, jump, 0))
    walked = ((node == 0) | match).to(tl.int32)
    for _ in tl.static_range(ROUNDS):
        walked = walked & tl.gather(walked, jump, 0)
        jump = tl.gather(jump, jump, 0)
    # Where nothing may be drawn no walk arrives.
    return tl.where(inside & (drawn >= 0), walked, 0), drawn


@triton.jit
def _walk(
    step_counts,
    slots,
    offsets,
    starts,
    used_nodes,
    ids,
    parents,
    tokens,
    start,
    anchor,
    limit,
    finished,
    words,
    stop_bits,
    counts,
    result,
    path,
    row_dest,
    E: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BITMAP: tl.constexpr,
    MOST: tl.constexpr,
    FULL: tl.constexpr,
    CAP: tl.constexpr,
    N: tl.constexpr,
    ROUNDS: tl.constexpr,
    TAIL: tl.constexpr,
):
    entry = tl.program_id(0)
    if entry >= E:
        row = (entry - E) * TAIL + tl.arange(0, TAIL)
        beyond = (row >= tl.load(step_counts + 1)) & (row < R)
        tl.store(row_dest + row, tl.full((TAIL,), -1, tl.int32), mask=beyond)
        return
    if entry >= tl.load(step_counts):
        return
    slot = tl.load(slots + entry).to(tl.int64)
    base = tl.load(offsets + entry)
    rows = tl.load(offsets + entry + 1) - base
    used = tl.minimum(tl.load(used_nodes + entry), MOST)
    first = tl.load(starts + entry)
    own = words + slot * _COLUMNS
    flags = tl.load(own + FLAGS)
    node = tl.arange(0, N)

    on_path, drawn = _on_path(ids, parents, tokens, base, used, N, ROUNDS)
    rank = tl.cumsum(on_path, 0) - 1
    walked = tl.minimum(tl.sum(on_path, 0), CAP)
    over = tl.load(finished + slot) != 0
    room = tl.maximum(tl.load(limit + slot) - (first + 1), 0)
    room = tl.where(over, 0, room)
    length = tl.minimum(walked, room)
    finish = tl.where(walked >= room, _LIMIT, _NONE)
    if flags & HAS_STOPS != 0:
        # A token's own index is its rank: only from min_left on does a stop id end the answer.
        min_left = tl.load(own + MIN_UNTIL) - (first + 1)
        known = (drawn >= 0) & (drawn < V)
        stops = has_bit(stop_bits + slot * BITMAP, drawn, known & (on_path > 0))
        stops = stops & (on_path > 0) & (rank >= min_left) & (rank < length)
        last = tl.min(tl.where(stops, rank, N), 0)
        finish = tl.where(last < N, _STOP, finish)
        length = tl.where(last < N, last + 1, length)
    finish = tl.where(over, _OVER, finish)

    stays = (on_path > 0) & (rank < length)
    row = base + node
    tl.store(row_dest + row, tl.where(stays, first + rank, -1), mask=node < rows)
    out = result + entry * (MOST + _HEADER)
    tl.store(out, length)
    tl.store(out + 1, finish)
    tl.store(out + 2, tl.maximum(walked - 1, 0))
    tl.store(out + 3, used)
    rest = (node >= length) & (node < MOST)
    empty = tl.full((N,), -1, tl.int32)
    tl.store(out + _HEADER + rank, drawn, mask=stays)
    tl.store(out + _HEADER + node, empty, mask=rest)
    tl.store(path + entry * MOST + rank, node, mask=stays)
    tl.store(path + entry * MOST + node, empty, mask=rest)
    if length > 0:
        tl.store(start + slot, first + length)
        tl.store(anchor + slot, tl.sum(tl.where(stays & (rank == length - 1), drawn, 0), 0))
        if FULL:
            if flags & PENALISED != 0:
                tl.atomic_add(counts + slot * V + drawn, stays.to(tl.int32), mask=stays)
    if finish != _NONE:
        tl.store(finished + slot, 1)
