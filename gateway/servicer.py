"""The gRPC door: GatewayService over the same service, schemas and errors as REST."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio

from gateway.generation import Choice, Delta, Generation, Usage
from gateway.request import TokenLogprob
from gateway.schemas import CompletionBody, validate
from gateway.service import Service
from gateway.stream import Piece
from slipstream.errors import InvalidRequest, RequestError, SlipstreamError, describe
from slipstream.grammar import Grammar, GrammarKind
from slipstream.v1 import gateway_pb2 as pb
from slipstream.v1 import gateway_pb2_grpc as rpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GatewayService"].full_name

_ENDPOINT = "generate"
_CONVERTED = ("model", "text", "token_ids", "grammar")
"""Fields that are not named and typed as REST's."""

_OF_GRAMMAR = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice")


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
            body = decode(request)
            generation = await self._service.completion(body)
            with generation:
                # The call's end is seen here even while nobody asks for the next message.
                context.add_done_callback(lambda _: generation.cancel())
                while deltas := await generation.next():
                    for delta in deltas:
                        yield encode(body, generation, delta)
                if generation.finished:
                    status = grpc.StatusCode.OK
        except SlipstreamError as error:
            status = describe(error).grpc
            if isinstance(error, RequestError) and request.HasField("grammar"):
                _name_grammar(error)
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
    data = {
        field.name: value for field, value in request.ListFields() if field.name not in _CONVERTED
    }
    data["prompt"] = request.text if kind == "text" else list(request.token_ids.ids)
    data["model"] = request.model or None
    for name in ("stop", "stop_token_ids", "bad_words"):
        data[name] = list(getattr(request, name))
    data["logit_bias"] = dict(request.logit_bias)
    wanted = request.speculative
    if request.HasField("grammar"):
        data |= _binding(Grammar.from_proto(request.grammar))
    data["speculative"] = {field.name: value for field, value in wanted.ListFields()}
    return validate(CompletionBody, data)


def _name_grammar(error: RequestError) -> None:
    """Puts the client's field where `error` names REST's."""
    text = str(error)
    for name in _OF_GRAMMAR:
        text = text.replace(name, "grammar")
        if error.param == name:
            error.param = "grammar"
    error.args = (text,)


def _binding(grammar: Grammar) -> dict[str, Any]:
    """REST's field that says the same."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case GrammarKind.JSON_SCHEMA:
            return {"guided_json": grammar.text}
        case GrammarKind.REGEX:
            return {"guided_regex": grammar.text}
        case GrammarKind.LARK:
            return {"guided_grammar": grammar.text}
        case GrammarKind.CHOICE:
            try:
                return {"guided_choice": json.loads(grammar.text)}
            except (ValueError, RecursionError) as error:
                message = f"grammar.text: must be a JSON array of strings ({error})"
                raise InvalidRequest(message, "grammar.text") from error
    raise InvalidRequest("grammar.kind: of no kind that is known", "grammar.kind")


def encode(body: CompletionBody, generation: Generation, delta: Delta) -> pb.GenerateResponse:
    """One piece; a choice's first one carries what is told of its prompt, its last one the usage
    and, if asked for, the statistics."""
    choice, piece = delta
    message = pb.GenerateResponse(index=choice.index, text=piece.text, token_ids=piece.tokens)
    if piece.scored:
        _fill_logprobs(message, piece)
    if piece.first:
        _fill_prompt(message, body, choice)
    if piece.finish is not None:
        message.finish_reason = piece.finish
        message.usage.CopyFrom(_usage(generation.usage(choice)))
        if isinstance(choice.stop, str):
            message.stop_string = choice.stop
        elif choice.stop is not None:
            message.stop_token_id = choice.stop
        if generation.wishes.stats:
            stats = choice.stats
            message.speculative.CopyFrom(
                pb.SpeculativeStats(
                    steps=stats.steps, tau=stats.tau, accepted=stats.accepted, nodes=stats.nodes
                )
            )
    return message


def _fill_logprobs(message: pb.GenerateResponse, piece: Piece) -> None:
    # An echoed prompt has rows too; it is told by `prompt_logprobs`.
    rows = piece.scored[len(piece.scored) - len(piece.tokens) :]
    message.logprobs.extend(_logprob(token, row) for token, _, row in rows)


def _fill_prompt(message: pb.GenerateResponse, body: CompletionBody, choice: Choice) -> None:
    ids = choice.prompt.ids
    if body.return_token_ids:
        message.prompt_token_ids.extend(ids)
    if body.prompt_scores is not None:
        rows: Iterable[TokenLogprob | None] = (None, *choice.prompt_logprobs)
        message.prompt_logprobs.extend(map(_logprob, ids, rows))


def _logprob(token: int, row: TokenLogprob | None) -> pb.TokenLogprob:
    if row is None:
        return pb.TokenLogprob(token=token)
    return pb.TokenLogprob(
        token=token,
        logprob=row.logprob,
        top_ids=[other for other, _ in row.top],
        top_logprobs=[value for _, value in row.top],
    )


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
