"""Reflection as ghz and grpcurl use it, in both of its versions, on a server with imports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2 as pb

from slipstream import reflection
from slipstream.serving import Server
from slipstream.v1 import draft_pb2, gateway_pb2, handoff_pb2, target_pb2

pytestmark = pytest.mark.anyio

SERVICES = [
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (gateway_pb2, "GatewayService"),
        (target_pb2, "TargetService"),
        (draft_pb2, "DraftService"),
        (handoff_pb2, "HandoffService"),
    )
]
HEALTH = "grpc.health.v1.Health"
VERSIONS = (reflection.V1, reflection.V1ALPHA)


class Client:
    """One reflection stream at a time, as a generated stub would call it."""

    def __init__(self, channel: grpc.aio.Channel, version: str) -> None:
        self._call = channel.stream_stream(
            f"/{version}/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )

    async def ask(self, **request: object) -> pb.ServerReflectionResponse:
        # To its end: what is left of a call would come when the test's loop is closed.
        call = self._call(iter([pb.ServerReflectionRequest(**request)]))
        (response,) = [response async for response in call]
        return response

    async def files(self, **request: object) -> list[descriptor_pb2.FileDescriptorProto]:
        response = await self.ask(**request)
        assert response.WhichOneof("message_response") == "file_descriptor_response", response
        return [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in response.file_descriptor_response.file_descriptor_proto
        ]


@asynccontextmanager
async def client(version: str) -> AsyncIterator[Client]:
    server = Server(SERVICES)
    port = await server.start("127.0.0.1", 0)
    options = [("grpc.enable_http_proxy", 0)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield Client(channel, version)
    finally:
        await server.stop(0)


async def load(asked: Client, symbol: str) -> descriptor_pool.DescriptorPool:
    """Builds what `symbol` needs in an empty pool, fetching imports by name as ghz does."""
    pool = descriptor_pool.DescriptorPool()
    known: set[str] = set()

    async def add(file: descriptor_pb2.FileDescriptorProto) -> None:
        if file.name in known:
            return
        known.add(file.name)
        for name in file.dependency:
            await add((await asked.files(file_by_filename=name))[0])
        pool.AddSerializedFile(file.SerializeToString())

    await add((await asked.files(file_containing_symbol=symbol))[0])
    return pool


@pytest.mark.parametrize("version", VERSIONS)
async def test_services_are_listed(version: str) -> None:
    async with client(version) as asked:
        listed = (await asked.ask(list_services="")).list_services_response.service
        assert {service.name for service in listed} == {*SERVICES, HEALTH, *VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_listed_service_is_described(version: str) -> None:
    async with client(version) as asked:
        for service in (*SERVICES, HEALTH, *VERSIONS):
            found = (await load(asked, service)).FindServiceByName(service)
            for method in found.methods:
                by_method = await load(asked, method.full_name)
                same = by_method.FindServiceByName(service).methods_by_name[method.name]
                assert same.input_type.full_name == method.input_type.full_name
                assert same.output_type.full_name == method.output_type.full_name


@pytest.mark.parametrize("version", VERSIONS)
async def test_imports_come_along(version: str) -> None:
    async with client(version) as asked:
        files = await asked.files(file_containing_symbol="slipstream.v1.TargetService.Run")
        assert [file.name for file in files] == [
            "slipstream/v1/target.proto",
            "slipstream/v1/common.proto",
        ]


@pytest.mark.parametrize("version", VERSIONS)
async def test_other_symbols(version: str) -> None:
    async with client(version) as asked:
        for symbol in ("slipstream.v1.GenerateRequest", "slipstream.v1.GenerateRequest.text"):
            file, *imported = await asked.files(file_containing_symbol=symbol)
            assert file.name == "slipstream/v1/gateway.proto"
            assert [each.name for each in imported] == ["slipstream/v1/common.proto"]
        for wrong in (
            {"file_containing_symbol": "slipstream.v1.GatewayService.Degenerate"},
            {"file_containing_symbol": "slipstream.v1.Nothing"},
            {"file_containing_symbol": "nothing"},
            {"file_containing_symbol": ""},
            {"file_by_filename": "slipstream/v1/nothing.proto"},
        ):
            error = (await asked.ask(**wrong)).error_response
            assert error.error_code == grpc.StatusCode.NOT_FOUND.value[0], wrong
