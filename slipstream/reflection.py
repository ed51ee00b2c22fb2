"""Server reflection as clients written in Go, Java or C++ expect it.

grpcio-reflection serves `grpc.reflection.v1alpha` only, and asks protobuf's descriptor pool for the
file of a symbol. The pool (upb) knows services, messages and their fields, but not the methods of a
service, though the protocol's `file_containing_symbol` takes `<package>.<service>[.<method>]`: ghz
asks by the method's name and was told that there is no such symbol. Here methods are found, and
`grpc.reflection.v1`, whose messages are the same on the wire, is served too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


class Symbols:
    """Descriptors by name: a descriptor pool, as far as a reflection servicer uses one.

    Looks in the pools in their order; extensions are looked for in the first.
    """

    def __init__(self, pools: Sequence[Any]) -> None:
        self._pools = tuple(pools)

    def FindFileByName(self, name: str) -> Any:
        """The file of this name. Raises KeyError."""
        return self._first("FindFileByName", name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        """The file that defines a service, a method, a message, a field, an enum or an extension.

        Raises KeyError.
        """
        try:
            return self._first("FindFileContainingSymbol", name)
        except KeyError:
            service, _, method = name.rpartition(".")
            found = self._first("FindServiceByName", service)
            if method not in found.methods_by_name:
                raise
            return found.file

    def FindMessageTypeByName(self, name: str) -> Any:
        """The message type. Raises KeyError."""
        return self._first("FindMessageTypeByName", name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        """The extension of a message. Raises KeyError."""
        return self._pools[0].FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        """All extensions of a message."""
        return self._pools[0].FindAllExtensions(message)

    def _first(self, method: str, name: str) -> Any:
        for pool in self._pools[:-1]:
            try:
                return getattr(pool, method)(name)
            except KeyError:
                continue
        return getattr(self._pools[-1], method)(name)


def enable(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Adds both versions of the reflection service, which name themselves too."""
    names = (*service_names, V1ALPHA, V1)
    symbols = Symbols((descriptor_pool.Default(), _v1_pool()))
    servicer = reflection.aio.ReflectionServicer(names, pool=symbols)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (V1ALPHA, V1)
        )
    )


def _v1_pool() -> descriptor_pool.DescriptorPool:
    """A pool of its own with the description of `grpc.reflection.v1`: v1alpha's, renamed."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    package, file.package = file.package, V1.rpartition(".")[0]

    def renamed(name: str) -> str:
        return name.replace(f".{package}.", f".{file.package}.")

    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = renamed(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type = renamed(method.input_type)
            method.output_type = renamed(method.output_type)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
