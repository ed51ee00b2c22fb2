"""What every gRPC server of Slipstream has: health, reflection, one error mapping, a drain."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from slipstream import channels, reflection
from slipstream.errors import ConfigError, InvalidRequest, SlipstreamError, describe

log = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_S = 0.0005
"""Longest time that a thread which computes in Python keeps the interpreter from the others."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a server process's coroutine on uvloop, its engine threads beside it."""
    import uvloop

    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns our errors into gRPC statuses by the table of `slipstream.errors`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.response_streaming:
            return _wrap_streaming(handler)
        return handler


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """`deserialize`, but returning what is wrong with a message that cannot be read.

    gRPC answers a deserializer that raises with UNKNOWN and logs a traceback, as if the server had
    failed.
    """
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return InvalidRequest(f"the request is not a valid message: {error}")

    return read


def _wrap_streaming(handler: Any) -> Any:
    inner = handler.stream_stream or handler.unary_stream

    async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            async for response in inner(request, context):
                yield response
        except SlipstreamError as error:
            await context.abort(describe(error).grpc, str(error))

    async def write(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            await inner(request, context)
        except SlipstreamError as error:
            await context.abort(describe(error).grpc, str(error))

    # grpc.aio lets a method yield its responses or write them; the health service's Watch writes.
    behave = generate if inspect.isasyncgenfunction(inner) else write
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.request_streaming
        else grpc.unary_stream_rpc_method_handler
    )
    return make(
        behave,
        request_deserializer=_lenient(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


class Server:
    """A grpc.aio server with health (NOT_SERVING until `ready`) and reflection.

    Attributes:
        port: the bound port, known after `start`.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = tuple(service_names)
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=channels.server_options()
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable((*self._names, health.SERVICE_NAME), self.grpc)
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Binds and serves. Raises ConfigError naming the address when it cannot be bound."""
        try:
            self.port = self.grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        if self.port == 0:
            raise ConfigError(f"cannot listen on {host}:{port}: the address is in use or not ours")
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()
        return self.port

    async def ready(self, serving: bool = True) -> None:
        """Sets the health of every service, and of the server as a whole."""
        status = health_pb2.HealthCheckResponse
        await self._set(status.SERVING if serving else status.NOT_SERVING)

    async def _set(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Says NOT_SERVING, lets running calls end for `grace` seconds, then closes."""
        await self.ready(False)
        await self.grpc.stop(grace)


async def wait_for_signal() -> int:
    """Returns the first SIGINT or SIGTERM; a second one exits the process at once."""
    loop = asyncio.get_running_loop()
    got: asyncio.Future[int] = loop.create_future()

    def first(number: int) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)
            signal.signal(name, signal.SIG_DFL)
        if not got.done():
            got.set_result(number)

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, first, name)
    return await got
