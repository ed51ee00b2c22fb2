"""Every error that crosses a process border, and the one table that says what it is on each side.

SlipstreamError
├── RequestError            the client's fault
│   ├── InvalidRequest      a field holds a value that cannot be served
│   ├── ContextTooLong      prompt and answer do not fit the model's window
│   ├── GrammarDeadEnd      no token may follow that the request's grammar and bans allow
│   ├── NotFound            no such model or path
│   └── QueueFull           too many waiting requests: try again later
├── ConfigError             the operator's fault: a flag, a file, a checkpoint
│   └── PairError           target and draft do not fit each other
├── PeerError               another process's fault
│   ├── PeerLost            it is gone or silent
│   ├── CellBusy            another gateway holds it
│   └── ProtocolError       it said something that the protocol does not allow
├── Draining                this process is shutting down
└── EngineFailed            our own fault
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc


class SlipstreamError(Exception):
    """Base of all errors that are reported to another process or a person."""


class RequestError(SlipstreamError):
    """The request cannot be served as it stands; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field holds a value that cannot be served."""


class ContextTooLong(RequestError):
    """Prompt and answer do not fit the model's window."""


class GrammarDeadEnd(RequestError):
    """No token may follow that the request's grammar and bans allow."""


class NotFound(RequestError):
    """No such model or path."""


class QueueFull(RequestError):
    """Too many requests wait; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConfigError(SlipstreamError):
    """A flag, a file or a checkpoint is not usable; the message names it and the bad value."""


class PairError(ConfigError):
    """Target and draft do not fit each other; the message names both values."""


class PeerError(SlipstreamError):
    """Another process failed."""


class PeerLost(PeerError):
    """The other process is gone or silent."""


class CellBusy(PeerError):
    """Another gateway holds this server."""


class ProtocolError(PeerError):
    """The other process said something that the protocol does not allow."""


class Draining(SlipstreamError):
    """This process is shutting down and takes nothing new."""


class EngineFailed(SlipstreamError):
    """A step raised; the process's state is not to be trusted."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """How an error looks from outside: gRPC status, HTTP status, and OpenAI's `type` and `code`."""

    grpc: grpc.StatusCode
    http: int
    type: str
    code: str | None = None


_TABLE: dict[type[SlipstreamError], Mapping] = {
    ContextTooLong: Mapping(
        grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"
    ),
    GrammarDeadEnd: Mapping(
        grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", "grammar_dead_end"
    ),
    NotFound: Mapping(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "model_not_found"),
    QueueFull: Mapping(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "queue_full"),
    InvalidRequest: Mapping(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    RequestError: Mapping(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    PairError: Mapping(grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error", "pair_mismatch"),
    ConfigError: Mapping(grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    CellBusy: Mapping(grpc.StatusCode.ALREADY_EXISTS, 503, "server_error", "cell_busy"),
    ProtocolError: Mapping(grpc.StatusCode.INVALID_ARGUMENT, 502, "server_error", "protocol"),
    PeerLost: Mapping(grpc.StatusCode.UNAVAILABLE, 503, "server_error", "backend_unavailable"),
    PeerError: Mapping(grpc.StatusCode.UNAVAILABLE, 503, "server_error", "backend_unavailable"),
    Draining: Mapping(grpc.StatusCode.UNAVAILABLE, 503, "server_error", "draining"),
    EngineFailed: Mapping(grpc.StatusCode.INTERNAL, 500, "server_error", "engine_failed"),
}
_UNKNOWN = Mapping(grpc.StatusCode.INTERNAL, 500, "server_error")


def describe(error: BaseException) -> Mapping:
    """The outside view of `error`: the entry of its nearest class in the table."""
    for cls in type(error).__mro__:
        if cls in _TABLE:
            return _TABLE[cls]
    return _UNKNOWN
