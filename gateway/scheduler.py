"""The scheduler: one plain thread that receives, plans, launches and finishes; safe to call from
any thread.

It never blocks but on its inbox, and there no longer than until the next deadline. An error that it
does not expect ends the process: its state is not to be trusted, and recovery is tested.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.cell import Cell, GrpcCell, Lost, Post, Received
from gateway.core import Core
from gateway.counters import SUMS, Snapshot, percentile
from gateway.request import Chunk, Deliver, GenerateParams, ModelInfo, Request
from gateway.settings import SchedulerSettings
from slipstream.errors import (
    ConfigError,
    ContextTooLong,
    Draining,
    EngineFailed,
    PeerLost,
    QueueFull,
    SlipstreamError,
)

log = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5  # time that the front gets to tell its clients before the process ends


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: int


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline: float


_Message = _Submit | _Cancel | _Stop | Received | Lost


def die(error: BaseException) -> None:
    """Ends the process after what was delivered had a moment to reach the clients."""
    log.critical("the scheduler failed, the process ends", exc_info=error)
    time.sleep(_LAST_WORDS_S)
    os._exit(70)


class Scheduler:
    """Runs requests on one cell.

    Args:
        deliver: gets (request id, chunk) pairs on the scheduler's thread; it must not block, and
            each batch is its to keep. Every request's last chunk has a `finish` other than "none".
        on_fatal: called on the scheduler's thread after every request was failed.
        make_cell: makes the cell's streams from the function that they post to.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        deliver: Deliver,
        *,
        on_fatal: Callable[[BaseException], None] = die,
        make_cell: Callable[[Post], Cell] | None = None,
    ) -> None:
        self._settings = settings
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        post: Post = self._inbox.put
        cell = make_cell(post) if make_cell else GrpcCell(settings.target, settings.draft, post)
        self._cell = cell
        self._core = Core(settings, cell, self._hand_over, time.monotonic, f"gateway-{os.getpid()}")
        self._lock = threading.Lock()  # guards the next four
        self._alive = 0  # submitted, last chunk not yet delivered
        self._ids = itertools.count(1)
        self._stopping = False
        self._failure: SlipstreamError | None = None
        self._settled = threading.Event()  # ready for the first time, or failed
        self._stop_at = math.inf
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # Any thread

    def start(self) -> None:
        """Connects to the cell, and goes on trying; see `wait_ready`."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> ModelInfo:
        """Blocks until requests can be served.

        Raises PairError or ConfigError when the cell cannot be used, PeerLost after `timeout`
        seconds.
        """
        if not self._settled.wait(timeout):
            raise PeerLost(f"no target at {self._settings.target} within {timeout} s")
        if self._failure is not None:
            raise self._failure
        return self.info

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be served at once."""
        return self._failure is None and not self._stopping and self._core.ready

    @property
    def info(self) -> ModelInfo:
        """What is served. Raises PeerLost before the first connection."""
        info = self._core.info
        if info is None:
            raise PeerLost(f"the target at {self._settings.target} was not reached yet")
        return info

    def submit(self, params: GenerateParams) -> int:
        """Takes a request and returns its id, the key of its chunks.

        Raises InvalidRequest, ContextTooLong, QueueFull, Draining, PeerLost or EngineFailed; then
        nothing was taken.
        """
        info = self.info
        params.validate(info)
        self._check_pages(params, info)
        outage = self._core.outage_until
        if outage is not None and time.monotonic() >= outage:
            raise PeerLost("the target is lost")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise Draining("the gateway is shutting down")
            if self._alive >= info.slots + self._settings.max_queue:
                wait = min(max(math.ceil(self._core.counters.finish_interval_s), 1), 60)
                waiting = self._alive - info.slots
                raise QueueFull(f"{waiting} requests wait already, try again later", wait)
            self._alive += 1
            request = Request(next(self._ids), params, seed)
            self._inbox.put(_Submit(request))
        return request.id

    def cancel(self, request_id: int) -> None:
        """Ends a request if it still runs; its last chunk says so. Idempotent."""
        self._inbox.put(_Cancel(request_id))

    def drain(self, drain_s: float) -> None:
        """Takes nothing new from now on; what still runs after `drain_s` seconds is ended with
        Draining. Returns at once."""
        with self._lock:
            self._stopping = True
            self._inbox.put(_Stop(time.monotonic() + drain_s))

    def stop(self, drain_s: float = 0.0) -> None:
        """`drain`, and waits for the end of the thread and the streams."""
        self.drain(drain_s)
        if self._thread.is_alive():
            self._thread.join()

    def snapshot(self) -> Snapshot:
        """Counts for /metrics; each is right, together they may be a step apart."""
        core = self._core
        board, planner, counters = core.board, core.planner, core.counters
        latencies = list(counters.plan_ns)
        return Snapshot(
            ready=self.ready,
            draft_attached=core.drafting.session != 0,
            slots=board.slots if board else 0,
            running=board.used_slots if board else 0,
            waiting=len(core.queue),
            pages=board.ledger.pages if board else 0,
            free_pages=board.ledger.free if board else 0,
            in_flight=len(board.flight) if board else 0,
            groups=planner.groups if planner else 1,
            step_s=counters.step_s,
            plan_latency_p50_ns=percentile(latencies, 0.5),
            plan_latency_p99_ns=percentile(latencies, 0.99),
            totals={name: getattr(counters, name) for name in SUMS},
        )

    def _check_pages(self, params: GenerateParams, info: ModelInfo) -> None:
        """A request that could not run alone is refused."""
        limit = min(len(params.prompt_ids) + params.max_tokens, info.max_model_len)
        pages = -(-(limit + 1) // info.page_size)
        if pages > info.pages:
            raise ContextTooLong(
                f"prompt and max_tokens need {pages} KV pages of {info.page_size} tokens, the"
                f" target has {info.pages}",
                "max_tokens",
            )

    # The scheduler's thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._fail(error)
        finally:
            self._settled.set()
            close = getattr(self._cell, "shutdown", None)
            if close is not None:
                close()

    def _loop(self) -> None:
        core, now = self._core, time.monotonic()
        while not self._ended(now):
            core.tick(now)
            while (step := core.plan(now)) is not None:
                core.launch(step, now)
            core.finish()
            if not self._settled.is_set() and core.ready:
                self._settled.set()
            now = self._receive(now)
        core.finish()

    def _receive(self, now: float) -> float:
        """Takes everything in the inbox, waiting for the first until the next deadline; returns
        the time."""
        wait = min(self._core.deadline(now), self._stop_at) - time.monotonic()
        try:
            self._take(self._inbox.get(timeout=max(wait, 0.0)))
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            return time.monotonic()

    def _take(self, message: _Message) -> None:
        core = self._core
        if isinstance(message, Received):
            core.received(message)
        elif isinstance(message, _Submit):
            core.submit(message.request)
        elif isinstance(message, _Cancel):
            core.cancel(message.request_id)
        elif isinstance(message, Lost):
            core.lost(message)
        else:
            self._stop_at = min(self._stop_at, message.deadline)

    def _ended(self, now: float) -> bool:
        """Whether the thread is done: draining, and nothing runs or its time is over."""
        if math.isinf(self._stop_at):
            return False
        if self._core.requests and now >= self._stop_at:
            self._core.fail_all(Draining("the gateway shut down before the answer was complete"))
        return not self._core.requests

    def _hand_over(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        ended = sum(chunk.finish != "none" for _, chunk in batch)
        if ended:
            with self._lock:
                self._alive -= ended
        self._deliver(batch)

    def _fail(self, error: BaseException) -> None:
        """Answers every request, then ends the process; before it was ever ready the error is
        `wait_ready`'s to report."""
        at_start = not self._settled.is_set() and isinstance(error, ConfigError)
        failure = error if isinstance(error, SlipstreamError) else EngineFailed(f"{error!r}")
        with self._lock:
            self._failure = failure
            self._stopping = True
        answer = EngineFailed(f"the scheduler failed: {failure}")
        batch = self._core.take_pending()
        batch += [(number, Chunk(finish="error", error=answer)) for number in self._core.requests]
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, _Submit):
                batch.append((message.request.id, Chunk(finish="error", error=answer)))
        try:
            if batch:
                self._deliver(batch)
        finally:
            self._settled.set()
            if not at_start:
                self._on_fatal(error)
