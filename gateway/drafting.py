"""The draft's side of the core: its stream, the sessions, and which slots it knows."""

from __future__ import annotations

import logging

from gateway.board import Board, Running, Step
from gateway.cell import Peer
from gateway.commands import fill_draft_admit, fill_draft_plan
from gateway.counters import Counters
from gateway.links import Link
from gateway.pairing import Pairing
from gateway.session import Sessions
from slipstream.v1 import common_pb2, draft_pb2, target_pb2

log = logging.getLogger(__name__)

MAX_PATIENCE = 64
"""Most steps until a slot that the draft called Behind again is replayed once more."""


class Drafting:
    """What the core knows of the draft.

    Invariant: a running slot's `session` is the current one or 0, and only slots of the current
    session are `live`.

    Attributes:
        board: the target's slots while its stream is up, else None; the core sets it.
    """

    def __init__(
        self,
        target: Link[target_pb2.TargetCommand],
        draft: Link[draft_pb2.DraftCommand],
        pairing: Pairing,
        counters: Counters,
    ) -> None:
        self.board: Board | None = None
        self.sessions = Sessions(target, draft)
        self._target = target
        self._link = draft
        self._pairing = pairing
        self._counters = counters

    # Sessions

    @property
    def session(self) -> int:
        """The session that plans name; 0: none."""
        return self.sessions.session

    def tick(self, now: float) -> None:
        """Reconnects, asks for a session, gives one up that was not answered."""
        if not self._link.open and now >= self._link.retry_at:
            self._link.connect()
        self.sessions.tick(now)
        if self.board is not None and self._pairing.fits:
            self.sessions.ask(
                self._pairing.handoff_address,
                self.board.next_step,
                bool(self.board.flight),
                self._counters.step_s,
                now,
            )

    def deadlines(self) -> list[float]:
        """When `tick` may have something to do."""
        times = [] if self._link.open else [self._link.retry_at]
        if self.board is not None and self._pairing.fits:
            times.append(self.sessions.deadline)
        return times

    def end(self, reason: str, now: float, tell: tuple[Peer, ...] = tuple(Peer)) -> None:
        """Ends the session, if there is one; running requests go on without a draft."""
        self.sessions.retire(reason, now, tell)
        for running in self.board or ():
            running.session, running.live = 0, False

    def holds(self, now: float) -> bool:
        """Whether planning waits a moment for a session whose first step is next."""
        assert self.board is not None
        return self.sessions.holds(self.board.next_step, self._counters.step_s, now)

    def begin(self, now: float) -> None:
        """Starts the session that is due at the next step, if any: it gets every running slot."""
        assert self.board is not None
        if self.sessions.begin(self.board.next_step, now):
            self._counters.sessions += 1
            for running in self.board:
                self.join(running)

    # Slots

    def join(self, running: Running) -> None:
        """Admits a running request to the current session, if there is one."""
        if not self.session or not running.request.params.draft:
            return
        running.session = self.session
        running.live = running.sent == 0  # every row will come from its own prefill
        running.cursor = running.rewind_at = running.patience = 0
        self._counters.replayed += not running.live
        tree = self._pairing.tree_of(running.request.params)
        running.most_nodes, running.branches = tree.budget, not tree.is_chain
        command = self._link.command()
        fill_draft_admit(command.admit, running, tree.to_proto())
        self._link.send(command)

    def leave(self, running: Running) -> None:
        """The slot is released."""
        if running.session:
            self._link.release(running.slot, running.epoch)

    def launch(self, step: Step) -> None:
        """Sends the draft's half of a step that names the session."""
        step.after = self.sessions.after = max(self.sessions.after, step.after)
        command = self._link.command()
        fill_draft_plan(command.plan, step)
        self._link.send(command)

    def rewind(self, running: Running) -> None:
        """Sets the slot's publish cursor back to what the draft has."""
        running.rewind_at, running.cursor = 0, running.behind_rows
        command = self._target.command()
        command.rewind.slot = running.slot
        command.rewind.epoch = running.epoch
        command.rewind.rows = running.behind_rows
        self._target.send(command)

    # Events

    def event(self, event: draft_pb2.DraftEvent, now: float) -> None:
        """Anything the draft says but Ready."""
        kind = event.WhichOneof("event")
        if kind == "live":
            running = self._find(event.live.session, event.live.slot, event.live.epoch)
            if running is not None:
                running.live, running.rewind_at, running.patience = True, 0, 0
        elif kind == "behind":
            running = self._find(event.behind.session, event.behind.slot, event.behind.epoch)
            if running is not None:
                self._behind(running, event.behind)
        elif kind == "rejected":
            self._rejected(event.rejected, now)
        else:
            self.session_event(event, Peer.DRAFT, now)

    def session_event(
        self, event: target_pb2.TargetEvent | draft_pb2.DraftEvent, peer: Peer, now: float
    ) -> None:
        """Attached or Detached, from either side."""
        if event.WhichOneof("event") == "attached":
            self.sessions.attached(peer, event.attached.session)
        elif self.sessions.current(event.detached.session):
            other = Peer.DRAFT if peer is Peer.TARGET else Peer.TARGET
            self.end(f"the {peer.value} says: {event.detached.reason}", now, (other,))

    def _find(self, session: int, slot: int, epoch: int) -> Running | None:
        if self.board is None or session != self.session:
            return None
        running = self.board.find(slot, epoch)
        return running if running is not None and running.session else None

    def _behind(self, running: Running, behind: draft_pb2.Behind) -> None:
        """The draft lacks rows. They are sent again: at once the first time, and later each time
        that it says so again without having caught up."""
        assert self.board is not None
        log.debug("slot %d is behind at row %d: %s", behind.slot, behind.rows, behind.reason)
        self._counters.replayed += 1
        running.live = False
        running.behind_rows = behind.rows
        if running.patience == 0:
            self.rewind(running)
        else:
            running.rewind_at = self.board.next_step + running.patience
        running.patience = min(max(2 * running.patience, 1), MAX_PATIENCE)

    def _rejected(self, rejected: common_pb2.Rejected, now: float) -> None:
        self._counters.rejected += 1
        log.debug("the draft refuses: %s", rejected.reason)
        if self.sessions.current(rejected.session):
            self.end(f"the draft refuses: {rejected.reason}", now, (Peer.TARGET,))
        elif self.board is not None:
            running = self.board.find(rejected.slot, rejected.epoch)
            if running is not None:
                running.session, running.live = 0, False
