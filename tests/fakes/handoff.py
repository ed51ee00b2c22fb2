"""A handoff in memory with faults: messages held back or given twice, a broken link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from slipstream.handoff.base import ContextMessage, PeerSpec, Proposal
from slipstream.handoff.mailbox import Mailbox


class Link:
    """Both ends of one session.

    `hold` keeps messages back until `deliver`; what is held when the link breaks is lost, as on a
    wire. Every message is remembered, so that `repeat` can give an old one again.
    """

    def __init__(self, session: int, watchdog_s: float) -> None:
        self.session = session
        self.watchdog_s = watchdog_s
        self.context: Mailbox[ContextMessage] = Mailbox()
        self.proposals: Mailbox[Proposal] = Mailbox()
        self.holding = False
        self._held: list[tuple[Mailbox[Any], Any]] = []
        self._sent: list[tuple[Mailbox[Any], Any]] = []
        self.target = MemoryTargetEnd(self)
        self.draft = MemoryDraftEnd(self)

    def send(self, box: Mailbox[Any], message: Any) -> None:
        self._sent.append((box, message))
        if self.holding:
            self._held.append((box, message))
        else:
            box.put(message)

    def deliver(self) -> None:
        """Ends `holding`; what was held comes late."""
        self.holding = False
        held, self._held = self._held, []
        for box, message in held:
            box.put(message)

    def repeat(self, index: int) -> None:
        """Gives an old message again."""
        if self._sent:
            box, message = self._sent[index % len(self._sent)]
            box.put(message)

    def close(self, reason: str) -> None:
        """Both sides learn that the link is gone."""
        self.context.close(reason)
        self.proposals.close(reason)


class MemoryTargetEnd:
    """`TargetEnd` of a link."""

    transport: Literal["grpc"] = "grpc"

    def __init__(self, link: Link) -> None:
        self._link = link
        self.session = link.session

    @property
    def alive(self) -> bool:
        return not self._link.proposals.closed

    @property
    def reason(self) -> str:
        return self._link.proposals.reason

    def publish_context(self, message: ContextMessage) -> None:
        if self.alive:
            self._link.send(self._link.context, message)

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        try:
            return self._link.proposals.take(step, self._link.watchdog_s)
        except TimeoutError:
            self.end(f"no proposal for step {step}")
            return None

    def end(self, reason: str) -> None:
        self._link.close(reason)


class MemoryDraftEnd:
    """`DraftEnd` of a link."""

    transport: Literal["grpc"] = "grpc"

    def __init__(self, link: Link) -> None:
        self._link = link
        self.session = link.session

    @property
    def alive(self) -> bool:
        return not self._link.context.closed

    @property
    def reason(self) -> str:
        return self._link.context.reason

    def await_context(self, step: int) -> ContextMessage | None:
        return self._link.context.take(step)

    def publish_proposal(self, proposal: Proposal) -> None:
        if self.alive:
            self._link.send(self._link.proposals, proposal)

    def end(self, reason: str) -> None:
        self._link.close(reason)


class Exchange:
    """Connector of the target and Peers of the draft: they meet here by session number."""

    def __init__(self, watchdog_s: float) -> None:
        self._watchdog_s = watchdog_s
        self.links: dict[int, Link] = {}
        self._draft: dict[int, Callable[[Any], None]] = {}
        self._target: dict[int, Callable[[Any], None]] = {}

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Callable[[Any], None],
        export: Any = None,
    ) -> None:
        self._target[session] = done
        self._meet(session)

    def expect(
        self,
        session: int,
        first_step: int,
        spec: PeerSpec,
        done: Callable[[Any], None],
        timeout_s: float = 10.0,
    ) -> None:
        self._draft[session] = done
        self._meet(session)

    def forget(self, session: int) -> None:
        self._draft.pop(session, None)

    def _meet(self, session: int) -> None:
        if session in self._draft and session in self._target:
            link = self.links[session] = Link(session, self._watchdog_s)
            self._target.pop(session)(link.target)
            self._draft.pop(session)(link.draft)
