"""The engine: one thread that owns the device, the slots, the pages and the session.

Commands take effect in the order in which they were given. Everything else that may happen (a
gateway comes or goes, a session got connected, a drain) is a message in the same inbox.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from services.target.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    Event,
    Plan,
    Ready,
    Rejected,
    Release,
    Rewind,
)
from services.target.inbox import Close, Connected, Drain, Emit, Item, Open, Stop, Through
from services.target.runner import RunAheadRunner, TargetRunner, TargetSpec
from services.target.session import Connector, Sessions
from services.target.slots import Refused, Slot, SlotTable
from services.target.steps import Begun, Steps, run_ahead
from services.target.waiter import Waiter
from slipstream.errors import InvalidRequest, SlipstreamError
from slipstream.handoff.base import PeerSpec
from slipstream.handoff.layout import RING
from slipstream.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc import Export

log = logging.getLogger(__name__)

IDLE_S = 0.1
"""Without a message for so long the engine checks its invariants and its session's health."""

MOST_ON_THEIR_WAY = RING
"""Steps whose results a runner has room for; a gateway that plans further ahead waits."""


class Engine:
    """Runs steps for one gateway at a time.

    `start`, `open`, `submit`, `close`, `drain` and `stop` may be called from any thread; what they
    cause happens on the engine's own, callbacks included.
    """

    def __init__(
        self,
        load: Callable[[], TargetRunner],
        connector: Connector,
        *,
        loaded: Callable[[TargetSpec], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`load` makes the runner, on the engine's thread: warm-up and steps share their pools.

        `loaded` is called once it is there; `failed` when loading or a step raised, after which the
        engine does nothing more and the process must end.
        """
        self._load = load
        self._connector = connector
        self._loaded = loaded
        self._failed = failed
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="target-engine", daemon=True)
        self._emit: Emit | None = None
        self._last_step = 0
        self._drained: Callable[[], None] | None = None
        self._on_their_way: deque[Begun] = deque()
        self._turn = 0  # odd while a message is handled, or a pause is used
        self._ahead: RunAheadRunner | None = None

    def start(self) -> None:
        """Loads the runner, then takes messages."""
        self._thread.start()

    def open(self, emit: Emit) -> None:
        """A gateway came: events go to `emit` from now on, the first is Ready."""
        self._inbox.put(Open(emit))

    def submit(self, command: Command) -> None:
        """The gateway's next command."""
        self._inbox.put(command)

    def close(self, done: Callable[[], None]) -> None:
        """The gateway went: what it gave is finished, then every slot is free and `done` called."""
        self._inbox.put(Close(done))

    def drain(self, done: Callable[[], None]) -> None:
        """Takes no new request; `done` is called when the last slot is free and every step said."""
        self._inbox.put(Drain(done))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finishes what was given, frees everything and ends the thread."""
        self._inbox.put(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def shared(self) -> Export | None:
        """The memory that drafts may map, once loaded; to be closed after `stop`."""
        return self._ahead.shared if self._ahead is not None else None

    @property
    def at(self) -> str | None:
        """What it is at, for a watchdog; None while it waits for work. Any thread."""
        first = next(iter(self._on_their_way.copy()), None)
        if first is not None:
            return f"step {first.plan.step}"
        return f"message {self._turn // 2 + 1}" if self._turn % 2 else None

    def _main(self) -> None:
        try:
            self._setup(self._load())
            going = True
            while going:
                item = self._next()
                self._turn += 1
                going = self._handle(item)
                self._turn += 1
        except BaseException as error:
            if not isinstance(error, SlipstreamError):
                log.critical("the engine failed", exc_info=error)
            self._failed(error)

    def _setup(self, runner: TargetRunner) -> None:
        self._runner = runner
        self._spec = runner.spec
        self._slots = SlotTable(self._spec)
        self._sessions = Sessions()
        self._steps = Steps(runner, self._slots, self._sessions, self._say)
        self._ahead = run_ahead(runner)
        self._waiter = Waiter(lambda error: self._inbox.put(Through(error)))
        self._loaded(self._spec)

    def _next(self) -> Item:
        """The next message; while there is none, looks after things."""
        over = False
        while True:
            try:
                return self._inbox.get(timeout=IDLE_S)
            except queue.Empty:
                self._retire_lost()
                if not over and not self._on_their_way:
                    self._turn += 1
                    self.check()
                    over = self._rest()
                    self._turn += 1

    def _rest(self) -> bool:
        """Nothing is on its way; whether the runner has nothing more to do in the pause."""
        return self._ahead is None or self._ahead.at_rest()

    def check(self) -> None:
        """Asserts every invariant of slots and pages. Only on the engine's thread, or in a test."""
        self._slots.check(self._runner.lengths)

    def _handle(self, item: Item) -> bool:
        """Takes one message; False after the last."""
        match item:
            case Plan():
                self._plan(item)
            case Admit() | Release() | Rewind() | Attach() | Detach():
                try:
                    self._command(item)
                except Refused as refused:
                    self._refuse(item, refused)
            case Connected():
                self._connected(item)
            case Through():
                self._through(item)
            case Open():
                self._emit = item.emit
                self._say(Ready(self._last_step))
            case Close():
                self._settle()
                self._clear("the gateway went")
                item.done()
            case Drain():
                self._drained = item.done
            case Stop():
                self._settle()
                self._clear("the target stops")
                self._waiter.stop()
                return False
        self._finish_drain()
        return True

    def _say(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event)

    def _refuse(self, item: Admit | Release | Rewind | Attach | Detach, refused: Refused) -> None:
        event = Rejected(item.number, refused.code, refused.reason)
        if isinstance(item, Attach | Detach):
            event = replace(event, session=item.session)
        else:
            event = replace(event, slot=item.slot, epoch=item.epoch)
        self._say(event)

    def _command(self, item: Admit | Release | Rewind | Attach | Detach) -> None:
        match item:
            case Admit():
                self._admit(item)
            case Release():
                self._release(self._slots.find(item.slot, item.epoch))
            case Rewind():
                self._rewind(item)
            case Attach():
                self._attach(item)
            case Detach():
                self._detach(item)

    def _plan(self, plan: Plan) -> None:
        if plan.step != self._last_step + 1:
            reason = f"step: {plan.step} does not follow {self._last_step}"
            self._settle()
            self._say(Rejected(plan.number, pb.REJECT_CODE_STEP_ORDER, reason, step=plan.step))
            self._say(self._steps.drop(plan))
            return
        self._last_step = plan.step
        self._retire_lost()
        if self._on_their_way and self._steps.alone(plan):
            self._settle()
        while len(self._on_their_way) >= MOST_ON_THEIR_WAY:
            self._end_first()
        begun = self._steps.begin(plan)
        self._on_their_way.append(begun)
        if begun.flight is not None:
            self._waiter.follow(begun.flight)
        self._end_through()

    def _through(self, item: Through) -> None:
        """Ends the steps whose results are there."""
        if item.error is not None:
            raise item.error
        self._end_through()

    def _end_through(self) -> None:
        """Ends the oldest steps as far as their results are there; waits for nothing."""
        while self._on_their_way and self._waiter.through(self._on_their_way[0].flight):
            self._say(self._steps.end(self._on_their_way.popleft()))
        self._retire_lost()

    def _settle(self) -> None:
        """Ends every step that is on its way; waits for them."""
        while self._on_their_way:
            self._end_first()

    def _end_first(self) -> None:
        """Ends the oldest step; waits for it."""
        begun = self._on_their_way.popleft()
        if begun.flight is not None:
            self._waiter.wait(begun.flight)
        self._say(self._steps.end(begun))

    def _admit(self, item: Admit) -> None:
        if self._drained is not None:
            raise Refused(pb.REJECT_CODE_DRAINING, "the target drains")
        self._slots.admit(item.slot, item.epoch, item.request)
        try:
            self._runner.admit(item.slot, item.request)
        except InvalidRequest as error:
            self._slots.release(self._slots.find(item.slot, item.epoch))
            raise Refused(pb.REJECT_CODE_BAD_VALUE, str(error)) from error

    def _release(self, slot: Slot) -> None:
        self._runner.release(slot.number)
        self._slots.release(slot)

    def _rewind(self, item: Rewind) -> None:
        slot = self._slots.find(item.slot, item.epoch)
        self._settle()  # the cursor is where the steps so far leave it
        if item.rows > slot.cursor:
            raise Refused(
                pb.REJECT_CODE_LENGTH,
                f"rows: {item.rows} is beyond the publish cursor, {slot.cursor}",
            )
        slot.cursor = item.rows
        if self._ahead is not None:
            self._ahead.rewind(slot.number, item.rows)

    def _attach(self, item: Attach) -> None:
        if self._drained is not None:
            raise Refused(pb.REJECT_CODE_DRAINING, "the target drains")
        if self._spec.feature_width == 0:
            raise Refused(pb.REJECT_CODE_PEER, "the target was started without a draft head")
        used = self._sessions.is_current(item.session) or self._sessions.retired(item.session)
        if item.session == 0 or used:
            raise Refused(pb.REJECT_CODE_SESSION, f"session: {item.session} is 0 or used before")
        if item.first_step <= self._last_step:
            raise Refused(
                pb.REJECT_CODE_STEP_ORDER,
                f"first_step: {item.first_step} is not after step {self._last_step}",
            )
        if not item.address:
            raise Refused(pb.REJECT_CODE_PEER, "draft_address: empty")
        self._retire(f"session {item.session} takes its place")
        self._sessions.begin(item.session, item.first_step)
        spec = PeerSpec(
            self._spec.feature_width,
            self._spec.feature_dtype,
            self._spec.vocab_size,
            self._spec.slots,
            dict(self._spec.fingerprints),
        )
        self._connector.connect(
            item.session,
            item.first_step,
            item.address,
            spec,
            lambda result: self._inbox.put(Connected(item, result)),
            self.shared,
        )

    def _connected(self, item: Connected) -> None:
        session = item.attach.session
        if isinstance(item.result, SlipstreamError):
            if self._sessions.is_current(session):
                self._sessions.retire("could not be connected")
                self._refuse(item.attach, Refused(pb.REJECT_CODE_PEER, str(item.result)))
        elif self._sessions.connect(session, item.result):
            self._settle()  # of steps without it: they move no cursor of this session
            for slot in self._slots:
                slot.cursor = 0
            if self._ahead is not None:
                self._ahead.rewind_all()
            self._rest()  # the draft has loaded by now
            self._say(Attached(session, item.result.transport))
        else:
            item.result.end("the session was given up while it was connecting")

    def _detach(self, item: Detach) -> None:
        if not self._sessions.is_current(item.session):
            if self._sessions.retired(item.session):
                return  # it ended by itself just before: the gateway was told
            raise Refused(pb.REJECT_CODE_SESSION, f"session: {item.session} is not attached")
        self._retire(item.reason or "detached")

    def _retire(self, reason: str) -> None:
        session = self._sessions.retire(reason)
        if session is not None:
            log.info("session %d ended: %s", session, reason)
            self._say(Detached(session, reason))

    def _retire_lost(self) -> None:
        """Ends the session when its handoff died."""
        reason = self._sessions.lost()
        if reason is not None:
            self._retire(reason)

    def _clear(self, reason: str) -> None:
        """Nobody holds the target: no slot, no session, no epoch is left."""
        for slot in list(self._slots):
            self._release(slot)
        self._retire(reason)
        self._emit = None
        self._slots.forget_epochs()

    def _finish_drain(self) -> None:
        if self._drained is not None and self._slots.empty and not self._on_their_way:
            done, self._drained = self._drained, _already
            done()


def _already() -> None:
    """Stands for a drain that has been reported."""
