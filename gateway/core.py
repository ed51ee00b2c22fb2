"""The scheduler without its thread: what happens on each event, and what is sent next.

Requests wait, run in a slot, and may return to the queue (no pages left, target lost) as prompt +
output + seed. Nothing here blocks, and nothing but this object changes requests and slots.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable

from gateway.admission import Refill, WaitingQueue
from gateway.board import Board, Running, Step
from gateway.cell import Cell, Lost, Peer, Received
from gateway.commands import fill_target_admit, fill_target_plan
from gateway.counters import Counters
from gateway.drafting import Drafting
from gateway.links import PING_S, Link
from gateway.pairing import Pairing
from gateway.planner import Planner
from gateway.request import Chunk, Deliver, ModelInfo, Request
from gateway.results import Results
from gateway.settings import SchedulerSettings
from slipstream.errors import (
    ConfigError,
    ContextTooLong,
    EngineFailed,
    PeerLost,
    ProtocolError,
    SlipstreamError,
)
from slipstream.v1 import common_pb2, draft_pb2, target_pb2

log = logging.getLogger(__name__)

_REQUEST_CODES = (common_pb2.REJECT_CODE_LENGTH, common_pb2.REJECT_CODE_BAD_VALUE)


class Core:
    """State and verbs of the scheduler; one thread calls it.

    Attributes:
        requests: every request that has not ended, by id.
        board, planner: slots and steps while the target's stream is up, else None.
        info: what is, or was last, served.
        outage_until: while a target that was there is lost, until when requests wait for it.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        cell: Cell,
        deliver: Deliver,
        clock: Callable[[], float],
        name: str = "gateway",
    ) -> None:
        self.requests: dict[int, Request] = {}
        self.queue = WaitingQueue()
        self.board: Board | None = None
        self.planner: Planner | None = None
        self.info: ModelInfo | None = None
        self.outage_until: float | None = None
        self.counters = Counters()
        self._settings = settings
        self._deliver = deliver
        self._clock = clock
        self._target = Link(cell, Peer.TARGET, target_pb2.TargetCommand, name)
        self._draft = Link(cell, Peer.DRAFT, draft_pb2.DraftCommand, name)
        self._pairing = Pairing(settings)
        self.drafting = Drafting(self._target, self._draft, self._pairing, self.counters)
        self._results = Results(self.counters, settings.pipeline_depth == 0)
        self._refill = Refill(1, 0, 0.0)
        self._epochs = itertools.count(1)
        self._running: dict[int, Running] = {}
        self._out: list[tuple[int, Chunk]] = []
        self._served: set[Peer] = set()
        self._target_drains = False
        self._settled_at = math.inf  # from when on a first session is no longer waited for
        self._ping_at = 0.0
        self._done_at: float | None = None  # arrival of a result that no plan has followed yet

    @property
    def ready(self) -> bool:
        """The target is there, and the draft's first session is there or no longer waited for."""
        return self.board is not None and (
            self._settings.draft is None
            or self.drafting.sessions.connected
            or self.counters.sessions > 0
            or self._clock() >= self._settled_at
        )

    # Requests

    def submit(self, request: Request) -> None:
        """Queues a validated request."""
        self.requests[request.id] = request
        self.queue.push(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request; nothing if it has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self.counters.cancelled += 1
            self._end(request, Chunk(finish="cancelled"))

    def fail_all(self, error: SlipstreamError) -> None:
        """Ends every request with `error`."""
        for request in tuple(self.requests.values()):
            self._fail(request, error)

    def _fail(self, request: Request, error: SlipstreamError) -> None:
        self._end(request, Chunk(finish="error", error=error))

    def _end(self, request: Request, chunk: Chunk) -> None:
        """The request's last chunk; frees whatever it holds."""
        request.ended = True
        del self.requests[request.id]
        running = self._running.get(request.id)
        if running is not None:
            self._release(running)
        else:
            self.queue.forget()
        self.counters.failed += chunk.finish == "error"
        self.counters.finished += chunk.finish in ("stop", "length")
        self.counters.request_ended(self._clock())
        self._out.append((request.id, chunk))

    def _release(self, running: Running) -> None:
        assert self.board is not None
        del self._running[running.request.id]
        self.board.release(running)
        self._target.release(running.slot, running.epoch)
        self.drafting.leave(running)

    def preempt(self, running: Running) -> None:
        """Back to the queue, to its old place."""
        self.counters.preemptions += 1
        log.debug("request %d is preempted", running.request.id)
        self._release(running)
        self.queue.push(running.request)

    def rewind(self, running: Running) -> None:
        """Sets the slot's publish cursor back to what the draft has."""
        self.drafting.rewind(running)

    # The loop's verbs

    def tick(self, now: float) -> None:
        """What is due by time: pings, reconnects, sessions, the end of an outage."""
        if now >= self._ping_at:
            self._ping_at = now + PING_S
            self._target.ping()
            self._draft.ping()
        if not self._target.open and now >= self._target.retry_at:
            self._target.connect()
        if self._settings.draft is not None and not self._target_drains:
            self.drafting.tick(now)
        if self.outage_until is not None and now >= self.outage_until and self.requests:
            self.fail_all(PeerLost("the target is lost and did not come back in time"))

    def deadline(self, now: float) -> float:
        """When the verbs should run again though nothing arrived."""
        times = [self._ping_at, self._settled_at]
        if not self._target.open:
            times.append(self._target.retry_at)
        if self.outage_until is not None and self.requests:
            times.append(self.outage_until)
        if self._settings.draft is not None:
            times += self.drafting.deadlines()
        if self._refill.deadline is not None:
            times.append(self._refill.deadline)
        # What was due at `now` is done, or waits for an event.
        return min((time for time in times if time > now), default=now + PING_S)

    def plan(self, now: float) -> Step | None:
        """Admits requests and puts the next step together; None when there is none to send."""
        board, planner = self.board, self.planner
        if board is None or planner is None:
            return None
        self._admit(now)
        if not planner.has_room or self.drafting.holds(now):
            return None
        self.drafting.begin(now)
        return planner.next(self.drafting.session)

    def launch(self, step: Step, now: float) -> None:
        """Sends a planned step to both servers."""
        board, planner = self.board, self.planner
        assert board is not None and planner is not None
        command = self._target.command()
        fill_target_plan(command.plan, step, board.ledger)
        self._target.send(command)
        if step.session:
            self.drafting.launch(step)
        step.version = board.ledger.version
        step.sent_at = now
        board.launch(step)
        planner.launched(step)
        if self._done_at is not None:
            self.counters.plan_ns.append(int((self._clock() - self._done_at) * 1e9))
            self._done_at = None

    def finish(self) -> None:
        """Hands over what the last events gave."""
        self._done_at = None
        if self._out:
            self._deliver(self.take_pending())

    def take_pending(self) -> list[tuple[int, Chunk]]:
        """What was not handed over yet; it is the caller's from now on."""
        pending, self._out = self._out, []
        return pending

    # Admission

    def _admit(self, now: float) -> None:
        board = self.board
        assert board is not None
        if self._target_drains or self.queue.head() is None:
            self._refill.done()
            return
        if not self._refill.open(board.free_slots, now):
            return
        while board.free_slots and (head := self.queue.head()) is not None:
            if not self._take(head):
                return
        self._refill.done()

    def _take(self, request: Request) -> bool:
        """Gives the queue's head a slot; False when its pages are not free."""
        board, planner, info = self.board, self.planner, self.info
        assert board is not None and planner is not None and info is not None
        ledger, known, limit = board.ledger, request.committed, request.limit(info.max_model_len)
        # Nothing to draw, or the target came back with a smaller window.
        if known > limit or (known == limit and not request.unscored):
            self._end(request, Chunk(finish="length"))
            return True
        if ledger.pages_for(limit + 1) > ledger.pages:
            self._fail(request, ContextTooLong("the request does not fit the target's KV pages"))
            return True
        wanted = known + planner.most_nodes(request.params.draft)
        if ledger.pages_for(wanted) > ledger.free:
            wanted = known + 1  # alone it always fits
            if board.used_slots:
                return False
        self.queue.pop()
        running = board.admit(request, next(self._epochs), limit)
        ledger.raise_to(running.slot, wanted)
        self._running[request.id] = running
        self.counters.admitted += 1
        command = self._target.command()
        publish = self._settings.draft is not None and request.params.draft
        fill_target_admit(command.admit, running, publish)
        self._target.send(command)
        self.drafting.join(running)
        return True

    # Streams

    def received(self, message: Received) -> None:
        """An event of a stream. A peer that breaks the protocol loses its stream.

        Raises ConfigError when a server that never fitted does not fit, while not yet ready.
        """
        link = self._target if message.peer is Peer.TARGET else self._draft
        if message.life != link.life or not link.open:
            return
        event = message.event
        try:
            if isinstance(event, target_pb2.TargetEvent):
                self._target_event(event, message.at)
            elif event.WhichOneof("event") == "ready":
                self._draft_ready(event.ready)
            else:
                self.drafting.event(event, self._clock())
        except ProtocolError as error:
            self._lose(message.peer, error)

    def lost(self, message: Lost) -> None:
        """A stream ended, or could not be opened. Raises as `received`."""
        link = self._target if message.peer is Peer.TARGET else self._draft
        if message.life == link.life and link.open:
            self._lose(message.peer, message.error)

    def _lose(self, peer: Peer, error: SlipstreamError) -> None:
        known = peer in self._served
        if not known and not self.ready and isinstance(error, ConfigError | ProtocolError):
            raise ConfigError(str(error)) from error
        now = self._clock()
        log.log(logging.WARNING if known else logging.INFO, "%s is lost: %s", peer.value, error)
        if peer is Peer.DRAFT:
            self.drafting.end(f"the draft is gone: {error}", now, (Peer.TARGET,))
            self._pairing.draft_lost()
            self._draft.lost(now)
            return
        self._target.lost(now)
        self.drafting.end("the target is gone", now, (Peer.DRAFT,))
        self._pairing.target_lost()
        if self.board is not None:
            self.outage_until = now + self._settings.recover_timeout_s
            for running in self.board:
                running.gone = True
                self.queue.push(running.request)
                self.counters.recoveries += 1
            self._running.clear()
            self.board = self.planner = self.drafting.board = None

    def _target_event(self, event: target_pb2.TargetEvent, at: float) -> None:
        kind = event.WhichOneof("event")
        if kind == "step_done":
            self._step_done(event.step_done, at)
        elif kind == "ready":
            self._target_ready(event.ready)
        elif kind == "rejected":
            self._rejected(event.rejected)
        else:
            self.drafting.session_event(event, Peer.TARGET, self._clock())

    def _target_ready(self, ready: target_pb2.TargetReady) -> None:
        if self.board is not None:
            raise ProtocolError("ready was said twice")
        info, before = self._pairing.target_ready(ready), self.info
        if before and (before.model, before.vocab_size) != (info.model, info.vocab_size):
            self.fail_all(PeerLost(f"the target came back with another model, {info.model}"))
        self._served.add(Peer.TARGET)
        self._target.served()
        settings = self._settings
        self.info, self.outage_until, self._target_drains = info, None, False
        self.board = Board(ready.slots, ready.pages, ready.page_size, ready.last_step)
        self.drafting.board = self.board
        chunk = min(settings.max_prefill_chunk or ready.max_prefill_rows, ready.max_prefill_rows)
        self.planner = Planner(self.board, self, settings.pipeline_depth, chunk)
        self._refill = Refill(ready.slots, settings.min_free_slots, settings.refill_wait_s)
        self._results.forget()
        if math.isinf(self._settled_at):
            self._settled_at = self._clock() + settings.draft_wait_s
        self._pair()

    def _draft_ready(self, ready: draft_pb2.DraftReady) -> None:
        self._pairing.draft_ready(ready)
        self._pair()
        self._served.add(Peer.DRAFT)
        self._draft.served()

    def _pair(self) -> None:
        """One server is ready, perhaps both: then what they say must fit."""
        try:
            shape = self._pairing.pair()
        except ConfigError as error:
            if not self.ready:
                raise
            log.error("no drafting: %s", error)
            return
        if shape is not None and self.planner is not None:
            self.planner.adopt(shape)
            self.info = self._pairing.info

    def _rejected(self, rejected: common_pb2.Rejected) -> None:
        self.counters.rejected += 1
        if self.drafting.sessions.current(rejected.session):
            reason = f"the target refuses: {rejected.reason}"
            self.drafting.end(reason, self._clock(), (Peer.DRAFT,))
            return
        if rejected.code == common_pb2.REJECT_CODE_DRAINING:
            self._target_drains = True
        running = self.board.find(rejected.slot, rejected.epoch) if self.board else None
        if running is None:
            log.debug("the target refuses: %s", rejected.reason)
            return
        log.warning("the target refuses slot %d: %s", rejected.slot, rejected.reason)
        if self._target_drains or rejected.code == common_pb2.REJECT_CODE_NO_PAGES:
            self.preempt(running)
        elif rejected.step == 0 and rejected.code in _REQUEST_CODES:
            self._fail(running.request, running.request.params.refusal(rejected.reason))
        else:
            self._fail(running.request, EngineFailed(rejected.reason))

    def _step_done(self, done: target_pb2.StepDone, at: float) -> None:
        board, planner = self.board, self.planner
        step = board.finish(done.step) if board is not None else None
        if board is None or planner is None or step is None:
            raise ProtocolError(f"step {done.step} is not the oldest in flight")
        planner.finished(step)
        board.check_idle(step, done.free_pages)
        self._done_at = at
        current = step.session == self.drafting.session
        before = self.counters.tokens
        for running, chunk in self._results.chunks(step, done, planner, current):
            if chunk.finish == "none":
                self._out.append((running.request.id, chunk))
            else:
                self._end(running.request, chunk)
        gained = self.counters.tokens - before
        self._results.measure(step, done.times, at, gained, planner, current)
