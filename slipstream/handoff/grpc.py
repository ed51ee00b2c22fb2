"""Sessions between a target and a draft: a stream each, opened by the target, served by the draft.

The stream greets; then it carries the messages (the `grpc` transport), or, where both sides reach
the same device memory (`cuda_ipc`), only the end.
"""

from slipstream.handoff.acceptor import GrpcAcceptor
from slipstream.handoff.connector import GrpcConnector
from slipstream.handoff.grpc_ends import GrpcDraftEnd, GrpcTargetEnd

__all__ = ["GrpcAcceptor", "GrpcConnector", "GrpcDraftEnd", "GrpcTargetEnd"]
