"""Sessions between the servers of a cell: attach, begin, retire, again after a back-off.

A session is asked for beside the step loop. Its first step is fixed when it is asked for, and the
first plan that names it is exactly that step: steps before it go on without a draft, and if both
servers have not answered when it comes, planning holds for a moment, then the session is given up.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, field

from gateway.cell import Peer
from gateway.links import Link
from slipstream.v1 import draft_pb2, target_pb2

log = logging.getLogger(__name__)

HOLD_S = 0.05
"""Least that planning waits for a session at its first step, where two steps take less: a server
may answer only once the steps that it was given before are done."""

_CONNECT_S = 0.03  # expected from Attach to Attached; sets how far ahead the first step lies
_MAX_LEAD = 64
_ANSWER_S = 15.0  # an Attach without an answer is given up
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0
_STABLE_S = 10.0  # a session that lasted this long resets the back-off


@dataclass(slots=True)
class _Pending:
    session: int
    first_step: int
    asked_at: float
    waiting: set[Peer] = field(default_factory=lambda: {Peer.TARGET, Peer.DRAFT})
    held_until: float | None = None


class Sessions:
    """At most one session, asked for or named by plans.

    Attributes:
        session: the one that plans name, 0: none. Changed by `begin` and `retire`.
        first_step: its first step.
        after: of its last plan; the draft has written the context of all steps up to there.
    """

    def __init__(
        self,
        target: Link[target_pb2.TargetCommand],
        draft: Link[draft_pb2.DraftCommand],
    ) -> None:
        self.session = 0
        self.first_step = 0
        self.after = 0
        self._target = target
        self._draft = draft
        self._pending: _Pending | None = None
        self._ask_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._lead_factor = 1
        self._began_at = 0.0

    @property
    def idle(self) -> bool:
        """No session is named or asked for."""
        return self.session == 0 and self._pending is None

    @property
    def connected(self) -> bool:
        """Both servers have connected, whether or not a plan named it yet."""
        return self.session != 0 or (self._pending is not None and not self._pending.waiting)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do, if nothing else happens."""
        if self._pending is None:
            return math.inf if self.session else self._ask_at
        held = self._pending.held_until
        return self._pending.asked_at + _ANSWER_S if held is None else held

    def ask(self, address: str, next_step: int, busy: bool, step_s: float, now: float) -> None:
        """Sends Attach to both servers if it is time to. `address` is the draft's, for the target;
        `step_s` how long a step takes, for the lead of the first step while `busy`."""
        if not self.idle or now < self._ask_at:
            return
        lead = 0
        if busy:
            lead = math.ceil(_CONNECT_S / max(step_s, 1e-4)) * self._lead_factor
            lead = min(max(lead, 2), _MAX_LEAD)
        session = secrets.randbits(48) or 1
        self._pending = _Pending(session, next_step + lead, now)
        # The draft first: it must expect the target that comes.
        self._draft.attach(session, next_step + lead, address)
        self._target.attach(session, next_step + lead, address)

    def attached(self, peer: Peer, session: int) -> None:
        """`peer` has connected its side."""
        if self._pending is not None and self._pending.session == session:
            self._pending.waiting.discard(peer)

    def holds(self, step: int, step_s: float, now: float) -> bool:
        """Whether `step` must wait: it is the first of a session that is not connected yet.

        `step_s` is how long a step takes, 0 if that is not known.
        """
        pending = self._pending
        if pending is None or step < pending.first_step or not pending.waiting:
            return False
        if pending.held_until is None:
            pending.held_until = now + max(HOLD_S, 2 * step_s)
        if now < pending.held_until:
            return True
        self._lead_factor *= 2
        self.retire("not connected at its first step", now)
        return False

    def begin(self, step: int, now: float) -> bool:
        """Whether the plan of `step` is the first of a connected session, which it now names."""
        pending = self._pending
        if pending is None or pending.waiting or step < pending.first_step:
            return False
        self._pending = None
        self.session, self.first_step, self.after = pending.session, step, step - 1
        self._lead_factor = 1
        self._began_at = now
        log.info("session %d begins at step %d", self.session, step)
        return True

    def current(self, session: int) -> bool:
        """Whether `session` is named or asked for."""
        pending = self._pending
        return session != 0 and session in (self.session, pending.session if pending else 0)

    def retire(self, reason: str, now: float, tell: tuple[Peer, ...] = tuple(Peer)) -> None:
        """Ends the session, or what was asked for; steps in flight of it count as empty. `tell`
        names the servers that do not know."""
        if self.idle:
            return
        session = self.session or (self._pending.session if self._pending else 0)
        log.info("session %d ends: %s", session, reason)
        if self.session and now - self._began_at >= _STABLE_S:
            self._retry_s = _FIRST_RETRY_S
        self.session, self._pending = 0, None
        self._ask_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        if Peer.TARGET in tell and self._target.open:
            self._target.detach(session, reason)
        if Peer.DRAFT in tell and self._draft.open:
            self._draft.detach(session, reason)

    def tick(self, now: float) -> None:
        """Gives up an Attach that was never answered."""
        pending = self._pending
        if pending is not None and pending.waiting and now >= pending.asked_at + _ANSWER_S:
            missing = " and ".join(sorted(peer.value for peer in pending.waiting))
            self.retire(f"no answer from the {missing}", now)
