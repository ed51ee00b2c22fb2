"""The slots as the gateway sees them: who runs where, how far, and which steps are in flight."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.ledger import Ledger
from gateway.request import Request

PREFILL = 1
DECODE = 2
"""Values of StepKind."""


@dataclass(slots=True, eq=False)
class Running:
    """One occupancy of a slot.

    Attributes:
        limit: committed tokens at which the request ends.
        rows: positions to prefill: prompt and the output given before this occupancy.
        sent: prefill rows planned so far.
        tokens: committed tokens known from results.
        in_flight: planned steps without a result; `decodes` of them verify, `yields` of them give
            at least one token unless the request ends before.
        last_step: last step it was planned in.
        group: its ping-pong group; it changes to `wanted` with nothing in flight.
        session: the draft session that knows it, 0: none.
        live: that draft has every context row.
        most_nodes, branches: rows that its own tree has at most, and whether it may branch; the
            drafting sets them.
        cursor: estimate of the rows given to that draft.
        rewind_at: step from which the cursor may be set back to `behind_rows`; 0: nothing to do.
        patience: steps until the next rewind after another Behind.
        gone: released; what still arrives for it is dropped.
    """

    request: Request
    slot: int
    epoch: int
    limit: int
    rows: int
    tokens: int
    sent: int = 0
    in_flight: int = 0
    decodes: int = 0
    yields: int = 0
    last_step: int = 0
    group: int = 0
    wanted: int = 0
    session: int = 0
    live: bool = False
    most_nodes: int = 1
    branches: bool = False
    cursor: int = 0
    rewind_at: int = 0
    behind_rows: int = 0
    patience: int = 0
    gone: bool = False

    @property
    def start(self) -> int:
        """Known start: KV rows once prefilled, as far as results tell."""
        return max(self.tokens - 1, self.rows)

    @property
    def prefilled(self) -> bool:
        """Every prefill row is planned, so that a decode plan may follow."""
        return self.sent == self.rows

    @property
    def runs_on(self) -> bool:
        """Whether another token is left to draw after the steps in flight, as far as is known."""
        return self.tokens + self.yields < self.limit

    def positions(self, nodes: int, block_size: int) -> int:
        """Watermark that a decode plan of `nodes` rows needs, whatever the steps in flight give."""
        return min(self.start + self.decodes * block_size, self.limit) + nodes


@dataclass(slots=True, eq=False)
class Step:
    """A plan in flight.

    Attributes:
        group, groups: of a decode step: its ping-pong group, and how many there were.
        nodes: rows of every slot that drafts in it; `drafted` slots do.
        nodes_of: rows per entry in a decode step; in a prefill step 1 if the entry draws the first
            token, else 0.
        replays: replay rows per entry of a decode step.
        spans: first position and count per entry of a prefill step.
        after: the draft writes the context of all steps up to here first.
        version: the ledger's when it was sent.
        sent_at: in seconds of the scheduler's clock.
    """

    number: int
    kind: int
    session: int = 0
    group: int = 0
    groups: int = 1
    nodes: int = 1
    version: int = 0
    sent_at: float = 0.0
    entries: list[Running] = field(default_factory=list)
    nodes_of: list[int] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    drafted: int = 0
    after: int = 0


class Board:
    """Slots, pages and steps in flight of one life of the target's stream.

    Invariants: a slot is free or holds one Running; `prefilling` and the groups together hold every
    Running once; the sum of `in_flight` is what the steps of `flight` name.
    """

    def __init__(self, slots: int, pages: int, page_size: int, last_step: int) -> None:
        self.slots = slots
        self.ledger = Ledger(pages, page_size, slots)
        self.running: list[Running | None] = [None] * slots
        self.prefilling: list[Running] = []
        self.decoding: list[Running] = []
        self.flight: deque[Step] = deque()
        self.next_step = last_step + 1
        self._free = list(range(slots))

    def __iter__(self) -> Iterator[Running]:
        return (running for running in self.running if running is not None)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> int:
        return self.slots - len(self._free)

    def find(self, slot: int, epoch: int) -> Running | None:
        """The occupancy that a message names; None when it is stale."""
        running = self.running[slot] if 0 <= slot < self.slots else None
        return running if running is not None and running.epoch == epoch else None

    def admit(self, request: Request, epoch: int, limit: int) -> Running:
        """Occupies the lowest free slot; pages are the caller's to reserve."""
        slot = heapq.heappop(self._free)
        known = request.committed
        running = Running(request, slot, epoch, limit, rows=known, tokens=known)
        self.running[slot] = running
        self.prefilling.append(running)
        return running

    def prefilled(self, running: Running) -> None:
        """Its last prefill chunk is planned: it decodes from now on."""
        self.prefilling.remove(running)
        self.decoding.append(running)

    def release(self, running: Running) -> None:
        """Frees slot and pages; steps in flight still name the occupancy, which is gone."""
        running.gone = True
        (self.decoding if running.prefilled else self.prefilling).remove(running)
        self.running[running.slot] = None
        self.ledger.give_back(running.slot)
        heapq.heappush(self._free, running.slot)

    def youngest(self) -> Running:
        """The running request that arrived last."""
        return max(self, key=lambda running: running.request.id)

    def launch(self, step: Step) -> None:
        """A plan is sent."""
        assert step.number == self.next_step
        self.next_step += 1
        self.flight.append(step)
        decode = step.kind == DECODE
        for running, nodes in zip(step.entries, step.nodes_of, strict=True):
            running.in_flight += 1
            running.last_step = step.number
            running.decodes += decode
            running.yields += nodes > 0

    def finish(self, number: int) -> Step | None:
        """The oldest plan has its result; None when `number` is not that plan's."""
        if not self.flight or self.flight[0].number != number:
            return None
        step = self.flight.popleft()
        decode = step.kind == DECODE
        for running, nodes in zip(step.entries, step.nodes_of, strict=True):
            running.in_flight -= 1
            running.decodes -= decode
            running.yields -= nodes > 0
        return step

    def check_idle(self, step: Step, free_pages: int) -> None:
        """With nothing in flight, nothing changed since `step` was sent and every slot planned at
        least once (its pages are the target's only then), the counts agree."""
        if self.flight or step.version != self.ledger.version:
            return
        if all(running.sent for running in self.prefilling):
            self.ledger.check(free_pages)
