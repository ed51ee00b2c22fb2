"""gRPC channel and server options, in one place so that both ends agree and no name is misspelt.

gRPC ignores unknown arguments silently; `options` refuses a name that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_MESSAGE = 16 << 20  # bytes; frames are at most 1 MiB, an Admit of a long prompt is larger
KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 3_000
"""Without an answer for so long the other end is lost. Two timers of gRPC count it, and the one of
its pings is a minute by default."""

_KNOWN = frozenset(
    {
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.max_pings_without_data",
        "grpc.http2.ping_timeout_ms",
        "grpc.http2.min_recv_ping_interval_without_data_ms",
        "grpc.http2.max_ping_strikes",
        "grpc.max_send_message_length",
        "grpc.max_receive_message_length",
        "grpc.so_reuseport",
        "grpc.enable_http_proxy",
        "grpc.initial_reconnect_backoff_ms",
        "grpc.max_reconnect_backoff_ms",
        "grpc.min_reconnect_backoff_ms",
        "grpc.optimization_target",
    }
)

Option = tuple[str, int | str]


def options(values: Mapping[str, int | str]) -> list[Option]:
    """`values` as gRPC takes them. Raises ValueError on a name that is not known."""
    for name in values:
        if name not in _KNOWN:
            raise ValueError(f"unknown channel argument {name!r}")
    return list(values.items())


_BOTH_ENDS: dict[str, int | str] = {
    "grpc.keepalive_time_ms": KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.http2.ping_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_send_message_length": MAX_MESSAGE,
    "grpc.max_receive_message_length": MAX_MESSAGE,
}
"""Each end loses a frozen other one after 5 s."""


def client_options() -> list[Option]:
    """For channels between our own processes: no proxy, fast reconnects."""
    return options(
        _BOTH_ENDS
        | {
            "grpc.enable_http_proxy": 0,
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.min_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 1_000,
        }
    )


def server_options() -> list[Option]:
    """For our servers: permits the clients' keepalive and never shares a port."""
    return options(
        _BOTH_ENDS
        | {
            "grpc.http2.min_recv_ping_interval_without_data_ms": 500,
            "grpc.http2.max_ping_strikes": 0,
            "grpc.so_reuseport": 0,
        }
    )
