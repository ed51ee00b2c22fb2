"""`python health.py HOST:PORT`: exit status 0 when the gRPC server there says SERVING.

The images' health check. It asks grpc.health.v1 for the server as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def status(address: str) -> str:
    """The status' name, or the reason why there is none."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: Sequence[str]) -> int:
    """Prints the status; Docker keeps what a health check prints."""
    if len(argv) != 1:
        print("usage: python health.py HOST:PORT", file=sys.stderr)
        return 2
    found = status(argv[0])
    print(found)
    return 0 if found == "SERVING" else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
