"""What the host says to the kernels of a session on devices: its plans, and edits of its slots.

Every copy is from a pinned buffer and is not waited for: as many are kept as plans in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.handoff.layout import RING
from slipstream.kernels.peer import (
    ASK_INTS,
    EDIT_INTS,
    PEER_INTS,
    PLAN_HEAD,
    VERDICTS,
    Memory,
    peer_row,
    plan_ints,
)
from slipstream.layers.staging import Upload

IN_FLIGHT = VERDICTS
"""Plans, and steps of context, that may be on the stream at once."""


def signed(word: int) -> int:
    """A 64-bit word as int64 shows it."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True, slots=True)
class Ask:
    """A block that is asked for: `rows` rows; its tree's nodes begin at `out` of the plan."""

    slot: int
    epoch: int
    nodes: int
    rows: int
    out: int
    entry: int


@dataclass(slots=True)
class Edit:
    """What the host changes of a slot's state.

    Attributes:
        held: the epoch that takes the slot, None for nobody; read only with `reset`.
        capacity: rows that its pages hold beside a block.
        feed: it may find pages again.
    """

    reset: bool = False
    held: int | None = None
    capacity: int = 0
    feed: bool = False


class PeerInput:
    """Buffers that the kernels read, `slipstream.kernels.peer`.

    Attributes:
        peer: (PEER_INTS,) int64; no session at first.
        plan: int64 words.
        edits_at: word of the plan where its edits begin.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.edits_at = PLAN_HEAD + slots * ASK_INTS
        self._peer = Upload((PEER_INTS,), torch.int64, device)
        self._plan = Upload((plan_ints(slots),), torch.int64, device, ring=IN_FLIGHT)

    @property
    def peer(self) -> Tensor:
        return self._peer.device

    @property
    def plan(self) -> Tensor:
        return self._plan.device

    def connect(self, memory: Memory | None, which: int = 0) -> None:
        """From now on, in stream order, kernels use set `which` of `memory`; None: nothing."""
        self._peer.host()[:] = [0] * PEER_INTS if memory is None else peer_row(memory, which)
        self._peer.send()

    def send(
        self,
        step: int,
        entries: int,
        first: int,
        limits: Mapping[int, int],
        asks: Sequence[Ask],
        edits: Mapping[int, Edit],
    ) -> None:
        """A plan.

        Args:
            first: the step whose context is taken first.
            limits: most fresh rows of the steps whose context is taken, RING of them at most.
            asks: blocks, by ascending first node.
            edits: by slot.
        """
        host = self._plan.host()
        host[:PLAN_HEAD] = 0
        host[:7] = (step, first, entries, len(asks), 0, 0, len(edits))
        for taken, limit in limits.items():
            host[8 + taken % RING] = limit
        end = PLAN_HEAD + len(asks) * ASK_INTS
        if asks:
            rows = [(a.slot, signed(a.epoch), a.nodes, a.rows, a.out, a.entry, 0, 0) for a in asks]
            host[PLAN_HEAD:end].reshape(-1, ASK_INTS)[:] = rows
        if edits:
            end = self.edits_at + len(edits) * EDIT_INTS
            host[self.edits_at : end].reshape(-1, EDIT_INTS)[:] = [
                (slot, e.reset, e.held is not None, signed(e.held or 0), e.capacity, e.feed, 0, 0)
                for slot, e in edits.items()
            ]
        self._plan.send(end)
