"""Answers that a grammar binds and cannot go on: a clean error that names the client's field.

Both doors, the real scheduler, and the fake servers behind real streams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from gateway.checkpoint import Checkpoint
from gateway.scheduler import Scheduler
from gateway.server import Front
from gateway.settings import GatewaySettings
from slipstream.v1 import common_pb2, gateway_pb2
from slipstream.v1 import gateway_pb2_grpc as rpc
from tests.contract.test_cell_contract import Cell
from tests.fakes.draft import FakeDraftRunner
from tests.fakes.front import CHAT, events
from tests.fakes.target import FakeTargetRunner
from tests.tiny import EOS, make_tokenizer

pytestmark = pytest.mark.anyio

VOCAB = 320
WEATHER = {"type": "function", "function": {"name": "weather"}}


@asynccontextmanager
async def served(folder: Path, dead_end: int) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    """A gateway whose target finds no token for a grammar after `dead_end` tokens."""
    make_tokenizer(folder)
    target = FakeTargetRunner(vocab=VOCAB, eos_ids=(EOS,), grammars=True, paranoid=False)
    target.dead_end = dead_end
    with Cell(target, FakeDraftRunner(vocab=VOCAB, slots=8, accept=0.5)) as cell:
        settings = GatewaySettings(target=cell.target, draft=cell.draft, port=0)
        front = Front(
            settings,
            Checkpoint.load(folder),
            lambda deliver: Scheduler(settings.scheduler(), deliver),
        )
        await front.start()
        try:
            await front.until_ready()
            url = f"http://{front.http}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
                yield front, http
        finally:
            await front.stop(0.0)


BOUND: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "once", "guided_regex": "[a-z]+"}, "guided_regex"),
    (
        "/v1/completions",
        {"prompt": "once", "structured_outputs": {"choice": ["yes", "no"]}},
        "structured_outputs.choice",
    ),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}},
     "response_format"),
    ("/v1/chat/completions", CHAT | {"tools": [WEATHER], "tool_choice": "required"},
     "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BOUND)
async def test_a_dead_end_names_the_field(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    body = body | {"max_tokens": 40, "ignore_eos": True}
    async with served(tmp_path, dead_end=6) as (_, http):
        whole = await http.post(path, json=body)
        assert whole.status_code == 400
        error = whole.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["code"] == "grammar_dead_end"
        assert error["message"].startswith(f"{param}: after ")
        assert "bad_words" not in error["message"]
        stream = await http.post(path, json=body | {"stream": True})
        assert stream.status_code == 200  # the answer had begun
        *chunks, last = events(stream.text)
        assert chunks and last == {"error": error}
        banned = await http.post(path, json=body | {"bad_words": ["q"]})
        assert "bad_words" in banned.json()["error"]["message"]
        # The server is well: the same without a grammar.
        plain = {name: body[name] for name in ("prompt", "messages", "max_tokens") if name in body}
        assert (await http.post(path, json=plain)).status_code == 200
        assert 'status="400"' in (await http.get("/metrics")).text


async def test_a_dead_end_before_the_first_chunk_is_a_status(tmp_path: Path) -> None:
    async with served(tmp_path, dead_end=0) as (_, http):
        for stream in (False, True):
            body = {"prompt": [7], "guided_regex": "[a-z]+", "stop": ["\x01" * 9], "stream": stream}
            response = await http.post("/v1/completions", json=body | {"max_tokens": 9})
            if response.status_code == 200:  # prefill's token came first
                assert events(response.text)[-1]["error"]["param"] == "guided_regex"
            else:
                assert response.json()["error"]["param"] == "guided_regex"


async def test_bans_against_a_choice_are_refused_before_it_runs(tmp_path: Path) -> None:
    async with served(tmp_path, dead_end=0) as (_, http):
        body = {"prompt": "once", "guided_choice": ["z"], "bad_words": ["z"], "max_tokens": 9}
        for stream in (False, True):
            response = await http.post("/v1/completions", json=body | {"stream": stream})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("bad_words", None)
            assert "guided_choice" in error["message"]


async def test_a_dead_end_over_grpc(tmp_path: Path) -> None:
    async with (
        served(tmp_path, dead_end=4) as (front, _),
        grpc.aio.insecure_channel(front.grpc) as channel,
    ):
        regex = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="[a-z]+")
        request = gateway_pb2.GenerateRequest(
            text="once", grammar=regex, max_tokens=40, ignore_eos=True
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [piece async for piece in rpc.GatewayServiceStub(channel).Generate(request)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(caught.value.details()).startswith("grammar: after ")
