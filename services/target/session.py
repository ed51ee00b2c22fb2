"""The target's side of the session with a draft: connecting, connected, retired."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slipstream.errors import SlipstreamError
from slipstream.handoff.base import (
    ContextMessage,
    DeviceTargetEnd,
    PeerSpec,
    Proposal,
    TargetEnd,
)

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc import Export

REMEMBERED = 1024
"""Retired sessions kept, so that a step in flight of one is told from a wrong number."""


class Connector(Protocol):
    """Opens handoff sessions beside the step loop."""

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Callable[[TargetEnd | DeviceTargetEnd | SlipstreamError], None],
        export: Export | None = None,
    ) -> None:
        """Returns at once; `done` is called once, on any thread.

        `export`: the memory through which messages may stay on devices.
        """
        ...


@dataclass(slots=True)
class _Current:
    session: int
    first_step: int
    end: TargetEnd | DeviceTargetEnd | None = None  # None while it connects


class Sessions:
    """At most one session that connects or is connected, and the numbers of those that ended.

    Only the engine thread calls it.
    """

    def __init__(self) -> None:
        self._current: _Current | None = None
        self._retired: deque[int] = deque(maxlen=REMEMBERED)

    def is_current(self, session: int) -> bool:
        """Whether `session` is the one that connects or is connected."""
        return self._current is not None and self._current.session == session

    def retired(self, session: int) -> bool:
        """Whether `session` ended before, as far as is remembered."""
        return session in self._retired

    def names(self, session: int, step: int) -> bool:
        """Whether `step` may be one of `session`: it is connected and has begun."""
        now = self._current
        return (
            now is not None
            and now.session == session
            and now.end is not None
            and step >= now.first_step
        )

    def begin(self, session: int, first_step: int) -> None:
        """`session` began to connect; there must be no other."""
        assert self._current is None, "two sessions at once"
        self._current = _Current(session, first_step)

    def connect(self, session: int, end: TargetEnd | DeviceTargetEnd) -> bool:
        """`end` is connected; False when the session was given up meanwhile."""
        if self._current is None or self._current.session != session:
            return False
        self._current.end = end
        return True

    def retire(self, reason: str) -> int | None:
        """Ends the current session and tells the draft; returns its number."""
        if self._current is None:
            return None
        session, end = self._current.session, self._current.end
        self._retired.append(session)
        self._current = None
        if end is not None:
            end.end(reason)
        return session

    def lost(self) -> str | None:
        """Why the current session's end died; None while it lives or there is none."""
        now = self._current
        if now is None or now.end is None or now.end.alive:
            return None
        return now.end.reason

    def link(self) -> DeviceTargetEnd | None:
        """The end of a connected session whose messages stay on devices."""
        end = self._current.end if self._current is not None else None
        return None if end is None or end.transport == "grpc" else end

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        """The draft's trees for `step`; None once the session ended."""
        return self._end.await_proposal(step, shape)

    def publish(self, message: ContextMessage) -> None:
        """Hands over a step's context."""
        self._end.publish_context(message)

    @property
    def _end(self) -> TargetEnd:
        end = self._current.end if self._current is not None else None
        assert end is not None and end.transport == "grpc", "no session through the host"
        return end
