"""An end of a channel that stands still is lost within seconds, to the other end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

from slipstream import channels
from slipstream.channels import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS

LIMIT_S = (KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / 1e3 + 3

SERVER = """
import asyncio
import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio
from slipstream import channels

async def main():
    server = grpc.aio.server(options=channels.server_options())
    health_pb2_grpc.add_HealthServicer_to_server(aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""

CLIENT = """
import asyncio, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slipstream import channels

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1], options=channels.client_options()) as channel:
        async for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            print("watches", flush=True)

asyncio.run(main())
"""


@asynccontextmanager
async def child(code: str, *args: str) -> AsyncIterator[tuple[int, str]]:
    """A process of its own: its number and the first line that it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *args, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield process.pid, line.decode().strip()
    finally:
        process.kill()
        await process.wait()


class Watched(aio.HealthServicer):
    """Says when its client is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = asyncio.Event()

    async def Watch(self, request: object, context: grpc.aio.ServicerContext) -> None:
        try:
            await super().Watch(request, context)
        finally:
            self.lost.set()


async def server_stands_still() -> float:
    """Seconds until the client has lost it."""
    async with child(SERVER) as (pid, port):
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address, options=channels.client_options()) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(watch.read(), 3 * LIMIT_S)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            return time.monotonic() - began


async def client_stands_still() -> float:
    """Seconds until the server has lost it."""
    server = grpc.aio.server(options=channels.server_options())
    watched = Watched()
    health_pb2_grpc.add_HealthServicer_to_server(watched, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with child(CLIENT, f"127.0.0.1:{port}") as (pid, said):
            assert said == "watches"
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            await asyncio.wait_for(watched.lost.wait(), 3 * LIMIT_S)
            return time.monotonic() - began
    finally:
        await server.stop(None)


async def test_an_end_that_stands_still_is_lost() -> None:
    seconds = await asyncio.gather(server_stands_still(), client_stands_still())
    assert max(seconds) < LIMIT_S, seconds
