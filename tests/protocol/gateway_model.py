"""A gateway reduced to the protocol: plans for two real engines, and checks on their answers."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from services.draft import commands as dc
from services.draft.engine import Engine as DraftEngine
from services.target import commands as tc
from services.target.engine import Engine as TargetEngine
from services.target.runner import Finish, SlotAdmit
from slipstream.params import SamplingParams
from slipstream.tree import resolve_spec
from tests.fakes.draft import FakeDraftRunner
from tests.fakes.handoff import Exchange, Link
from tests.fakes.target import FakeTargetRunner, expected_output

SLOTS = 4
VOCAB = 50
BLOCK = 8
CHUNK = 5
IN_FLIGHT = 2
WAIT_S = 10.0
STOP = frozenset({7})
TREE = resolve_spec("top2gap", 3, 12, block_size=BLOCK)


@dataclass
class Request:
    """What the model knows of one slot."""

    epoch: int
    prompt: list[int]
    limit: int
    planned_rows: int = 0
    output: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    last_step: int = 0

    @property
    def prefilled(self) -> bool:
        return self.planned_rows >= len(self.prompt)


class GatewayModel:
    """Drives one target engine and one draft engine over an in-memory handoff."""

    def __init__(self, watchdog_s: float = 0.05) -> None:
        self.exchange = Exchange(watchdog_s)
        self.runner = FakeTargetRunner(
            vocab=VOCAB, slots=SLOTS, pages=64, page_size=8, max_model_len=120, max_prefill_rows=64
        )
        self.failed: list[BaseException] = []
        loaded = threading.Event()
        self.target = TargetEngine(
            lambda: self.runner,
            self.exchange,
            loaded=lambda spec: loaded.set(),
            failed=self.failed.append,
        )
        self.target.start()
        assert loaded.wait(WAIT_S)
        self.draft_runner = FakeDraftRunner(
            vocab=VOCAB, block_size=BLOCK, slots=SLOTS, pages=64, page_size=8, accept=0.6
        )
        self.device = threading.Lock()
        self.epochs = 0
        self.sessions = 0
        self.session = 0  # attached on both sides
        self.step = 0
        self.after = 0
        self.requests: dict[int, Request] = {}
        self.in_flight: list[tc.Plan] = []
        self.done: list[int] = []
        self.numbers = {"target": 0, "draft": 0}
        self.open_target()
        self.open_draft()

    # Streams

    def open_target(self) -> None:
        self.target_events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.target.open(self.target_events.put)
        ready = self.target_events.get(timeout=WAIT_S)
        assert isinstance(ready, tc.Ready)
        assert ready.last_step == self.step, "the next gateway goes on from the last step"

    def open_draft(self) -> None:
        self.draft_events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.draft_closed = threading.Event()

        def closed(error: BaseException | None) -> None:
            if error is not None:
                self.failed.append(error)
            self.draft_closed.set()

        self.draft = DraftEngine(
            self.draft_runner, self.exchange, TREE, self.device, self.draft_events.put, closed
        )
        self.draft.start()

    def lose_target_stream(self) -> None:
        """The gateway goes: steps given are finished, then everything is free."""
        freed = threading.Event()
        self.target.close(freed.set)
        assert freed.wait(WAIT_S), "the target did not free its slots"
        self._drain_target(final=True)
        assert self.runner._slots == {}
        self.requests.clear()
        self.session = 0
        self.open_target()

    def lose_draft_stream(self) -> None:
        """The gateway's stream to the draft ends: steps given are finished first."""
        link = self.link()
        if link is not None:
            link.deliver()  # on a wire it comes, or the stream breaks
        self.draft.close("the gateway's stream ended")
        assert self.draft_closed.wait(WAIT_S), "the draft engine did not end"
        assert self.draft_runner.contexts == []
        self.session = 0
        self.open_draft()

    # Commands

    def _number(self, side: str) -> int:
        self.numbers[side] += 1
        return self.numbers[side]

    def attach(self) -> None:
        """A new session; running slots are admitted to it with the cursor at 0."""
        self.settle()
        self.sessions += 1
        session, first = self.sessions, self.step + 1
        self.draft.submit(dc.Attach(self._number("draft"), session, first))
        self.target.submit(tc.Attach(self._number("target"), session, first, "memory"))
        self._until(self.draft_events, dc.Attached, session)
        self._until(self.target_events, tc.Attached, session)
        self.session, self.after = session, first - 1
        for slot, request in self.requests.items():
            request.last_step = 0
            self._admit_draft(slot, request)

    def _until(self, events: queue.SimpleQueue[Any], kind: type, session: int) -> None:
        while True:
            event = events.get(timeout=WAIT_S)
            if isinstance(event, kind) and event.session == session:
                return
            self._note(event)

    def detach(self) -> None:
        if self.session:
            self.draft.submit(dc.Detach(self._number("draft"), self.session, "asked"))
            self.target.submit(tc.Detach(self._number("target"), self.session, "asked"))
            self.session = 0

    def link(self) -> Link | None:
        return self.exchange.links.get(self.session)

    def admit(self, slot: int, prompt: list[int], more: int) -> None:
        if slot in self.requests:
            return
        self.epochs += 1
        request = Request(self.epochs, prompt, len(prompt) + more)
        self.requests[slot] = request
        admit = SlotAdmit(prompt, (), request.limit, 0, STOP, SamplingParams(), None, True)
        self.target.submit(tc.Admit(self._number("target"), slot, request.epoch, admit))
        if self.session:
            self._admit_draft(slot, request)

    def _admit_draft(self, slot: int, request: Request) -> None:
        number = self._number("draft")
        self.draft.submit(
            dc.Admit(number, self.session, slot, request.epoch, TREE, 0.0, request.epoch, 0)
        )

    def release(self, slot: int) -> None:
        request = self.requests.pop(slot, None)
        if request is not None:
            self.target.submit(tc.Release(self._number("target"), slot, request.epoch))
            self.draft.submit(dc.Release(self._number("draft"), slot, request.epoch))

    def rewind(self, slot: int, rows: int) -> None:
        request = self.requests.get(slot)
        if request is not None:
            self.target.submit(tc.Rewind(self._number("target"), slot, request.epoch, rows))

    # Plans

    def prefill(self) -> None:
        entries = []
        for slot, request in self.requests.items():
            if not request.prefilled:
                first = request.planned_rows
                count = min(CHUNK, len(request.prompt) - first)
                request.planned_rows += count
                entries.append(
                    tc.PlanEntry(
                        slot, request.epoch, request.limit + 16, first, count, request.prefilled
                    )
                )
        if entries:
            self._plan(tc.StepKind.PREFILL, entries, after=self.step)

    def decode(self, nodes: int, replay: int) -> None:
        entries = [
            tc.PlanEntry(slot, r.epoch, r.limit + 16, nodes=nodes, replay=replay)
            for slot, r in self.requests.items()
            if r.prefilled and r.finish is Finish.NONE
        ]
        if entries:
            own = max(self.requests[e.slot].last_step for e in entries)
            self._plan(tc.StepKind.DECODE, entries, after=own)

    def stray(self, which: int) -> None:
        """Entries that must be refused, alone in their plan."""
        slot = which % SLOTS
        request = self.requests.get(slot)
        epoch = request.epoch if request else 0
        entry = [
            tc.PlanEntry(SLOTS + which, 1, 16, nodes=1),
            tc.PlanEntry(slot, epoch + 1000, 16, nodes=4),
            tc.PlanEntry(slot, epoch, 100, nodes=0),
            tc.PlanEntry(slot, epoch, 1, nodes=8),
        ][which % 4]
        self._plan(tc.StepKind.DECODE, [entry], after=self.after)

    def _plan(self, kind: tc.StepKind, entries: list[tc.PlanEntry], after: int) -> None:
        while len(self.in_flight) >= IN_FLIGHT:
            self._take_target()
        self.step += 1
        plan = tc.Plan(self._number("target"), self.step, self.session, kind, entries)
        self.in_flight.append(plan)
        if self.session:
            self.after = max(self.after, after)
            drafts = tuple(dc.PlanEntry(e.slot, e.epoch, max(1, e.nodes)) for e in entries)
            self.draft.submit(
                dc.Plan(
                    self._number("draft"),
                    self.step,
                    self.session,
                    kind is tc.StepKind.DECODE,
                    drafts,
                    self.after,
                )
            )
        for entry in entries:
            request = self.requests.get(entry.slot)
            if request is not None and request.epoch == entry.epoch:
                request.last_step = self.step
        self.target.submit(plan)

    # Events

    def settle(self) -> None:
        """Waits for every StepDone."""
        while self.in_flight:
            self._take_target()
        while not self.draft_events.empty():
            self._note(self.draft_events.get())

    def _take_target(self) -> None:
        event = self.target_events.get(timeout=WAIT_S)
        self._note(event)

    def _drain_target(self, final: bool = False) -> None:
        while not self.target_events.empty():
            self._note(self.target_events.get())
        assert not (final and self.in_flight), "a plan has no StepDone"

    def _note(self, event: Any) -> None:
        match event:
            case tc.StepDone():
                plan = self.in_flight.pop(0)
                assert event.step == plan.step, "StepDone out of order"
                assert [(e.slot, e.epoch) for e in event.entries] == [
                    (e.slot, e.epoch) for e in plan.entries
                ]
                for entry in event.entries:
                    self._commit(entry)
            case tc.Detached() | dc.Detached():
                if event.session == self.session:
                    self.session = 0
            case dc.Behind():
                if event.session == self.session:
                    self.rewind(event.slot, event.rows)

    def _commit(self, entry: tc.EntryDone) -> None:
        request = self.requests.get(entry.slot)
        if request is None or request.epoch != entry.epoch:
            return
        if entry.outcome is not tc.Outcome.DONE:
            assert not entry.result.tokens
            return
        request.output += entry.result.tokens
        request.finish = entry.result.finish
        whole = expected_output(request.prompt, request.limit, VOCAB, STOP)
        assert request.output == whole[: len(request.output)], "not the plain tokens"
        assert (request.finish is not Finish.NONE) == (len(request.output) == len(whole))

    # The end

    def finish(self) -> None:
        """Everything comes to rest: no wait, no slot, no page, no context is left."""
        self.settle()
        for _ in range(200):
            if not any(r.finish is Finish.NONE for r in self.requests.values()):
                break
            self.prefill()
            self.decode(1, 16)
            self.settle()
        assert all(r.finish is not Finish.NONE for r in self.requests.values())
        for slot in list(self.requests):
            self.release(slot)
        self.lose_draft_stream()
        self.lose_target_stream()
        self.draft.close("over")
        assert self.draft_closed.wait(WAIT_S)
        self.target.stop(WAIT_S)
        assert not self.target._thread.is_alive()
        assert self.failed == []
