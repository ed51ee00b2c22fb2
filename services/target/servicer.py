"""The gateway's stream: decodes commands, calls the engine, encodes events. Nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from services.target.commands import Event
from services.target.convert import event_message, read_command
from services.target.engine import Engine
from services.target.runner import TargetSpec
from slipstream import wire
from slipstream.errors import (
    CellBusy,
    Draining,
    PeerLost,
    ProtocolError,
    SlipstreamError,
)
from slipstream.v1 import target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""A gateway that is silent for longer has lost its cell; it sends a ping every 2 s."""

Requests = AsyncIterator[target_pb2.TargetCommand]


class _Stream:
    """One gateway's stream while it holds the target; lives on the loop's thread."""

    def __init__(self, engine: Engine, lease_s: float) -> None:
        self._engine = engine
        self._lease_s = lease_s
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | SlipstreamError | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._closing = False
        self.closed = asyncio.Event()  # the engine has freed everything

    def begin(self, requests: Requests) -> None:
        """Takes the target and reads commands from now on."""
        self._engine.open(self._post)
        self._reader = asyncio.create_task(self._read(requests))

    async def next(self) -> Event | None:
        """The next event, None after the last. Raises what ended the stream."""
        event = await self._events.get()
        if isinstance(event, SlipstreamError):
            raise event
        return event

    def give_up(self, error: SlipstreamError | None = None) -> None:
        """The gateway went, or must go with `error`; idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._reader is not None:
            self._reader.cancel()
        self._engine.close(lambda: self._call(self._finish, error))

    def _finish(self, error: SlipstreamError | None) -> None:
        self._events.put_nowait(error)
        self.closed.set()

    def _post(self, event: Event) -> None:
        self._call(self._events.put_nowait, event)

    def _call(self, function: Any, value: Any) -> None:
        """Runs `function(value)` on the loop; called by the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(function, value)
        except RuntimeError:  # the loop is closed: the process ends
            log.debug("dropped %r: the loop is closed", value)

    async def _read(self, requests: Requests) -> None:
        error: SlipstreamError | None = None
        try:
            number = 1  # Hello
            while (message := await next_command(requests, self._lease_s)) is not None:
                number += 1
                if message.number != number:
                    raise ProtocolError(f"command {message.number} came, {number} was due")
                command = read_command(message, time.monotonic_ns())
                if command is not None:
                    self._engine.submit(command)
        except SlipstreamError as problem:
            error = problem
        self._reader = None
        self.give_up(error)


async def next_command(requests: Requests, lease_s: float) -> target_pb2.TargetCommand | None:
    """The gateway's next command, None at its end. Raises PeerLost after `lease_s` of silence."""
    try:
        async with asyncio.timeout(lease_s):
            return await anext(requests, None)
    except TimeoutError as error:
        raise PeerLost(f"the gateway was silent for {lease_s:g} s") from error


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """TargetService: one gateway at a time."""

    def __init__(self, engine: Engine, lease_s: float = LEASE_S) -> None:
        self._engine = engine
        self._lease_s = lease_s
        self._spec: TargetSpec | None = None
        self._stream: _Stream | None = None
        self._draining = False

    def loaded(self, spec: TargetSpec) -> None:
        """The engine is ready: streams are taken from now on."""
        self._spec = spec

    def drain(self) -> None:
        """No new stream is taken."""
        self._draining = True

    async def close(self) -> None:
        """Ends the gateway's stream, if there is one, once the engine has freed its slots."""
        stream = self._stream
        if stream is not None:
            stream.give_up(Draining("the target shuts down"))
            await stream.closed.wait()

    async def Run(
        self, request_iterator: Requests, context: Any
    ) -> AsyncIterator[target_pb2.TargetEvent]:
        self._check_free()
        first = await next_command(request_iterator, self._lease_s)
        check_hello(first)
        self._check_free()  # another may have been quicker with its Hello
        spec = self._spec
        assert spec is not None
        stream = self._stream = _Stream(self._engine, self._lease_s)
        context.add_done_callback(lambda _: stream.give_up())
        released = asyncio.create_task(self._release(stream))
        stream.begin(request_iterator)
        while (event := await stream.next()) is not None:
            yield event_message(event, spec)
        await released

    def _check_free(self) -> None:
        if self._spec is None:
            raise PeerLost("the target is still loading")
        if self._draining:
            raise Draining("the target drains")
        if self._stream is not None:
            raise CellBusy("another gateway holds this target")

    async def _release(self, stream: _Stream) -> None:
        """Lets the next gateway in when `stream` is over."""
        await stream.closed.wait()
        self._stream = None


def check_hello(message: target_pb2.TargetCommand | None) -> None:
    """Raises ProtocolError unless `message` is a Hello of our protocol."""
    if message is None or message.WhichOneof("command") != "hello":
        raise ProtocolError("the first command must be Hello")
    if message.number != 1:
        raise ProtocolError(f"Hello is command {message.number}, not 1")
    if message.hello.protocol != wire.PROTOCOL:
        raise ProtocolError(
            f"the gateway speaks protocol {message.hello.protocol}, this target {wire.PROTOCOL}"
        )
