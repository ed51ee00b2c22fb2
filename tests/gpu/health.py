"""A gRPC server of this process that says that it is healthy, asked by a client of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.serving import Server


@contextmanager
def health() -> Iterator[Callable[[], bool]]:
    """A call that asks, and says whether the answer was SERVING."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> Server:
        server = Server(["slipstream.v1.TargetService"])
        await server.start("127.0.0.1", 0)
        await server.ready()
        return server

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    stub = health_pb2_grpc.HealthStub(channel)

    def ask() -> bool:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    try:
        assert ask()  # the channel is up
        yield ask
    finally:
        channel.close()
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
