"""What both ends of a session on devices have: life and death, heartbeat, release of waits."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.layout import RELEASED, Flag

log = logging.getLogger(__name__)

OVERSLEPT_S = 0.05
"""A tick that took longer is our own delay (the process stood still, or another thread held the
interpreter), and what is beyond does not count against the peer."""

QUICKLY = 300
"""Stores that follow each other quickly; an engine that has not noticed by then takes longer."""


class DeviceEnd(ABC):
    """One side of a session. A thread of it beats, watches the peer and releases waits; it makes
    no CUDA call, so nothing that a parked stream blocks can block it.

    A session dies once: by `end`, by `retire`, or by what the thread sees. From then on no wait is
    enqueued, and the thread stores RELEASED into the flags that this process's streams wait for,
    again and again, for the peer's stream may still write smaller numbers. It stops when the
    engine called `end` and its stream passed the last operation, and touches the flags no more.

    Nothing is called under the lock that takes another one.
    """

    transport = "cuda_ipc"
    fallback = ""

    def __init__(
        self, session: int, first_step: int, lane: Lane, tell: Callable[[str], None], times: Times,
        beats: tuple[Flag, Flag], releases: tuple[Flag, ...],
    ) -> None:  # fmt: skip
        self.session = session
        self.which = lane.which
        self._lane = lane
        self._times = times
        self._tell = tell
        self._own_beat, self._peer_beat = beats
        self._releases = releases
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._ended = False  # the engine knows that the session is over
        self._on_stream = first_step - 1  # last step with an operation
        self._passed = first_step - 1
        self._woken = threading.Event()
        self._drained = threading.Event()
        self._overslept = 0.0
        self._beat = 0
        self._peer_at = self._now()
        self._peer_last = lane.load(self._peer_beat)
        self._peer_first = True
        self._thread = threading.Thread(target=self._watch, name=f"handoff-{session}", daemon=True)

    @property
    def alive(self) -> bool:
        """False once the session died, for whatever reason."""
        return self._reason is None

    @property
    def reason(self) -> str:
        """Why it died; empty while alive."""
        return self._reason or ""

    @property
    def drained(self) -> bool:
        """Whether this side is through: no wait parked, no flag written any more."""
        return self._drained.is_set()

    def retire(self, reason: str) -> None:
        """The session is over, whoever says so. Thread-safe, idempotent."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        log.info("session %d over cuda_ipc ended: %s", self.session, reason)
        self._woken.set()
        self._tell(reason)

    def end(self, reason: str) -> None:
        """From now on nothing of this session goes to the stream. Any thread, idempotent.

        Tells the peer and releases every wait. Also the acknowledgement of a retirement.
        """
        self.retire(reason)
        with self._lock:
            self._ended = True
        self._woken.set()

    def _operation(self, step: int) -> bool:
        """Whether an operation of `step` may go on the stream; if so it is counted before it goes,
        so that the release goes on until it passed."""
        with self._lock:
            if self._reason is not None:
                return False
            self._on_stream = max(self._on_stream, step)
            return True

    def _wake(self) -> None:
        """A step passed: the thread need not know before its next tick, unless it releases."""
        if self._reason is not None:
            self._woken.set()

    def _over(self) -> bool:
        """Whether the stream is through with everything and nothing will come. Under the lock."""
        return self._ended and self._passed >= self._on_stream

    def _now(self) -> float:
        """Seconds, without those in which this process stood still."""
        return time.monotonic() - self._overslept

    @abstractmethod
    def _late(self) -> str | None:
        """Why the session must be retired, or None."""

    def _watch(self) -> None:
        before = time.monotonic()
        stores = 0
        while True:
            with self._lock:
                if self._over():
                    break
            self._beat += 1
            self._lane.store(self._own_beat, self._beat)
            if self.alive:
                late = self._late()
                if late is not None:
                    self.retire(late)
            if not self.alive:
                stores += 1
                for flag in self._releases:
                    self._lane.store(flag, RELEASED)
            self._woken.wait(self._times.release if 0 < stores < QUICKLY else self._times.tick)
            self._woken.clear()
            now = time.monotonic()
            self._overslept += max(0.0, now - before - OVERSLEPT_S)
            before = now
        self._drained.set()

    def _silence(self, limit: float) -> bool:
        """Whether the peer's heartbeat is older than `limit`."""
        beat = self._lane.load(self._peer_beat)
        if beat != self._peer_last:
            self._peer_last, self._peer_at, self._peer_first = beat, self._now(), False
        if self._peer_first:
            limit = max(limit, self._times.first_beat)
        return self._now() - self._peer_at > limit
