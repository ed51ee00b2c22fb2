"""The draft's server: gRPC in front, engines behind, and how they come up and go down."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from services.draft.runner import DraftRunner, DraftSpec
from services.draft.servicer import LEASE_S, DraftServicer, Model
from slipstream.handoff.grpc import GrpcAcceptor
from slipstream.serving import Server, wait_for_signal
from slipstream.tree import TreeSpec, resolve_spec
from slipstream.v1 import draft_pb2, draft_pb2_grpc, handoff_pb2
from slipstream.watchdog import Watchdog

log = logging.getLogger(__name__)

SERVICES = (
    draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name,
)


def default_tree(block_size: int) -> TreeSpec:
    """The tree of a server that was given none."""
    return resolve_spec(block_size=block_size)


class DraftServer:
    """Serves one runner to gateways and targets. Made on the running loop.

    Args:
        load: makes the runner, on a thread.
        tree: the tree of requests that name none, for the block size of the runner.
        max_sessions: gateways served at once.
        handoff_address: where targets reach this server, if not where gateways do.
        warm: run and measure the steps' shapes before serving.
        step_limit_s: the process ends when a step takes longer; 0: it may take any time.

    Attributes:
        failure: set to what raised when an engine failed; the process must end then.
        port: bound port, known after `start`.
    """

    def __init__(
        self,
        load: Callable[[], DraftRunner],
        *,
        tree: Callable[[int], TreeSpec] = default_tree,
        max_sessions: int = 1,
        handoff_address: str = "",
        lease_s: float = LEASE_S,
        warm: bool = True,
        step_limit_s: float = 0.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = loop.create_future()
        self._load = load
        self._tree = tree
        self._warm = warm
        self._handoff_address = handoff_address
        self._server = Server(SERVICES)
        self._acceptor = GrpcAcceptor(loop)
        self._acceptor.add_to(self._server.grpc)
        self._servicer = DraftServicer(self._acceptor, max_sessions, self._failed, lease_s)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self._server.grpc)
        self._watchdog = Watchdog(self._servicer.at_work, step_limit_s)
        self.port = 0

    def _failed(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    async def start(self, host: str, port: int) -> int:
        """Binds, NOT_SERVING; returns the port. Raises ConfigError."""
        self.port = await self._server.start(host, port)
        return self.port

    async def load(self) -> DraftSpec:
        """Loads and warms the runner, then says SERVING. Raises what loading raised."""
        model = await asyncio.to_thread(self._load_model)
        self._servicer.serve(model)
        self._watchdog.start()
        await self._server.ready()
        return model.runner.spec

    def _load_model(self) -> Model:
        runner = self._load()
        tree = self._tree(runner.spec.block_size)
        costs = runner.warm_up(tree) if self._warm else []
        for cost in costs:
            log.info("draft step: slots=%d rows=%d ms=%.2f", cost.slots, cost.rows, cost.ns / 1e6)
        return Model(runner, tree, tuple(costs), self._handoff_address)

    async def stop(self, reason: str = "the draft shuts down", grace_s: float = 3.0) -> None:
        """Says NOT_SERVING, ends every stream once its engine did what it was given, closes."""
        self._watchdog.stop()
        await self._server.ready(False)
        self._servicer.drain(reason)
        await self._server.stop(grace_s)


async def serve(load: Callable[[], DraftRunner], host: str, port: int, **server: Any) -> int:
    """A draft process from start to end; prints the READY line; returns the exit status.

    `server` goes to DraftServer. Raises ConfigError when the address, the model or the tree is not
    usable.
    """
    draft = DraftServer(load, **server)
    signalled = asyncio.create_task(wait_for_signal())
    await draft.start(host, port)
    try:
        loading = asyncio.create_task(draft.load())
        await _first(loading, signalled)
        if not loading.done():
            return 0  # told to end while loading
        spec = loading.result()
        log.info("serving %s at %s:%d", spec.model, host, draft.port)
        print("READY", json.dumps({"grpc": f"{host}:{draft.port}", "http": None}), flush=True)
        await _first(signalled, draft.failure)
        if draft.failure.done():
            log.critical("a step failed: this process's state is not to be trusted")
            return 1
        return 0
    finally:
        signalled.cancel()
        await draft.stop()


async def _first(*ends: asyncio.Future[Any]) -> None:
    """Waits for the first of them, whatever it brings."""
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
