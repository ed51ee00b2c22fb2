"""The two Run streams of a cell, with gRPC's synchronous API.

Reader threads post what arrives into the scheduler's inbox; what the scheduler sends goes through a
queue that gRPC's own sender thread empties, so that the scheduler never blocks. (The asyncio API
shares one poller between all loops of a process, which misbehaves beside the front's loop.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import grpc

from slipstream import channels
from slipstream.errors import (
    CellBusy,
    ConfigError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    SlipstreamError,
)
from slipstream.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

Command = target_pb2.TargetCommand | draft_pb2.DraftCommand
Event = target_pb2.TargetEvent | draft_pb2.DraftEvent


class Peer(Enum):
    """The two servers of a cell."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Received:
    """An event of a peer's stream. `life` counts the streams opened to that peer; `at` is the
    monotonic time in seconds at which it arrived."""

    peer: Peer
    life: int
    event: Event
    at: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer's stream ended, or could not be opened."""

    peer: Peer
    life: int
    error: SlipstreamError


Post = Callable[[Received | Lost], None]


class Cell(Protocol):
    """What the scheduler needs of a cell; every call returns at once."""

    def open(self, peer: Peer, life: int) -> None:
        """Opens a Run stream; ends with Lost."""
        ...

    def send(self, peer: Peer, command: Command) -> None:
        """Sends on the open stream, in order; dropped without one."""
        ...

    def close(self, peer: Peer) -> None:
        """Cancels the stream. Idempotent."""
        ...


def error_of(peer: Peer, address: str, error: grpc.RpcError) -> SlipstreamError:
    """What a failed stream means, by its status."""
    code, details = error.code(), error.details() or ""
    text = f"{peer.value} at {address}: {details or code.name}"
    match code:
        case grpc.StatusCode.ALREADY_EXISTS | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return CellBusy(text)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ConfigError(text)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return ProtocolError(text)
    return PeerLost(text)


class _Stream:
    """One Run call: a sender queue and a reader thread."""

    def __init__(self, method: Any, peer: Peer, life: int, address: str, post: Post) -> None:
        self._peer = peer
        self._life = life
        self._address = address
        self._post = post
        self._out: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._call = method(self._commands())
        self._reader = threading.Thread(target=self._read, name=f"{peer.value}-reader", daemon=True)
        self._reader.start()

    def _commands(self) -> Iterator[Command]:
        return iter(self._out.get, None)

    def send(self, command: Command) -> None:
        self._out.put(command)

    def _read(self) -> None:
        error: SlipstreamError
        try:
            for event in self._call:
                self._post(Received(self._peer, self._life, event, time.monotonic()))
            error = PeerLost(f"{self._peer.value} at {self._address} closed the stream")
        except grpc.RpcError as failure:
            error = error_of(self._peer, self._address, failure)
        except Exception as failure:
            error = EngineFailed(f"reader of the {self._peer.value}'s stream: {failure!r}")
        self._out.put(None)
        self._post(Lost(self._peer, self._life, error))

    def close(self) -> None:
        self._out.put(None)
        self._call.cancel()


class GrpcCell:
    """A cell behind two channels. `post` is called on the reader threads."""

    def __init__(self, target: str, draft: str | None, post: Post) -> None:
        self._post = post
        self._addresses = {Peer.TARGET: target}
        if draft is not None:
            self._addresses[Peer.DRAFT] = draft
        self._channels: dict[Peer, grpc.Channel] = {}
        self._streams: dict[Peer, _Stream] = {}

    def open(self, peer: Peer, life: int) -> None:
        """Opens a Run stream; ends with Lost."""
        self.close(peer)
        address = self._addresses[peer]
        channel = self._channels.get(peer)
        if channel is None:
            channel = grpc.insecure_channel(address, options=channels.client_options())
            self._channels[peer] = channel
        stub: Any
        if peer is Peer.TARGET:
            stub = target_pb2_grpc.TargetServiceStub(channel)
        else:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
        self._streams[peer] = _Stream(stub.Run, peer, life, address, self._post)

    def send(self, peer: Peer, command: Command) -> None:
        """Queues a command for the sender thread."""
        stream = self._streams.get(peer)
        if stream is not None:
            stream.send(command)

    def close(self, peer: Peer) -> None:
        """Cancels the stream to `peer`."""
        stream = self._streams.pop(peer, None)
        if stream is not None:
            stream.close()

    def shutdown(self) -> None:
        """Closes both streams and their channels."""
        for peer in tuple(self._streams):
            self.close(peer)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
