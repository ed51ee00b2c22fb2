"""The life of the gateway process: sockets, both doors on one loop, readiness, the drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn

from gateway.app import create_app
from gateway.checkpoint import Checkpoint
from gateway.counters import Snapshot
from gateway.generation import Bridge
from gateway.http import RestProtocol
from gateway.metrics import FrontMetrics, SchedulerMetrics
from gateway.request import Deliver, ModelInfo
from gateway.service import SchedulerPort, Service
from gateway.servicer import SERVICE_NAME, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tokenizer import resolve_folder
from slipstream import log as log_lines
from slipstream import serving
from slipstream.errors import ConfigError, PairError, SlipstreamError
from slipstream.metrics import registry
from slipstream.serving import Server, wait_for_signal
from slipstream.v1 import gateway_pb2_grpc as rpc

log = logging.getLogger(__name__)

_POLL_S = 0.05  # how often readiness is looked at
_ERRORS_S = 0.5  # what the last error events get to leave after the drain time


class SchedulerThread(SchedulerPort, Protocol):
    """A scheduler with its own thread."""

    def start(self) -> None:
        """Starts the thread."""

    def wait_ready(self) -> ModelInfo:
        """Blocks until it serves, or is stopped. Raises ConfigError or PeerLost if it cannot."""

    def stop(self, drain_s: float) -> None:
        """Ends the thread once nothing runs, at the latest after `drain_s` s; blocks."""

    def snapshot(self) -> Snapshot:
        """Its state and sums, for /metrics."""


class RestServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the process's affair."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming the address when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def joined(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Front:
    """Both doors over one scheduler.

    Attributes:
        http, grpc: host:port of each door, known after `start`.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        checkpoint: Checkpoint,
        make_scheduler: Callable[[Deliver], SchedulerThread],
    ) -> None:
        self._settings = settings
        self._tokenizer = checkpoint.tokenizer
        bridge = Bridge(asyncio.get_running_loop())
        metrics = FrontMetrics()
        self.scheduler = make_scheduler(bridge.deliver)
        self.service = Service(
            self.scheduler,
            bridge,
            checkpoint,
            metrics,
            settings.served_model_name,
            settings.chat(),
            settings.max_output_tokens,
        )
        collectors = (*metrics.collectors(), SchedulerMetrics(self.scheduler.snapshot))
        self._rest = RestServer(
            uvicorn.Config(
                create_app(self.service, registry(collectors)),
                loop="none",
                http=RestProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
            )
        )
        self._grpc = Server([SERVICE_NAME])
        rpc.add_GatewayServiceServicer_to_server(GatewayServicer(self.service), self._grpc.grpc)
        self._rest_task: asyncio.Task[None] | None = None
        self.http = self.grpc = ""

    async def start(self) -> None:
        """Opens both doors, not yet ready, and starts the scheduler.

        Raises ConfigError when an address is in use; then nothing was started.
        """
        settings = self._settings
        sock = listen(settings.host, settings.port)
        try:
            grpc_host = f"[{settings.host}]" if ":" in settings.host else settings.host
            port = await self._grpc.start(grpc_host, settings.grpc_port)
        except ConfigError:
            sock.close()
            raise
        self.http = joined(settings.host, sock.getsockname()[1])
        self.grpc = joined(settings.host, port)
        self.scheduler.start()
        self._rest_task = asyncio.create_task(self._rest.serve(sockets=[sock]))

    async def until_ready(self) -> None:
        """Waits for the scheduler's target.

        Raises what the scheduler cannot start for, and PairError when the tokenizer is not the
        target's.
        """
        vocab = (await asyncio.to_thread(self.scheduler.wait_ready)).vocab_size
        if self._tokenizer.vocab_size > vocab:
            raise PairError(
                f"the tokenizer has {self._tokenizer.vocab_size} ids,"
                f" but the target's vocabulary only {vocab}"
            )
        await asyncio.to_thread(self.service.prepare)

    async def follow_health(self) -> None:
        """Keeps the gRPC health in step with the service for ever; cancel it to end."""
        said = None
        while True:
            if said != self.service.ready:
                said = self.service.ready
                await self._grpc.ready(said)
                log.info("serving" if said else "not serving")
            await asyncio.sleep(_POLL_S)

    async def stop(self, drain_s: float) -> None:
        """Not serving at once; running requests get `drain_s` s; then everything closes."""
        self.service.draining = True
        await self._grpc.ready(False)
        if not await self.service.drain(drain_s):
            log.warning("drain: requests were ended after %g s", drain_s)
            await asyncio.sleep(_ERRORS_S)
        self._rest.should_exit = True
        await self._grpc.stop(_ERRORS_S)
        if self._rest_task is not None:
            await self._rest_task
        await asyncio.to_thread(self.scheduler.stop, 0.0)
        self.service.close()
        self._tokenizer.close()


async def serve(
    settings: GatewaySettings,
    checkpoint: Checkpoint,
    make_scheduler: Callable[[Deliver], SchedulerThread],
) -> None:
    """Runs the gateway until a signal. Raises SlipstreamError when it cannot start."""
    front = Front(settings, checkpoint, make_scheduler)
    await front.start()
    signalled = asyncio.create_task(wait_for_signal())
    ready = asyncio.create_task(front.until_ready())
    await asyncio.wait((signalled, ready), return_when=asyncio.FIRST_COMPLETED)
    health: asyncio.Task[None] | None = None
    drain_s = settings.drain_s
    try:
        if ready.done():
            ready.result()
            health = asyncio.create_task(front.follow_health())
            print("READY", json.dumps({"grpc": front.grpc, "http": front.http}), flush=True)
        await signalled
        log.info("signal: no new requests; running ones get %g s", drain_s)
    except SlipstreamError:
        drain_s = 0.0
        raise
    finally:
        for task in (ready, signalled, health):
            if task is not None:
                task.cancel()
        await front.stop(drain_s)


def run(settings: GatewaySettings, make_scheduler: Callable[[Deliver], SchedulerThread]) -> int:
    """The whole process; the exit status: 0 after a signal, 2 when it cannot start as it was told
    to, 1 when the servers behind it do not let it."""
    log_lines.setup(settings.log_level)
    try:
        folder = resolve_folder(settings.tokenizer)
        checkpoint = Checkpoint.load(folder, recommended=settings.generation_config == "model")
        serving.run(serve(settings, checkpoint, make_scheduler))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
