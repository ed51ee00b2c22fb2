"""DraftService: decodes commands, calls the engine, encodes events; no coroutine runs a step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from services.draft import codec
from services.draft.commands import Event
from services.draft.engine import Engine
from services.draft.peers import Peers
from services.draft.runner import DraftCost, DraftRunner
from slipstream.errors import (
    Draining,
    EngineFailed,
    PeerLost,
    ProtocolError,
    QueueFull,
    SlipstreamError,
)
from slipstream.tree import TreeSpec
from slipstream.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""A gateway silent for so long has left."""

FINISH_S = 2.0
"""Most seconds that an engine whose gateway left may take for the steps it was given."""


@dataclass(frozen=True, slots=True)
class Model:
    """What there is to serve, once it is warm."""

    runner: DraftRunner
    tree: TreeSpec
    costs: tuple[DraftCost, ...]
    handoff_address: str = ""


@dataclass(frozen=True, slots=True)
class _Ended:
    """The engine's last word; an error when it failed."""

    error: BaseException | None


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves at most `max_sessions` gateways at once, each with an engine of its own.

    Args:
        failed: called on the loop when an engine failed: the process is to end.
    """

    def __init__(
        self,
        peers: Peers,
        max_sessions: int,
        failed: Callable[[BaseException], None],
        lease_s: float = LEASE_S,
    ) -> None:
        self._peers = peers
        self._max_sessions = max_sessions
        self._failed = failed
        self._lease_s = lease_s
        self._model: Model | None = None
        self._device = threading.Lock()
        self._gateways: set[_Gateway] = set()
        self._draining: str | None = None

    def serve(self, model: Model) -> None:
        """From now on gateways are let in."""
        self._model = model

    def at_work(self) -> dict[str, str]:
        """What each engine is at that is at something. Any thread."""
        engines = {f"engine {id(gateway):x}": gateway.at for gateway in self._gateways.copy()}
        return {name: at for name, at in engines.items() if at is not None}

    def drain(self, reason: str) -> None:
        """Lets nobody in and ends every stream once its engine did what it was given."""
        self._draining = reason
        for gateway in list(self._gateways):
            gateway.leave(Draining(reason))

    async def Run(
        self, request_iterator: AsyncIterator[draft_pb2.DraftCommand], context: Any
    ) -> AsyncIterator[draft_pb2.DraftEvent]:
        hello = codec.check_hello(await self._first(request_iterator))
        model = self._admit_gateway()
        gateway = _Gateway(model, self._peers, self._device, self._gateways.discard)
        self._gateways.add(gateway)
        context.add_done_callback(lambda _: gateway.leave(None))
        log.info("gateway %r is here", hello.gateway)
        yield codec.ready(model.runner.spec, model.tree, model.costs, model.handoff_address)
        try:
            async with aclosing(gateway.drive(request_iterator, self._lease_s)) as events:
                async for event in events:
                    yield codec.encode(event)
        except EngineFailed as error:
            self._failed(error.__cause__ or error)
            raise
        finally:
            log.info("gateway %r is gone", hello.gateway)

    async def _first(
        self, commands: AsyncIterator[draft_pb2.DraftCommand]
    ) -> draft_pb2.DraftCommand:
        try:
            first = await asyncio.wait_for(anext(commands, None), self._lease_s)
        except TimeoutError:
            raise PeerLost(f"no Hello within {self._lease_s:g} s") from None
        if first is None:
            raise ProtocolError("the stream ended before Hello")
        return first

    def _admit_gateway(self) -> Model:
        if self._draining is not None:
            raise Draining(self._draining)
        if self._model is None:
            raise PeerLost("the draft is not warm yet")
        if len(self._gateways) >= self._max_sessions:
            raise QueueFull(f"every session is taken ({self._max_sessions})")
        return self._model


class _Gateway:
    """One Run stream and its engine; `stopped` is called on the loop when the engine ended."""

    def __init__(
        self,
        model: Model,
        peers: Peers,
        device: threading.Lock,
        stopped: Callable[[_Gateway], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | _Ended] = asyncio.Queue()
        self._why: SlipstreamError | None = None  # what the stream's end is answered with
        self._stopped = stopped
        self._block_size = model.runner.spec.block_size
        self._heard = self._loop.time()
        self._lease: asyncio.TimerHandle | None = None
        self._engine = Engine(
            model.runner, peers, model.tree, device, self._emit, lambda e: self._emit(_Ended(e))
        )
        self._engine.start()

    @property
    def at(self) -> str | None:
        """What its engine is at."""
        return self._engine.at

    def _emit(self, event: Event | _Ended) -> None:
        """Called on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, event)
        except RuntimeError:
            log.debug("dropped %s: the loop is closed", event)

    def _take(self, event: Event | _Ended) -> None:
        self._events.put_nowait(event)
        if isinstance(event, _Ended):
            self._stopped(self)

    async def drive(
        self, commands: AsyncIterator[draft_pb2.DraftCommand], lease_s: float
    ) -> AsyncGenerator[Event, None]:
        """The engine's events, until it ended; then raises what ended the stream, if anything."""
        reader = asyncio.create_task(self._read(commands))
        self._check_lease(lease_s)
        try:
            while not isinstance(event := await self._events.get(), _Ended):
                yield event
        finally:
            reader.cancel()
            if self._lease is not None:
                self._lease.cancel()
        if event.error is not None:
            raise EngineFailed(f"the draft engine failed: {event.error}") from event.error
        if self._why is not None:
            raise self._why

    async def _read(self, commands: AsyncIterator[draft_pb2.DraftCommand]) -> None:
        expected = 2  # Hello was number 1
        try:
            async for message in commands:
                self._heard = self._loop.time()
                if message.number != expected:
                    raise ProtocolError(f"number must be {expected}, got {message.number}")
                expected += 1
                command = codec.decode(message, self._block_size)
                if command is not None:
                    self._engine.submit(command)
            self.leave(None)
        except SlipstreamError as error:
            self.leave(error)

    def _check_lease(self, lease_s: float) -> None:
        left = self._heard + lease_s - self._loop.time()
        if left > 0:
            self._lease = self._loop.call_later(left, self._check_lease, lease_s)
        else:
            self.leave(PeerLost(f"the gateway was silent for {lease_s:g} s"))

    def leave(self, why: SlipstreamError | None) -> None:
        """The engine finishes what it was given and ends; the stream then ends with `why`."""
        if self._why is None:
            self._why = why
        reason = "the gateway left" if why is None else str(why)
        self._engine.close(reason)
        self._loop.call_later(FINISH_S, self._engine.interrupt, reason)
