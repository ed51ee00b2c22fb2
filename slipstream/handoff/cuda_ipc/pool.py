"""Which sets of rings and flags a target has free."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.handoff.cuda_ipc.lane import UNTOUCHED, Lane
from slipstream.handoff.cuda_ipc.peer import Peer
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.layout import RELEASED, SETS, Flag

log = logging.getLogger(__name__)


class Ending(Protocol):
    """The target's side of a session, as far as its set depends on it."""

    @property
    def drained(self) -> bool: ...

    def end(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Tenant:
    """Who uses a set."""

    lane: Lane
    peer: Peer | None = None
    end: Ending | None = None
    given_up_at: float | None = None  # since when there is no session and will be none

    def through(self, segment: str, times: Times) -> bool:
        """Whether neither side will touch the set again."""
        if self.end is None:
            if self.given_up_at is None:
                return False  # connecting
        elif not self.end.drained:
            return False
        beat = self.lane.load(Flag.DRAFT_BEAT)
        # The draft stores it last of all, when its waits are released and its stream is idle.
        if beat == RELEASED:
            return True
        if beat < UNTOUCHED and self.peer is None:  # it began and said no more
            self.peer = Peer(-beat, segment, times.settle)
        if self.peer is not None:
            return self.peer.gone()
        silent = self.given_up_at is not None and beat == UNTOUCHED
        return silent and time.monotonic() - (self.given_up_at or 0.0) > times.untouched


@dataclass(slots=True)
class Pool:
    """The sets of one export; any thread may call it."""

    lanes: list[Lane]
    segment: str
    times: Times
    _closed: bool = False
    _tenants: dict[int, _Tenant] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def free(self) -> int:
        """Sets that a session could take now."""
        with self._lock:
            self._collect()
            return SETS - len(self._tenants)

    def take(self) -> Lane | None:
        """A set that nobody touches, its flags 0; None when all are in use."""
        with self._lock:
            self._collect()
            for lane in () if self._closed else self.lanes:
                if lane.which not in self._tenants:
                    self._tenants[lane.which] = _Tenant(lane)
                    for flag in Flag:
                        lane.store(flag, 0)
                    return lane
        return None

    def met(self, lane: Lane, pid: int) -> None:
        """The draft that took the set is process `pid`."""
        with self._lock:
            self._tenants[lane.which].peer = Peer(pid, self.segment, self.times.settle)

    def live(self, lane: Lane, end: Ending) -> None:
        """A session began: the set comes back once both sides are through."""
        with self._lock:
            self._tenants[lane.which].end = end

    def give_up(self, lane: Lane, refused: bool = False) -> None:
        """No session began: the set comes back once the draft is through, or never began.

        `refused`: the draft said that it will not use the set; if it did not begin, that is final.
        """
        with self._lock:
            if refused and lane.load(Flag.DRAFT_BEAT) == UNTOUCHED:
                del self._tenants[lane.which]
            else:
                self._tenants[lane.which].given_up_at = time.monotonic()

    def close(self, reason: str, timeout_s: float) -> bool:
        """Ends the sessions left; whether all their waits were over within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            tenants = list(self._tenants.values())
        ends = [tenant.end for tenant in tenants if tenant.end is not None]
        for end in ends:
            end.end(reason)
        while not all(end.drained for end in ends) and time.monotonic() < deadline:
            time.sleep(self.times.tick)
        for tenant in tenants:
            if tenant.peer is not None:
                tenant.peer.close()
        return all(end.drained for end in ends)

    def _collect(self) -> None:
        for which, tenant in list(self._tenants.items()):
            if tenant.through(self.segment, self.times):
                del self._tenants[which]
                if tenant.peer is not None:
                    tenant.peer.close()
