"""What both servers are told and say alike: nouns of the Run streams, and how events are encoded.

Every command carries `number`, its place in the gateway's stream, for a Rejected to name.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Release:
    """A slot is free again."""

    number: int
    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Detach:
    """A session ends."""

    number: int
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Attached:
    """A session is connected."""

    session: int
    transport: str

    def to_proto(self) -> pb.Attached:
        return pb.Attached(session=self.session, transport=self.transport)


@dataclass(frozen=True, slots=True)
class Detached:
    """A session ended on this side."""

    session: int
    reason: str

    def to_proto(self) -> pb.Detached:
        return pb.Detached(session=self.session, reason=self.reason)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A command, or one entry of a plan, was refused; `code` is a RejectCode."""

    command: int
    code: pb.RejectCode.ValueType
    reason: str
    slot: int = 0
    epoch: int = 0
    step: int = 0
    session: int = 0

    def to_proto(self) -> pb.Rejected:
        return pb.Rejected(
            command=self.command,
            slot=self.slot,
            epoch=self.epoch,
            code=self.code,
            reason=self.reason,
            step=self.step,
            session=self.session,
        )
