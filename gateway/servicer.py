"""The gRPC door: GatewayService over the same service, schemas and errors as REST."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from gateway.generation import Delta, Generation, Usage
from gateway.schemas import CompletionBody, validate
from gateway.service import Service
from slipstream.errors import InvalidRequest, SlipstreamError, describe
from slipstream.v1 import gateway_pb2 as pb
from slipstream.v1 import gateway_pb2_grpc as rpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GatewayService"].full_name

_ENDPOINT = "generate"
_PLAIN_FIELDS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "n")


class GatewayServicer(rpc.GatewayServiceServicer):
    """Decodes, calls the service, encodes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the pieces of every choice. Ending the call ends the request."""
        status = grpc.StatusCode.CANCELLED
        try:
            generation = await self._service.completion(decode(request))
            with generation:
                # The call's end is seen here even while nobody asks for the next message.
                context.add_done_callback(lambda _: generation.cancel())
                while deltas := await generation.next():
                    for delta in deltas:
                        yield encode(generation, delta)
                if generation.finished:
                    status = grpc.StatusCode.OK
        except SlipstreamError as error:
            status = describe(error).grpc
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            status = grpc.StatusCode.INTERNAL
            raise
        finally:
            self._service.metrics.requests.add(1, _ENDPOINT, status.name)


def decode(request: pb.GenerateRequest) -> CompletionBody:
    """The request as REST's body. Raises InvalidRequest naming the field."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt: text or token_ids is required", "prompt")
    data: dict[str, Any] = {
        field.name: value for field, value in request.ListFields() if field.name in _PLAIN_FIELDS
    }
    data["prompt"] = request.text if kind == "text" else list(request.token_ids.ids)
    data["model"] = request.model or None
    data["stop"] = list(request.stop)
    data["stop_token_ids"] = list(request.stop_token_ids)
    data["ignore_eos"] = request.ignore_eos
    data["speculative"] = {"stats": request.speculative.stats}
    if request.speculative.HasField("enabled"):
        data["speculative"]["enabled"] = request.speculative.enabled
    return validate(CompletionBody, data)


def encode(generation: Generation, delta: Delta) -> pb.GenerateResponse:
    """One piece; a choice's last one carries its usage and, if asked for, its statistics."""
    choice, piece = delta
    message = pb.GenerateResponse(index=choice.index, text=piece.text, token_ids=piece.tokens)
    if piece.finish is not None:
        message.finish_reason = piece.finish
        message.usage.CopyFrom(_usage(generation.usage(choice)))
        if generation.want_stats:
            stats = choice.stats
            message.speculative.CopyFrom(
                pb.SpeculativeStats(
                    steps=stats.steps, tau=stats.tau, accepted=stats.accepted, nodes=stats.nodes
                )
            )
    return message


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
