"""The draft's engine: one thread per gateway stream that carries out commands strictly in order.

A step is: wait for the context it may depend on, write it, draft, publish. Every plan publishes
exactly one proposal, empty when there is nothing to draft or something is wrong, so that no target
waits for a step that a draft was given.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    Event,
    Malformed,
    Plan,
    Rejected,
    Release,
)
from services.draft.peers import Connected, Peers, Result, give_up
from services.draft.runner import DraftEntry, DraftRunner
from services.draft.session import DevicePart, Refusal, Session
from slipstream.errors import SlipstreamError
from slipstream.handoff.base import DraftEnd, Proposal, ProposedTree
from slipstream.tree import TreeSpec
from slipstream.v1 import common_pb2 as pb

log = logging.getLogger(__name__)

DETACHED = "the gateway detached it"
ALIVE_POLL_S = 0.25
"""How often an idle engine looks whether its session still lives."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a session's device did."""

    session: int
    notice: Any


@dataclass(frozen=True, slots=True)
class _Close:
    reason: str


class Engine:
    """Commands in by `submit`, events out through `emit`, one thread between them.

    Args:
        emit: called on the engine's thread for every event.
        closed: called once, as the last thing the thread does; with the exception that ended it,
            or None after `close`.
        device: held while the runner computes; shared by all engines of a process.
    """

    def __init__(
        self,
        runner: DraftRunner,
        peers: Peers,
        tree: TreeSpec,
        device: threading.Lock,
        emit: Callable[[Event], None],
        closed: Callable[[BaseException | None], None],
    ) -> None:
        self._runner = runner
        self._peers = peers
        self._tree = tree
        self._device = device
        self._emit = emit
        self._closed = closed
        self._inbox: queue.SimpleQueue[Command | Connected | _Told | _Close]
        self._inbox = queue.SimpleQueue()
        self._session: Session | None = None
        self._retired = 0  # the last session that ended; what is still said of it is dropped
        self._turn = 0  # odd while it computes
        self._over = False  # the thread takes nothing more from the inbox
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Thread-safe. A command that ends the session also releases a wait of it at once."""
        session = self._session
        if session is not None and session.end is not None:
            if isinstance(command, Detach) and command.session == session.number:
                session.end.end(command.reason or DETACHED)
            elif isinstance(command, Attach) and command.session != session.number:
                session.end.end(f"session {command.session} takes its place")
        self._inbox.put(command)

    def close(self, reason: str) -> None:
        """Thread-safe: carries out what was submitted, then ends the session and the thread."""
        self._inbox.put(_Close(reason))

    def interrupt(self, reason: str) -> None:
        """Thread-safe: ends the connected session at once, so that a wait of it returns."""
        session = self._session
        if session is not None and session.end is not None:
            session.end.end(reason)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread."""
        self._thread.join(timeout)

    @property
    def at(self) -> str | None:
        """What it is at, for a watchdog; None while it waits for work. Any thread."""
        return f"command {self._turn // 2 + 1}" if self._turn % 2 else None

    def _run(self) -> None:
        try:
            while not isinstance(item := self._next(), _Close):
                self._turn += 1
                self._carry_out(item)
                self._turn += 1
            self._retire(item.reason)
            self._leave_inbox()
        except BaseException as error:
            log.exception("the draft engine failed")
            self.interrupt(f"the draft failed: {error}")  # the process ends with no wait parked
            self._closed(error)
        else:
            self._closed(None)

    def _leave_inbox(self) -> None:
        """Of what comes too late, ends of sessions are ended: nobody else knows of them."""
        with self._ending:
            self._over = True
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Connected):
                give_up(item.result)

    def _next(self) -> Command | Connected | _Told | _Close:
        while True:
            try:
                return self._inbox.get(timeout=ALIVE_POLL_S if self._session else None)
            except queue.Empty:
                self._retire_if_dead()

    def _carry_out(self, item: Command | Connected | _Told) -> None:
        match item:
            case Plan():
                self._plan(item)
            case Admit():
                self._admit(item)
            case Release():
                self._release(item)
            case Attach():
                self._attach(item)
            case Detach():
                if self._session is not None and self._session.number == item.session:
                    self._retire(item.reason or DETACHED)
            case Malformed():
                self._emit(
                    Rejected(
                        item.number,
                        pb.REJECT_CODE_BAD_VALUE,
                        item.reason,
                        slot=item.slot,
                        epoch=item.epoch,
                    )
                )
            case Connected():
                self._connected(item)
            case _Told():
                self._settle(item)

    # Sessions

    def _attach(self, attach: Attach) -> None:
        current = self._session
        if (
            attach.session == 0
            or attach.session == self._retired
            or (current is not None and current.number == attach.session)
        ):
            reason = f"session must be new and not 0, got {attach.session}"
            self._emit(
                Rejected(attach.number, pb.REJECT_CODE_BAD_VALUE, reason, session=attach.session)
            )
            return
        self._retire(f"session {attach.session} takes its place")
        self._session = Session(attach, self._runner)

        def done(result: Result) -> None:
            with self._ending:
                if not self._over:
                    self._inbox.put(Connected(attach.session, result))
                    return
            # On the acceptor's thread, which must not wait.
            threading.Thread(target=give_up, args=(result,), name="draft-unwanted").start()

        devices = self._runner.devices
        more = {} if devices is None else {"mapper": devices.mapper}
        self._peers.expect(attach.session, attach.first_step, self._runner.spec.peer, done, **more)

    def _connected(self, item: Connected) -> None:
        session, result = self._session, item.result
        if session is None or session.number != item.session:
            give_up(result)
            return
        if isinstance(result, SlipstreamError):
            reason = str(result)
            self._drop_session(reason)
            self._emit(
                Rejected(session.command, pb.REJECT_CODE_PEER, reason, session=session.number)
            )
            return
        if result.transport == "cuda_ipc":
            assert self._runner.devices is not None
            session.device = self._runner.devices.connect(
                session, result, lambda notice: self._inbox.put(_Told(item.session, notice))
            )
        session.end = result
        first, how = session.next_step, result.transport
        log.info("session %d is connected over %s from step %d", session.number, how, first)
        self._emit(Attached(session.number, how))

    def _retire_if_dead(self) -> None:
        session = self._session
        if session is not None and session.end is not None and not session.end.alive:
            self._retire(session.end.reason)

    def _retire(self, reason: str) -> None:
        """Ends the session, if there is one, and says so."""
        session = self._session
        if session is None:
            return
        if session.end is not None and not session.end.alive:
            reason = session.end.reason
        self._drop_session(reason)
        log.info("session %d ended: %s", session.number, reason)
        self._emit(Detached(session.number, reason))

    def _drop_session(self, reason: str) -> None:
        session = self._session
        assert session is not None
        if session.end is None:
            self._peers.forget(session.number)
        self._session, self._retired = None, session.number
        session.close(reason)

    # Slots

    def _admit(self, admit: Admit) -> None:
        session = self._session
        if session is None or session.number != admit.session:
            # Detached said all there is to say of a retired session; its slots went with it.
            if admit.session != self._retired or admit.session == 0:
                self._refuse_session(admit.number, admit.session, admit.slot, admit.epoch)
            return
        try:
            session.admit(admit, self._tree)
        except Refusal as refusal:
            self._refuse(admit.number, admit.slot, admit.epoch, refusal)

    def _release(self, release: Release) -> None:
        if self._session is None:
            return
        try:
            events = self._session.release(release)
        except Refusal as refusal:
            self._refuse(release.number, release.slot, release.epoch, refusal)
            return
        for event in events:
            self._emit(event)

    # Steps

    def _plan(self, plan: Plan) -> None:
        session = self._session
        if session is None or session.number != plan.session or session.end is None:
            if plan.session != self._retired or plan.session == 0:
                self._refuse_session(plan.number, plan.session, step=plan.step)
            return
        if plan.step != session.next_step:
            self._out_of_order(plan, session)
            return
        session.next_step += 1
        if session.device is not None:
            self._enqueue(plan, session, session.device)
            return
        end = cast(DraftEnd, session.end)
        proposal = self._propose(plan, session, end)
        if proposal is not None:
            end.publish_proposal(proposal)

    def _enqueue(self, plan: Plan, session: Session, device: DevicePart) -> None:
        """Puts the plan on the session's stream; what came of it is told later."""
        refusal = self._too_late(plan)
        if refusal is not None:
            self._refuse(plan.number, 0, 0, refusal, plan.step)
        for entry, wrong in device.enqueue(plan, empty=refusal is not None):
            self._refuse(plan.number, entry.slot, entry.epoch, wrong, plan.step)
        self._retire_if_dead()

    def _settle(self, told: _Told) -> None:
        session = self._session
        if session is None or session.number != told.session or session.device is None:
            return  # Detached said all there is to say of it
        for event in session.device.settle(told.notice):
            self._emit(event)

    def _too_late(self, plan: Plan) -> Refusal | None:
        """The target publishes a step's context after it took the step's proposal."""
        if plan.after < plan.step:
            return None
        reason = f"after must be below step {plan.step}, got {plan.after}"
        return Refusal(pb.REJECT_CODE_BAD_VALUE, reason)

    def _propose(self, plan: Plan, session: Session, end: DraftEnd) -> Proposal | None:
        """The plan's proposal; None when the session ended on the way to it."""
        refusal = self._too_late(plan)
        if refusal is not None:
            self._refuse(plan.number, 0, 0, refusal, plan.step)
            return Proposal(plan.step)
        spent = 0
        while session.written < plan.after:
            self._turn += 1  # it waits for the target, not for its own device
            message = end.await_context(session.written + 1)
            self._turn += 1
            if message is None:
                self._retire(end.reason)
                return None
            session.written += 1
            began = time.perf_counter_ns()
            with self._device:
                events = session.take(message)
            spent += time.perf_counter_ns() - began
            for event in events:
                self._emit(event)
        return self._draft(plan, session, spent) if plan.decode else Proposal(plan.step)

    def _draft(self, plan: Plan, session: Session, spent: int) -> Proposal:
        """Drafts the plan's trees; `spent` ns went into writing context."""
        wanted: list[DraftEntry] = []
        epochs: dict[int, int] = {}
        for entry in session.entries(plan):
            if isinstance(entry, DraftEntry):
                wanted.append(entry)
                epochs[entry.slot] = session.slots[entry.slot].epoch
            else:
                refused, refusal = entry
                self._refuse(plan.number, refused.slot, refused.epoch, refusal, plan.step)
        if not wanted:
            return Proposal(plan.step)
        began = time.perf_counter_ns()
        with self._device:
            trees = session.context.draft(wanted)
        spent += time.perf_counter_ns() - began
        proposed = tuple(
            ProposedTree(entry.slot, epochs[entry.slot], tree.tokens, tree.parents)
            for entry, tree in zip(wanted, trees, strict=True)
        )
        return Proposal(plan.step, proposed, spent)

    def _out_of_order(self, plan: Plan, session: Session) -> None:
        reason = f"step must be {session.next_step}, got {plan.step}"
        refusal = Refusal(pb.REJECT_CODE_STEP_ORDER, reason)
        self._refuse(plan.number, 0, 0, refusal, plan.step)
        if plan.step > session.next_step:
            # The target would wait for the proposals of the steps that never came.
            self._retire(f"plans without a gap: {reason}")

    # Refusals

    def _refuse_session(
        self, number: int, session: int, slot: int = 0, epoch: int = 0, step: int = 0
    ) -> None:
        refusal = Refusal(pb.REJECT_CODE_SESSION, f"session {session} is not connected")
        self._refuse(number, slot, epoch, refusal, step)

    def _refuse(self, number: int, slot: int, epoch: int, refusal: Refusal, step: int = 0) -> None:
        log.debug("command %d refused: %s", number, refusal.reason)
        self._emit(
            Rejected(number, refusal.code, refusal.reason, slot=slot, epoch=epoch, step=step)
        )
