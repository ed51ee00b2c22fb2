"""A target's memory that nobody exported, and the draft's end over it with flags of the host."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.handoff.base import ContextRecord
from slipstream.handoff.layout import (
    HEAD_INTS,
    RECORD_INTS,
    RELEASED,
    RING,
    SETS,
    Layout,
    ring_entry,
)

WAIT_S = 20.0


class FakeMemory:
    """Tensors as `slipstream.kernels.peer.Memory` has them, and what a target does with them."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout

        def words(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        rows = layout.pages * layout.page_size
        self.features = words(rows, layout.width, kind=getattr(torch, layout.dtype))
        self.tables = words(layout.slots, layout.table_pages, kind=torch.int32)
        self.records = words(SETS * RING, 1 + layout.slots, RECORD_INTS)
        self.heads = words(SETS * RING, 1 + layout.slots, HEAD_INTS)
        self.nodes = words(SETS * RING, layout.rows, 2, kind=torch.int32)

    def put_rows(self, slot: int, first: int, rows: Tensor) -> None:
        """Features of a slot from position `first` on, in the pages of its table."""
        size = self.layout.page_size
        for offset, row in enumerate(rows):
            position = first + offset
            page = int(self.tables[slot, position // size])
            self.features[page * size + position % size] = row.to(self.features.device)

    def write_records(
        self, which: int, step: int, records: Sequence[ContextRecord], count: int | None = None
    ) -> None:
        """What the target's last kernel of a step writes."""
        entry = self.records[ring_entry(which, step)]
        entry.random_(-9, 9)  # what is not said is not read
        entry[0, :2] = torch.tensor([step, len(records) if count is None else count])
        for index, r in enumerate(records):
            words = [r.slot, signed(r.epoch), r.first_row, r.count, r.anchor, int(r.caught_up)]
            entry[1 + index, :6] = torch.tensor(words)

    def read_trees(
        self, which: int, step: int, nodes: Sequence[int]
    ) -> dict[int, tuple[int, list[int], list[int]]] | None:
        """By slot: epoch, tokens, parents; None when the ring holds another step."""
        entry = ring_entry(which, step)
        heads = self.heads[entry].tolist()
        if heads[0][0] != step:
            return None
        assert heads[0][1] == len(nodes)
        trees, at = {}, 0
        for head, room in zip(heads[1:], nodes, strict=False):
            slot, epoch, size = head[:3]
            if size:
                assert size <= room
                tree = self.nodes[entry, at : at + size].tolist()
                trees[slot] = (epoch, [t for t, _ in tree], [p for _, p in tree])
            at += room
        return trees


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


class FakeDeviceEnd:
    """`services.draft.runner.DeviceEnd`: its waits block the calling thread."""

    transport = "cuda_ipc"

    def __init__(self, session: int, memory: FakeMemory, which: int, first_step: int) -> None:
        self.session, self.memory, self.which = session, memory, which
        self.reason = ""
        self.context = self.proposal = self.taken = self.planned_to = first_step - 1
        self.passed_steps: list[int] = []
        self.log: list[tuple[str, int]] = []
        self.closed = 0
        self.waiting = threading.Event()
        self._changed = threading.Condition()

    @property
    def alive(self) -> bool:
        return not self.reason

    def _settled(self) -> None:
        """What the stream was given is done."""
        if self.memory.features.is_cuda:
            torch.cuda.current_stream().synchronize()

    # The draft

    def await_context(self, step: int) -> None:
        self.log.append(("await", step))
        self._settled()
        with self._changed:
            self.waiting.set()
            assert self._changed.wait_for(lambda: self.context >= step, WAIT_S)
            self.waiting.clear()

    def consumed(self, step: int) -> None:
        self._settled()
        self.log.append(("consumed", step))
        with self._changed:
            self.taken = max(self.taken, step)
            self._changed.notify_all()

    def publish(self, step: int) -> None:
        self._settled()
        self.log.append(("publish", step))
        with self._changed:
            self.proposal = max(self.proposal, step)
            self._changed.notify_all()

    def planned(self, step: int) -> None:
        self.planned_to = step

    def passed(self, step: int) -> None:
        self.passed_steps.append(step)

    def end(self, reason: str) -> None:
        with self._changed:
            self.reason = self.reason or reason
            self.context = RELEASED
            self._changed.notify_all()

    def close(self) -> None:
        assert not self.alive
        self.closed += 1

    # The target

    def publish_context(self, step: int, records: Sequence[ContextRecord]) -> None:
        """As the target's stream does."""
        self.memory.write_records(self.which, step, records)
        if self.memory.features.is_cuda:
            torch.cuda.synchronize()
        with self._changed:
            self.context = max(self.context, step)
            self._changed.notify_all()

    def await_proposal(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.proposal >= step, WAIT_S)
