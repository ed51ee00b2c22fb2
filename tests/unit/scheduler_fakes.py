"""A cell without processes for the scheduler's tests: a target and a draft that obey the protocol
and assert everything the scheduler owes them.

Nothing runs by itself. Commands wait in each server's queue, events in the cell's; a test decides
who moves next. The target is in scheduler_target.py, the draft and the cell are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.cell import Command, Lost, Peer, Received
from slipstream.errors import PeerLost
from slipstream.v1 import common_pb2 as common
from slipstream.v1 import draft_pb2, target_pb2
from slipstream.wire import PROTOCOL
from tests.unit.scheduler_target import VOCAB, WIDTH, CellSpec, FakeTarget, Handoff, draw


@dataclass
class DraftSlot:
    epoch: int
    seed: int
    choice: int
    rows: int = 0
    anchor: int = -1
    live: bool = False
    behind: bool = False
    pages: int = 0
    starved: bool = False
    last_step: int = 0


class FakeDraft:
    """The draft: writes context, drafts what is right most of the time."""

    def __init__(self, cell: FakeCell) -> None:
        self.cell = cell
        self.spec = cell.spec
        self.commands: deque[draft_pb2.DraftCommand] = deque()
        self.number = 0
        self.session: Handoff | None = None
        self.connected = False
        self.next_step = 0
        self.written = 0
        self.after = 0
        self.slots: dict[int, DraftSlot] = {}
        self.free = self.spec.draft_pages
        self.up = False

    def send(self, command: draft_pb2.DraftCommand) -> None:
        self.number += 1
        assert command.number == self.number, "commands are numbered without gaps"
        self.commands.append(command)

    def move(self) -> bool:
        """Carries out the next command; False if there is none or it must wait."""
        if self.session is not None and self.connected and not self.session.alive:
            self._drop("the target ended it")
            return True
        if not self.up or not self.commands:
            return False
        command = self.commands[0]
        kind = command.WhichOneof("command")
        if kind == "plan" and not self._can_run(command.plan):
            return False
        self.commands.popleft()
        getattr(self, f"_{kind}")(command)
        return True

    def _emit(self, **event: object) -> None:
        self.cell.emit(Peer.DRAFT, draft_pb2.DraftEvent(**event))  # type: ignore[arg-type]

    def _hello(self, command: draft_pb2.DraftCommand) -> None:
        spec = self.spec
        ready = draft_pb2.DraftReady(
            protocol=PROTOCOL, model="head", block_size=spec.block_size, causal=True,
            vocab_size=VOCAB, feature_width=WIDTH, slots=spec.slots, pages=spec.draft_pages,
            page_size=spec.page_size,
        )  # fmt: skip
        ready.fingerprints.fc = self.cell.draft_fingerprint
        tree = ready.tree
        tree.mode, tree.width, tree.budget = draft_pb2.TREE_MODE_TOP2GAP, 4, spec.budget
        tree.beta, tree.gap0, tree.spine = 1.0, 1.0, True
        for slots in (1, 8):
            ready.draft_costs.add(slots=slots, rows=slots * spec.block_size, ns=1_000_000)
        self._emit(ready=ready)

    def _ping(self, command: draft_pb2.DraftCommand) -> None:
        pass

    def _attach(self, command: draft_pb2.DraftCommand) -> None:
        attach = command.attach
        if self.session is not None:
            self._drop("another takes its place")
        self.session = self.cell.handoff(attach.session, attach.first_step)
        self.connected = False
        self.next_step = attach.first_step
        self.written = self.after = attach.first_step - 1
        self.cell.connect(Peer.DRAFT, attach.session)

    def _drop(self, reason: str) -> None:
        assert self.session is not None
        self.session.alive = False
        self._emit(detached=common.Detached(session=self.session.session, reason=reason))
        self.session = None
        self.slots.clear()
        self.free = self.spec.draft_pages

    def _detach(self, command: draft_pb2.DraftCommand) -> None:
        if self.session is not None and self.session.session == command.detach.session:
            self._drop("detached")

    def _current(self, session: int) -> bool:
        return self.session is not None and self.session.session == session

    def _admit(self, command: draft_pb2.DraftCommand) -> None:
        admit = command.admit
        if not self._current(admit.session):
            return
        assert admit.slot not in self.slots and admit.tree.budget <= self.spec.budget
        self.slots[admit.slot] = DraftSlot(admit.epoch, admit.seed, admit.choice)

    def _release(self, command: draft_pb2.DraftCommand) -> None:
        if self.session is None:
            return
        slot = self.slots.pop(command.release.slot)
        assert slot.epoch == command.release.epoch
        self.free += slot.pages
        for number, other in self.slots.items():
            if other.starved:
                other.starved = False
                self._behind(number, other, "pages are free again")

    def _behind(self, number: int, slot: DraftSlot, reason: str) -> None:
        assert self.session is not None
        slot.live, slot.behind = False, True
        self._emit(
            behind=draft_pb2.Behind(
                session=self.session.session, slot=number, epoch=slot.epoch, rows=slot.rows,
                reason=reason,
            )
        )  # fmt: skip

    def _can_run(self, plan: draft_pb2.DraftPlan) -> bool:
        session = self.session
        if session is None or session.session != plan.session or not session.alive:
            return True
        return all(step in session.context for step in range(self.written + 1, plan.after + 1))

    def _plan(self, command: draft_pb2.DraftCommand) -> None:
        plan, session = command.plan, self.session
        if session is None or session.session != plan.session or not session.alive:
            return
        assert self.connected, "only a connected session may be named"
        assert plan.step == self.next_step, "a session's plans have no gaps from its first step"
        self.next_step += 1
        assert self.after <= plan.after < plan.step, "`after` only rises"
        self.after = plan.after
        ring = self.spec.window * self.spec.groups + 1
        assert plan.after > plan.step - ring, "a ring would overrun"
        while self.written < plan.after:
            self.written += 1
            for record in session.context[self.written]:
                self._take(*record)
        proposals = session.proposals.setdefault(plan.step, {})
        for entry in plan.entries:
            slot = self.slots.get(entry.slot)
            if slot is None or slot.epoch != entry.epoch:
                assert entry.nodes <= 1, "drafts planned for a slot that the draft does not know"
                continue
            assert plan.kind != common.STEP_KIND_DECODE or slot.last_step <= plan.after
            slot.last_step = plan.step
            if plan.kind == common.STEP_KIND_DECODE and entry.nodes > 1 and slot.live:
                proposals[entry.slot, entry.epoch] = self._guess(slot, entry.nodes)

    def _guess(self, slot: DraftSlot, nodes: int) -> list[int]:
        guesses: list[int] = []
        before = slot.anchor
        for depth in range(1, min(nodes, self.spec.block_size)):
            position = slot.rows + depth
            before = draw(slot.seed, slot.choice, position, before)
            if hash((slot.seed, position)) % 100 >= self.spec.right:
                before = (before + 1) % VOCAB
            guesses.append(before)
        return guesses

    def _take(
        self, number: int, epoch: int, first: int, rows: list[int], anchor: int, caught_up: bool
    ) -> None:
        slot = self.slots.get(number)
        if slot is None or slot.epoch != epoch or slot.starved:
            return
        if first > slot.rows:
            if not slot.behind:
                self._behind(number, slot, "a gap")
            slot.live = False
            return
        end = first + len(rows)
        more = -(-end // self.spec.page_size) - slot.pages
        if more > self.free:
            slot.starved = True
            self._behind(number, slot, "no pages")
            return
        if more > 0:
            slot.pages += more
            self.free -= more
        slot.rows = max(slot.rows, end)
        slot.behind = False
        was_live, slot.live = slot.live, caught_up
        if caught_up:
            assert end >= slot.rows
            slot.anchor = anchor
        assert caught_up or not was_live, "a live slot must stay live"
        if slot.live and not was_live:
            assert self.session is not None
            self._emit(
                live=draft_pb2.Live(
                    session=self.session.session, slot=number, epoch=epoch, rows=slot.rows
                )
            )


class FakeCell:
    """Both servers, their handoff, and the events on their way to the scheduler."""

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.fingerprint = self.draft_fingerprint = "same"
        self.target = FakeTarget(self)
        self.draft = FakeDraft(self)
        self.lives = {Peer.TARGET: 0, Peer.DRAFT: 0}
        self.events: deque[Received | Lost] = deque()
        self.handoffs: dict[int, Handoff] = {}
        self.dead: set[Peer] = set()  # servers that cannot be reached
        self.post: Callable[[Received | Lost], None] = self.events.append
        self.clock: Callable[[], float] = lambda: 0.0
        self._sides: dict[int, set[Peer]] = {}

    def open(self, peer: Peer, life: int) -> None:
        self.lives[peer] = life
        if peer in self.dead:
            self.post(Lost(peer, life, PeerLost("refused")))
        elif peer is Peer.TARGET:
            last_step, verified = self.target.last_step, self.target.verified
            self.target = FakeTarget(self)
            self.target.last_step = self.target.received = self.target.done = last_step
            self.target.verified = verified
            self.target.up = True
        else:
            self.draft = FakeDraft(self)
            self.draft.up = True

    def send(self, peer: Peer, command: Command) -> None:
        if isinstance(command, target_pb2.TargetCommand):
            assert peer is Peer.TARGET
            if self.target.up:
                self.target.send(command)
        elif self.draft.up:
            self.draft.send(command)

    def close(self, peer: Peer) -> None:
        if peer is Peer.TARGET:
            self._end_target()
        else:
            self._end_draft()

    def kill(self, peer: Peer) -> None:
        """The server's process ends."""
        if peer is Peer.TARGET and self.target.up:
            self._end_target()
            self.post(Lost(peer, self.lives[peer], PeerLost("killed")))
        elif peer is Peer.DRAFT and self.draft.up:
            self._end_draft()
            self.post(Lost(peer, self.lives[peer], PeerLost("killed")))

    def _end_target(self) -> None:
        if self.target.session is not None:
            self.target.session.alive = False
        self.target.up = False
        self.target.commands.clear()

    def _end_draft(self) -> None:
        if self.draft.session is not None:
            self.draft.session.alive = False
        self.draft.up = False
        self.draft.commands.clear()
        self.draft.session = None

    def emit(self, peer: Peer, event: target_pb2.TargetEvent | draft_pb2.DraftEvent) -> None:
        self.post(Received(peer, self.lives[peer], event, self.clock()))

    def handoff(self, session: int, first_step: int) -> Handoff:
        return self.handoffs.setdefault(session, Handoff(session, first_step))

    def connect(self, peer: Peer, session: int) -> None:
        """Both sides are connected once both asked."""
        sides = self._sides.setdefault(session, set())
        sides.add(peer)
        if len(sides) == 2:
            attached = common.Attached(session=session, transport="grpc")
            self.draft.connected = True
            self.emit(Peer.TARGET, target_pb2.TargetEvent(attached=attached))
            self.emit(Peer.DRAFT, draft_pb2.DraftEvent(attached=attached))

    def watchdog(self) -> None:
        """The target gives the session up."""
        self.target.retire()
