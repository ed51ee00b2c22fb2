"""The gRPC door through a real channel: answers, errors, health, calls that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.request import GenerateParams
from slipstream.errors import EngineFailed, PeerLost, SlipstreamError
from slipstream.v1 import gateway_pb2 as pb
from slipstream.v1 import gateway_pb2_grpc as rpc
from tests.fakes.front import Stage, said, stage
from tests.fakes.scheduler import noise_script

pytestmark = pytest.mark.anyio

TEXT = "Hello, wörld! 😀 漢字: the end."
SERVICE = "slipstream.v1.GatewayService"


@asynccontextmanager
async def channel(s: Stage) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(s.front.grpc, options=options) as made:
        yield made


async def generate(s: Stage, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with channel(s) as made:
        return [message async for message in rpc.GatewayServiceStub(made).Generate(request)]


async def until(condition, seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("kind", ["text", "token_ids"])
async def test_an_answer(tmp_path: Path, kind: str) -> None:
    async with stage(tmp_path, TEXT) as s:
        ids = said(s.tokenizer, "once upon", end=False)
        prompt = {"text": "once upon"} if kind == "text" else {"token_ids": pb.TokenIds(ids=ids)}
        messages = await generate(
            s, pb.GenerateRequest(max_tokens=100, model="fake-model", **prompt)
        )
        assert s.scheduler.submitted[0].prompt_ids == tuple(ids)
        assert "".join(message.text for message in messages) == TEXT
        assert not any("\ufffd" in message.text for message in messages)
        expected = said(s.tokenizer, TEXT)
        assert [token for message in messages for token in message.token_ids] == expected
        *running, last = messages
        assert {message.finish_reason for message in running} == {""}
        assert not any(message.HasField("usage") for message in running)
        assert last.finish_reason == "stop"
        assert last.usage == pb.Usage(prompt_tokens=len(ids), completion_tokens=len(expected))
        assert not last.HasField("speculative")


async def test_choices_and_statistics(tmp_path: Path) -> None:
    def script(params: GenerateParams) -> Sequence[int]:
        return [20 + params.choice] * (4 + 3 * params.choice)

    async with stage(tmp_path, script=script, per_step=3) as s:
        request = pb.GenerateRequest(text="x", n=2, speculative=pb.Speculative(stats=True))
        messages = await generate(s, request)
        for index in range(2):
            mine = [message for message in messages if message.index == index]
            tokens = [token for message in mine for token in message.token_ids]
            assert tokens == [20 + index] * (4 + 3 * index)
            assert mine[-1].usage.completion_tokens == len(tokens)
            stats = mine[-1].speculative
            assert (stats.steps, stats.tau) == (1 + index, 3.0)
            assert list(stats.accepted) == [2] * stats.steps
            assert list(stats.nodes) == [3] * stats.steps
        request = pb.GenerateRequest(text="x", speculative=pb.Speculative(enabled=False))
        await generate(s, request)
        assert not s.scheduler.submitted[-1].draft


async def test_stop_strings(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT * 9, per_step=7) as s:
        messages = await generate(s, pb.GenerateRequest(text="x", stop=["the end"], max_tokens=200))
        assert "".join(message.text for message in messages) == TEXT[: TEXT.index("the end")]
        assert messages[-1].finish_reason == "stop"
        await until(lambda: s.scheduler.running == 0)
        assert s.scheduler.cancelled == [1]


@pytest.mark.parametrize("data", [b"\x12\x02\xff\xfe", b"\xff\xff\xff"], ids=["utf8", "wire"])
async def test_bytes_that_are_no_message(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(tmp_path, TEXT) as s, channel(s) as made:
        call = made.unary_stream(f"/{SERVICE}/Generate")
        with pytest.raises(grpc.aio.AioRpcError, match="not a valid message") as caught:
            [message async for message in call(data)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not caplog.records
        assert (await generate(s, pb.GenerateRequest(text="x", max_tokens=1)))[-1].finish_reason


BAD_REQUESTS = [
    (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt: must not be"),
    (
        pb.GenerateRequest(text="x", temperature=-3),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature: .*-3",
    ),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 320])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "token 320",
    ),
    (
        pb.GenerateRequest(text="y" * 600),
        grpc.StatusCode.INVALID_ARGUMENT,
        "maximum context length is 512 tokens",
    ),
    (pb.GenerateRequest(text="x", model="gpt"), grpc.StatusCode.NOT_FOUND, "gpt"),
    (pb.GenerateRequest(text="x", n=3), grpc.StatusCode.RESOURCE_EXHAUSTED, "wait already"),
]


async def test_errors(tmp_path: Path) -> None:
    # Steps so slow that two choices still run when the third is given.
    async with stage(tmp_path, max_running=2, step_s=0.1) as s:
        for request, code, details in BAD_REQUESTS:
            with pytest.raises(grpc.aio.AioRpcError, match=details) as caught:
                await generate(s, request)
            assert caught.value.code() == code
            await until(lambda: s.scheduler.running == 0)
        assert (await generate(s, pb.GenerateRequest(text="x")))[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("after", "error", "code"),
    [
        (0, PeerLost("the target is gone"), grpc.StatusCode.UNAVAILABLE),
        (4, EngineFailed("a step failed"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_errors_while_running(
    tmp_path: Path, after: int, error: SlipstreamError, code: grpc.StatusCode
) -> None:
    async with stage(tmp_path, TEXT) as s, channel(s) as made:
        s.scheduler.fail_after = (after, error)
        texts = []
        with pytest.raises(grpc.aio.AioRpcError, match=str(error)) as caught:
            async for message in rpc.GatewayServiceStub(made).Generate(
                pb.GenerateRequest(text="x")
            ):
                texts.append(message.text)
        assert caught.value.code() == code
        given = said(s.tokenizer, TEXT)[:after]
        assert "".join(texts) == s.tokenizer.decode(given)


@pytest.mark.parametrize("read", [0, 3])
async def test_a_cancelled_call_cancels_the_request(tmp_path: Path, read: int) -> None:
    options = {"script": noise_script(10, 320), "max_model_len": 100_000}
    async with stage(tmp_path, **options) as s, channel(s) as made:
        request = pb.GenerateRequest(text="x", n=2, max_tokens=90_000)
        call = rpc.GatewayServiceStub(made).Generate(request)
        for _ in range(read):
            await call.read()
        await until(lambda: s.scheduler.running == 2)
        call.cancel()
        await until(lambda: s.scheduler.running == 0)
        assert sorted(s.scheduler.cancelled) == [1, 2]
        text = (await s.http.get("/metrics")).text
        assert 'requests_total{endpoint="generate",status="CANCELLED"} 1.0' in text


async def test_a_dropped_channel_cancels_the_request(tmp_path: Path) -> None:
    options = {"script": noise_script(10, 320), "max_model_len": 100_000}
    async with stage(tmp_path, **options) as s:
        async with channel(s) as made:
            call = rpc.GatewayServiceStub(made).Generate(
                pb.GenerateRequest(text="x", max_tokens=90_000)
            )
            await call.read()
        await until(lambda: s.scheduler.running == 0)


async def test_health_follows_the_service(tmp_path: Path) -> None:
    status = health_pb2.HealthCheckResponse
    async with stage(tmp_path, ready=False) as s, channel(s) as made:
        stub = health_pb2_grpc.HealthStub(made)

        async def health(name: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

        assert await health(SERVICE) == await health("") == status.NOT_SERVING
        follow = asyncio.create_task(s.front.follow_health())
        for wanted, change in (
            (status.SERVING, lambda: setattr(s.scheduler, "ready", True)),
            (status.NOT_SERVING, lambda: setattr(s.scheduler, "ready", False)),
            (status.SERVING, lambda: setattr(s.scheduler, "ready", True)),
            (status.NOT_SERVING, lambda: setattr(s.front.service, "draining", True)),
        ):
            change()
            async with asyncio.timeout(2):
                while await health(SERVICE) != wanted:  # noqa: ASYNC110 - nothing to wait on
                    await asyncio.sleep(0.01)
        follow.cancel()


async def test_reflection_names_the_service(tmp_path: Path) -> None:
    async with stage(tmp_path) as s, channel(s) as made:
        stub = reflection_pb2_grpc.ServerReflectionStub(made)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in response.list_services_response.service}
            assert {SERVICE, "grpc.health.v1.Health"} <= names
