"""The draft model behind the engine's `DraftRunner`, on a device: nothing waits but `draft`, once.

`services.draft.model_runner` is the plain version. What is here keeps the pages and says to
`services.draft.device_step` what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.draft.candidates import Block
from services.draft.context_cache import PagePool
from services.draft.device_session import DeviceSession, Notice
from services.draft.device_step import DraftStep, Finish, StepSizes
from services.draft.runner import (
    ContextRows,
    DeviceEnd,
    DraftCost,
    DraftEntry,
    Drafting,
    DraftSpec,
    NoPages,
)
from services.draft.session import Session
from services.draft.warmup import measure
from slipstream.kernels.grow import NODE_INTS
from slipstream.layers.graphs import Graphs
from slipstream.layers.staging import Copied, Readback
from slipstream.models import DraftHead
from slipstream.progress import Progress
from slipstream.tree import Tree, TreeSpec


class DeviceRunner:
    """A draft head on a device, and the context pages of all the sessions it may have.

    Each session has buffers and a stream of its own, so that one that waits holds up none of the
    others. When it is made, all memory is taken and all work has run once and is recorded.

    Args:
        head: its weights on `graphs.device`.
        graphs: of the first session; the others' are like it.
        sessions: contexts that may be open at once.
        max_len: committed tokens of a slot at most, its target's longest request.
        attention: torch or triton; torch does not go with recorded work.
        sizes: rows of one pass; by default `StepSizes.of(spec)`.
        mapper: maps the memory of targets; None: every session goes through the host.
        progress: called as pieces of work are recorded.
    """

    def __init__(
        self,
        head: DraftHead,
        spec: DraftSpec,
        *,
        max_len: int,
        graphs: Graphs,
        sessions: int = 1,
        attention: str = "triton",
        sizes: StepSizes | None = None,
        mapper: Any = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        if attention not in ("torch", "triton"):
            raise ValueError(f"attention must be torch or triton, got {attention!r}")
        if attention == "torch" and graphs.enabled:
            raise ValueError("attention torch waits for the device: it cannot be recorded")
        self.spec = spec
        self.devices = None if mapper is None else _Mapped(mapper)
        others = [Graphs(graphs.device, graphs.enabled) for _ in range(sessions - 1)]
        self.steps = [
            DraftStep(
                head,
                spec,
                max_len=max_len,
                dtype=getattr(torch, spec.feature_dtype),
                sizes=StepSizes.of(spec) if sizes is None else sizes,
                attention=attention,
                graphs=own,
                peer=mapper is not None,
            )
            for own in (graphs, *others)
        ]
        pieces = sum(step.pieces for step in self.steps)
        for index, step in enumerate(self.steps):
            before = index * step.pieces
            step.record(lambda done, _, before=before: progress(before + done, pieces))  # type: ignore[misc]
        self._idle = [_Idle(step) for step in reversed(self.steps)]

    def open_context(self) -> DeviceContext:
        """Raises RuntimeError when every context is open."""
        if not self._idle:
            raise RuntimeError("every draft context is open")
        return DeviceContext(self.spec, self._idle.pop(), self._idle.append)

    def warm_up(self, tree: TreeSpec) -> list[DraftCost]:
        """Measures steps; see `services.draft.warmup`. All shapes have run already."""
        return measure(self, tree)


class _Idle:
    """What a context is made of."""

    def __init__(self, step: DraftStep) -> None:
        self.step = step
        self.result = Readback(tuple(step.result.shape), torch.int32, step.graphs.device)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """`Devices` over contexts of a `DeviceRunner`."""

    mapper: Any

    def connect(
        self, session: Session, end: DeviceEnd, tell: Callable[[Notice], None]
    ) -> DeviceSession:
        assert isinstance(session.context, DeviceContext)
        return DeviceSession(session, session.context, end, tell)


@dataclass(slots=True)
class _Held:
    """A slot's pages, and what its trees need."""

    pages: list[int]
    budget: int
    ranks: int
    plain_chain: bool

    @classmethod
    def of(cls, drafting: Drafting) -> _Held:
        block = Block(1, 0, drafting)
        plain = not block.scored and not block.noisy
        return cls([], drafting.tree.budget, block.width, plain)


class DeviceContext:
    """`DraftContext` over a session's step and pages; `give_back` takes the step at the end."""

    def __init__(self, spec: DraftSpec, own: _Idle, give_back: Callable[[_Idle], None]) -> None:
        self._spec, self._step, self._result = spec, own.step, own.result
        self._own, self._give_back = own, give_back
        self._pool = PagePool(spec.pages)
        self._held: dict[int, _Held] = {}

    @property
    def spec(self) -> DraftSpec:
        return self._spec

    @property
    def step(self) -> DraftStep:
        return self._step

    @property
    def free_pages(self) -> int:
        return self._pool.free

    def admit(self, slot: int, drafting: Drafting) -> None:
        """Raises ValueError when the slot is taken."""
        if slot in self._held:
            raise ValueError(f"slot {slot} already holds {len(self._held[slot].pages)} pages")
        self._held[slot] = _Held.of(drafting)
        self._step.specs.set(slot, drafting)

    def reserve(self, slot: int, rows: int) -> None:
        """Also raises NoPages when a slot cannot hold so many rows however many pages are free."""
        held = self._held[slot].pages
        wanted = -(-(rows + self._spec.block_size) // self._spec.page_size)
        if wanted > self._step.table_pages:
            raise NoPages(
                f"a slot has {self._step.table_pages} context pages at most, not {wanted}"
            )
        if wanted > len(held):
            self._give(slot, wanted - len(held))

    def reserve_most(self, slot: int, rows: int) -> int:
        """`reserve` for as many of `rows` rows as there are pages; how many the slot can hold."""
        size, held = self._spec.page_size, self._held[slot].pages
        wanted = min(-(-(rows + self._spec.block_size) // size), self._step.table_pages)
        missing = min(wanted - len(held), self._pool.free)
        if missing > 0:
            self._give(slot, missing)
        return len(held) * size - self._spec.block_size

    def _give(self, slot: int, pages: int) -> None:
        held, taken = self._held[slot].pages, self._pool.take(pages)
        self._step.pages.add(slot, len(held), taken)
        held += taken

    def release(self, slot: int) -> None:
        self._pool.give(self._held.pop(slot).pages)

    def close(self) -> None:
        for slot in list(self._held):
            self.release(slot)
        self._give_back(self._own)

    def write(self, rows: Sequence[ContextRows]) -> None:
        """Returns once the bytes are copied; the device takes them in its own time."""
        step = self._step
        with step.graphs.on_stream():
            step.send_tables()
            for piece in _pieces(rows, step.sizes, self._spec.row_bytes):
                step.context.send_context(piece)
                step.write(self._send_features(piece))

    def _send_features(self, piece: Sequence[ContextRows]) -> int:
        """Returns the number of rows."""
        features = self._step.features
        raw = features.host().reshape(-1).view(np.uint8)
        at = 0
        for part in piece:
            raw[at : at + len(part.rows)] = np.frombuffer(part.rows, np.uint8)
            at += len(part.rows)
        count = at // self._spec.row_bytes
        features.send(count)
        return count

    def draft(self, entries: Sequence[DraftEntry]) -> list[Tree]:
        trees: list[Tree] = []
        most = self._step.sizes.rows // self._spec.block_size
        with self._step.graphs.on_stream():
            self._step.send_tables()
            for first in range(0, len(entries), most):
                trees += self._draft(entries[first : first + most])
        return trees

    def _draft(self, entries: Sequence[DraftEntry]) -> list[Tree]:
        """The trees of one pass."""
        step, counts = self._step, [self.block_rows(entry.nodes) for entry in entries]
        nodes = step.drafts.send_drafts(entries, counts)
        step.draft(sum(counts), self.finish_for((entry.slot, entry.nodes) for entry in entries))
        copied = self._result.start(step.result[: step.size_room + nodes[-1] * NODE_INTS])
        return self._trees(nodes, copied)

    def finish_for(self, trees: Iterable[tuple[int, int]]) -> Finish:
        """The work that makes trees of so many nodes for these slots: (slot, nodes) each."""
        held = [(self._held[slot], nodes) for slot, nodes in trees]
        return self._step.finish_for(
            chains=all(slot.plain_chain for slot, _ in held),
            ranks=max(slot.ranks for slot, _ in held),
            nodes=max(min(nodes, slot.budget) for slot, nodes in held),
        )

    def _trees(self, nodes: Sequence[int], copied: Copied) -> list[Tree]:
        """Waits for the step; tree i begins at node nodes[i] of the result."""
        result, room = copied.read(), self._step.size_room
        columns = result[room : room + nodes[-1] * NODE_INTS].reshape(-1, NODE_INTS).T
        tokens, parents, depths = columns.tolist()
        trees = []
        for first, size in zip(nodes, result[: len(nodes) - 1].tolist(), strict=False):
            span = slice(first, first + size)
            trees.append(Tree(tokens[span], parents[span], depths[span]))
        return trees

    def block_rows(self, nodes: int) -> int:
        """See `ModelContext.block_rows`."""
        size = self._spec.block_size
        return min(size, nodes) if self._spec.causal else size


def _pieces(
    rows: Sequence[ContextRows], sizes: StepSizes, row_bytes: int
) -> Iterator[list[ContextRows]]:
    """The rows in runs that fit one pass; an entry that does not fit is cut."""
    piece: list[ContextRows] = []
    room = sizes.write_rows
    for part in rows:
        done = 0
        while done < part.count:
            if room == 0 or len(piece) == sizes.entries:
                yield piece
                piece, room = [], sizes.write_rows
            count = min(room, part.count - done)
            raw = part.rows[done * row_bytes : (done + count) * row_bytes]
            piece.append(ContextRows(part.slot, part.first_row + done, count, raw))
            done += count
            room -= count
    if piece:
        yield piece
