"""The target's server: gRPC in front, the engine behind, and how they come up and go down."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from services.target.engine import Engine
from services.target.runner import TargetRunner, TargetSpec
from services.target.servicer import LEASE_S, TargetServicer
from slipstream.handoff.grpc import GrpcConnector
from slipstream.serving import Server, wait_for_signal
from slipstream.v1 import target_pb2, target_pb2_grpc
from slipstream.watchdog import Watchdog

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


class TargetServer:
    """Serves one runner. Made on the running loop.

    Attributes:
        failure: set to what raised when loading or a step failed; the process must end then.
        port: bound port, known after `start`.
    """

    def __init__(
        self,
        load: Callable[[], TargetRunner],
        *,
        watchdog_ms: int | None = None,
        handoff: Literal["auto", "grpc", "cuda_ipc"] = "auto",
        lease_s: float = LEASE_S,
        step_limit_s: float = 0.0,
    ) -> None:
        """`step_limit_s`: the process ends when a step takes longer; 0: it may take any time."""
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._loaded: asyncio.Future[TargetSpec] = self._loop.create_future()
        self._connector = GrpcConnector(self._loop, watchdog_ms, handoff=handoff)
        self.engine = Engine(
            load,
            self._connector,
            loaded=lambda spec: self._call(_settle, self._loaded, spec),
            failed=lambda error: self._call(_settle, self.failure, error),
        )
        self._servicer = TargetServicer(self.engine, lease_s)
        self._server = Server([SERVICE])
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._servicer, self._server.grpc)
        self._watchdog = Watchdog(self._at_work, step_limit_s)
        self.port = 0

    def _at_work(self) -> dict[str, str]:
        at = self.engine.at
        return {} if at is None else {"engine": at}

    def _call(self, function: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:  # the loop is closed: the process ends
            log.debug("dropped %r: the loop is closed", values)

    async def start(self, host: str, port: int) -> int:
        """Binds (NOT_SERVING) and begins to load; returns the port. Raises ConfigError."""
        self.port = await self._server.start(host, port)
        self.engine.start()
        return self.port

    async def wait_loaded(self) -> TargetSpec:
        """Waits until the runner is warm, then says SERVING. Raises what loading raised."""
        await _first(self._loaded, self.failure)
        if self.failure.done():
            raise self.failure.result()
        spec = self._loaded.result()
        self._servicer.loaded(spec)
        self._watchdog.start()
        await self._server.ready()
        return spec

    async def drain(self, timeout_s: float) -> bool:
        """Says NOT_SERVING and takes nothing new; False when requests still ran at the end."""
        self._servicer.drain()
        await self._server.ready(False)
        drained = asyncio.Event()
        self.engine.drain(lambda: self._call(drained.set))
        try:
            async with asyncio.timeout(timeout_s):
                await drained.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends the gateway's stream, the engine, the sessions and the server.

        An engine that is still loading is left alone: its thread does not hold the process.
        """
        self._watchdog.stop()
        runs = self._loaded.done() and not self.failure.done()
        if runs:
            await self._servicer.close()
        await self._server.stop(0.5 if runs else 0.0)
        if runs:
            await asyncio.to_thread(self.engine.stop)
        await self._connector.close()
        if runs and (shared := self.engine.shared) is not None:
            await asyncio.to_thread(shared.close)


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def serve(
    load: Callable[[], TargetRunner],
    host: str,
    port: int,
    *,
    watchdog_ms: int | None = None,
    handoff: Literal["auto", "grpc", "cuda_ipc"] = "auto",
    drain_s: float = 30.0,
    step_limit_s: float = 0.0,
) -> int:
    """A target process from start to end; prints the READY line; returns the exit status.

    Raises ConfigError when the address, the model or the draft head is not usable.
    """
    server = TargetServer(load, watchdog_ms=watchdog_ms, handoff=handoff, step_limit_s=step_limit_s)
    signalled = asyncio.create_task(wait_for_signal())
    try:
        await server.start(host, port)
        return await _live(server, signalled, host, drain_s)
    finally:
        await server.stop()


async def _live(
    server: TargetServer, signalled: asyncio.Task[int], host: str, drain_s: float
) -> int:
    """Loads, serves until a signal or a failure, drains."""
    loading = asyncio.create_task(server.wait_loaded())
    await _first(loading, signalled)
    if not loading.done():
        return 0
    spec = loading.result()
    log.info("serving %s at %s:%d", spec.model, host, server.port)
    print("READY", json.dumps({"grpc": f"{host}:{server.port}", "http": None}), flush=True)
    await _first(signalled, server.failure)
    if server.failure.done():
        log.critical("a step failed: this process's state is not to be trusted")
        return 1
    if not await server.drain(drain_s):
        log.warning("requests still ran after %g s and are given up", drain_s)
    return 0
