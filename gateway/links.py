"""The gateway's end of each Run stream: opening, numbering, back-off; and what must fit."""

from __future__ import annotations

from typing import Generic, TypeVar

from gateway.cell import Cell, Peer
from slipstream.errors import PairError, ProtocolError
from slipstream.v1 import draft_pb2, target_pb2
from slipstream.wire import PROTOCOL

PING_S = 2.0
"""A gateway holds its cell by its streams; a silent one loses it after 5 s."""

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0

C = TypeVar("C", target_pb2.TargetCommand, draft_pb2.DraftCommand)


class Link(Generic[C]):
    """One Run stream at a time to one peer.

    Attributes:
        life: streams opened so far; events of earlier ones are dropped.
        open: a stream exists. `retry_at`: when to open the next one while none does.
    """

    def __init__(self, cell: Cell, peer: Peer, command_type: type[C], name: str) -> None:
        self.peer = peer
        self.life = 0
        self.open = False
        self.retry_at = 0.0
        self._cell = cell
        self._type: type[C] = command_type
        self._name = name
        self._number = 0
        self._retry_s = _FIRST_RETRY_S

    def connect(self) -> None:
        """Opens a stream and says Hello."""
        self.life += 1
        self._number = 0
        self.open = True
        self._cell.open(self.peer, self.life)
        command = self.command()
        command.hello.protocol = PROTOCOL
        command.hello.gateway = self._name
        self.send(command)

    def command(self) -> C:
        """A command with the stream's next number; it must be sent before the next one is made."""
        self._number += 1
        return self._type(number=self._number)

    def send(self, command: C) -> None:
        """Sends on the open stream."""
        self._cell.send(self.peer, command)

    def ping(self) -> None:
        """Keeps the lease."""
        if self.open:
            command = self.command()
            command.ping.SetInParent()
            self.send(command)

    def release(self, slot: int, epoch: int) -> None:
        """Frees a slot."""
        command = self.command()
        command.release.slot = slot
        command.release.epoch = epoch
        self.send(command)

    def attach(self, session: int, first_step: int, draft_address: str) -> None:
        """Asks for a session."""
        command = self.command()
        command.attach.session = session
        command.attach.first_step = first_step
        command.attach.draft_address = draft_address
        self.send(command)

    def detach(self, session: int, reason: str) -> None:
        """Ends a session."""
        command = self.command()
        command.detach.session = session
        command.detach.reason = reason
        self.send(command)

    def served(self) -> None:
        """The peer answered Hello: the next loss is retried at once."""
        self._retry_s = _FIRST_RETRY_S

    def lost(self, now: float) -> None:
        """The stream ended, or is given up: the next one follows after the back-off."""
        self._cell.close(self.peer)
        self.open = False
        self.retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def close(self) -> None:
        """Ends the stream for good."""
        self._cell.close(self.peer)
        self.open = False


def check_protocol(peer: Peer, protocol: int) -> None:
    """Raises ProtocolError naming both versions."""
    if protocol != PROTOCOL:
        raise ProtocolError(f"protocol: the gateway speaks {PROTOCOL}, the {peer.value} {protocol}")


def check_pair(target: target_pb2.TargetReady, draft: draft_pb2.DraftReady) -> None:
    """Raises PairError naming both values of the first thing that does not fit."""
    if target.feature_width == 0:
        raise PairError(
            f"feature_width: the target was started without a draft head (0), the draft has"
            f" {draft.feature_width}"
        )
    ours, theirs = target.fingerprints, draft.fingerprints
    pairs: list[tuple[str, object, object]] = [
        ("feature_width", target.feature_width, draft.feature_width),
        ("vocab_size", target.vocab_size, draft.vocab_size),
    ]
    pairs += [
        (f"fingerprint of {name}", getattr(ours, name), getattr(theirs, name))
        for name in ("fc", "hidden_norm", "embedding", "lm_head")
    ]
    for name, left, right in pairs:
        if left != right:
            raise PairError(f"{name}: the target has {left!r}, the draft {right!r}")
    if target.slots > draft.slots:
        raise PairError(f"slots: the target has {target.slots}, the draft only {draft.slots}")
