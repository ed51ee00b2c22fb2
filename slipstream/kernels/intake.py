"""From what the host planned, and what a peer proposed, to the rows of a step.

A proposal is input: `prepare_rows` keeps of it what `slipstream.tree.repair` keeps, which is its
reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.proposal import keep_chain, keep_tree, store_bits
from slipstream.layers.device_rows import DeviceRows

_TAIL = 1024
_TILE = 32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the host says of a step, on the device; all int32. Nothing from S or T on is read.

    Attributes:
        counts: (2,), the entries S and the rows T.
        slots: (E,).
        offsets: (E + 1,), first row of each entry.
        proposal_counts: (E,), nodes proposed; 0 for none.
        proposal_tokens, proposal_parents: (R,), at the entries' row offsets.
    """

    counts: Tensor
    slots: Tensor
    offsets: Tensor
    proposal_counts: Tensor
    proposal_tokens: Tensor
    proposal_parents: Tensor


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The trees of a step as rows, beside `DeviceRows`; all int32.

    Attributes:
        ids: (R,), token of each row; 0 for padding.
        parents: (R,), its parent as a node of its own entry; -1 for anchors and padding.
        depths: (R,); 0 for anchors and padding.
        used: (E,), nodes of each entry's tree, the first of its rows; 0 from S on.
    """

    ids: Tensor
    parents: Tensor
    depths: Tensor
    used: Tensor

    @classmethod
    def allocate(cls, rows: int, entries: int, device: torch.device | str) -> TreeRows:
        """For up to `rows` rows of up to `entries` entries; every entry its anchor alone."""

        def ints(size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        return cls(ints(rows, 0), ints(rows, -1), ints(rows, 0), ints(entries, 1))

    def first(self, rows: int) -> TreeRows:
        """The same memory seen as room for `rows` rows, as `DeviceRows.first`."""
        entries = min(rows, len(self.used))
        return TreeRows(
            self.ids[:rows], self.parents[:rows], self.depths[:rows], self.used[:entries]
        )


def prepare_rows(
    plan: StepPlan,
    start: Tensor,
    anchor: Tensor,
    rows: DeviceRows,
    trees: TreeRows,
    *,
    vocab_size: int,
    most_nodes: int,
    tree: bool,
) -> None:
    """Fills `rows` (but for its tables) and `trees` from a plan and the slots' state.

    Rows of an entry beyond its tree are padding: token 0 at the anchor's position, seeing
    themselves. Without `tree` bit-sets are not written, and of a proposal that is no chain the
    longest beginning that is one is kept.

    Args:
        plan: may share memory with `rows`.
        start, anchor: (slots,) int32, of `SlotState`.
        most_nodes: rows of one entry at most, within `rows.most_own_rows` for trees.
    """
    most = triton.next_power_of_2(min(most_nodes, rows.capacity))
    tails = triton.cdiv(rows.capacity, _TAIL)
    _prepare_rows[(rows.most_entries + tails,)](
        plan.counts,
        plan.slots,
        plan.offsets,
        plan.proposal_counts,
        plan.proposal_tokens,
        plan.proposal_parents,
        start,
        anchor,
        rows.counts,
        rows.slots,
        rows.offsets,
        rows.starts,
        rows.entries,
        rows.positions,
        rows.bits,
        trees.ids,
        trees.parents,
        trees.depths,
        trees.used,
        E=rows.most_entries,
        R=rows.capacity,
        W=rows.bits.shape[1],
        VOCAB=vocab_size,
        TREE=tree,
        N=most,
        ROUNDS=max(1, (most - 1).bit_length()),
        TILE=min(_TILE, most),
        TAIL=_TAIL,
        num_warps=1 if most <= 32 else 4 if most <= 128 else 8,
    )


@triton.jit
def _tail(
    plan_counts,
    counts,
    offsets,
    entries,
    positions,
    ids,
    parents,
    depths,
    block,
    R: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Rows T .. R - 1 belong to no entry."""
    total = tl.load(plan_counts + 1)
    row = block * TAIL + tl.arange(0, TAIL)
    mask = (row >= total) & (row < R)
    none = tl.full((TAIL,), -1, tl.int32)
    zero = tl.zeros((TAIL,), tl.int32)
    tl.store(entries + row, none, mask=mask)
    tl.store(positions + row, zero, mask=mask)
    tl.store(ids + row, zero, mask=mask)
    tl.store(parents + row, none, mask=mask)
    tl.store(depths + row, zero, mask=mask)
    if block == 0:
        tl.store(counts, tl.load(plan_counts))
        tl.store(counts + 1, total)
        tl.store(offsets, 0)


@triton.jit
def _prepare_rows(
    plan_counts,
    plan_slots,
    plan_offsets,
    proposal_counts,
    tokens,
    proposed,
    start,
    anchor,
    counts,
    slots,
    offsets,
    starts,
    entries,
    positions,
    bits,
    ids,
    parents,
    depths,
    used,
    E: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    VOCAB: tl.constexpr,
    TREE: tl.constexpr,
    N: tl.constexpr,
    ROUNDS: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
):
    entry = tl.program_id(0)
    if entry >= E:
        _tail(
            plan_counts,
            counts,
            offsets,
            entries,
            positions,
            ids,
            parents,
            depths,
            entry - E,
            R,
            TAIL,
        )
        return
    if entry >= tl.load(plan_counts):
        tl.store(slots + entry, 0)
        tl.store(offsets + entry + 1, tl.load(plan_counts + 1))
        tl.store(starts + entry, 0)
        tl.store(used + entry, 0)
        return
    slot = tl.load(plan_slots + entry)
    base = tl.load(plan_offsets + entry)
    end = tl.load(plan_offsets + entry + 1)
    first = tl.load(start + slot)
    root = tl.load(anchor + slot)
    rows = end - base
    count = tl.load(proposal_counts + entry)
    count = tl.where((count < 1) | (count > rows), 1, count)
    node = tl.arange(0, N)
    if TREE:
        token, kept, index, parent, depth, old = keep_tree(
            tokens, proposed, base, count, VOCAB, N, TILE, ROUNDS
        )
    else:
        token, kept = keep_chain(tokens, proposed, base, count, VOCAB, N)
        index = node
        parent = node - 1
        depth = node
        old = parent
    total = tl.minimum(tl.sum(kept, 0), rows)
    kept = tl.where(node < rows, kept, 0)
    stays = kept > 0
    token = tl.where(node == 0, root, token)
    parent = tl.where(node == 0, -1, parent)
    padding = (node >= total) & (node < rows)
    own = tl.zeros((N,), tl.int32) + entry
    zero = tl.zeros((N,), tl.int32)
    tl.store(entries + base + node, own, mask=node < rows)
    tl.store(ids + base + index, token, mask=stays)
    tl.store(ids + base + node, zero, mask=padding)
    tl.store(parents + base + index, parent, mask=stays)
    tl.store(parents + base + node, zero - 1, mask=padding)
    tl.store(depths + base + index, depth, mask=stays)
    tl.store(depths + base + node, zero, mask=padding)
    tl.store(positions + base + index, first + depth, mask=stays)
    tl.store(positions + base + node, zero + first, mask=padding)
    if TREE:
        store_bits(bits, base, node, kept, index, old, padding, N, W, ROUNDS)
    tl.store(slots + entry, slot)
    tl.store(offsets + entry + 1, end)
    tl.store(starts + entry, first)
    tl.store(used + entry, total)


def prepare_prefill(
    plan: StepPlan, firsts: Tensor, known: Tensor, rows: DeviceRows, trees: TreeRows
) -> None:
    """Fills `rows` (but for tables and bit-sets) and `trees.ids` for rows of known tokens.

    Row i of entry e is the token `known[offsets[e] + i]` at position firsts[e] + i. With one row
    for each entry this prepares the draws of first tokens; `trees` as allocated has the rest.

    Args:
        plan: its proposals are not read.
        firsts: (E,) int32.
        known: (R,) int32, token of each row.
    """
    tails = triton.cdiv(rows.capacity, _TAIL)
    _prepare_prefill[(rows.most_entries + tails,)](
        plan.counts,
        plan.slots,
        plan.offsets,
        firsts,
        known,
        rows.counts,
        rows.slots,
        rows.offsets,
        rows.starts,
        rows.entries,
        rows.positions,
        trees.ids,
        E=rows.most_entries,
        R=rows.capacity,
        TAIL=_TAIL,
    )


@triton.jit
def _prepare_prefill(
    plan_counts,
    plan_slots,
    plan_offsets,
    firsts,
    known,
    counts,
    slots,
    offsets,
    starts,
    entries,
    positions,
    ids,
    E: tl.constexpr,
    R: tl.constexpr,
    TAIL: tl.constexpr,
):
    entry = tl.program_id(0)
    lane = tl.arange(0, TAIL)
    total = tl.load(plan_counts + 1)
    if entry >= E:
        block = entry - E
        row = block * TAIL + lane
        inside = row < total
        tl.store(ids + row, tl.load(known + row, mask=inside, other=0), mask=row < R)
        tl.store(entries + row, lane * 0 - 1, mask=(row < R) & (row >= total))
        tl.store(positions + row, lane * 0, mask=(row < R) & (row >= total))
        if block == 0:
            tl.store(counts, tl.load(plan_counts))
            tl.store(counts + 1, total)
            tl.store(offsets, 0)
        return
    if entry >= tl.load(plan_counts):
        tl.store(slots + entry, 0)
        tl.store(offsets + entry + 1, total)
        tl.store(starts + entry, 0)
        return
    base = tl.load(plan_offsets + entry)
    end = tl.load(plan_offsets + entry + 1)
    first = tl.load(firsts + entry)
    row = base
    while row < end:
        at = row + lane
        tl.store(entries + at, lane * 0 + entry, mask=at < end)
        tl.store(positions + at, first + at - base, mask=at < end)
        row += TAIL
    tl.store(slots + entry, tl.load(plan_slots + entry))
    tl.store(offsets + entry + 1, end)
    tl.store(starts + entry, first)
