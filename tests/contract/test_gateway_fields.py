"""What the fields of a request do on their way to the scheduler, and what the server tells."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.request import GenerateParams
from gateway.schemas import validate
from slipstream import __version__
from slipstream.errors import ConfigError
from slipstream.v1 import gateway_pb2 as pb
from tests.contract.test_gateway_grpc import generate
from tests.fakes.front import CHAT, PROMPT, TEXT, Stage, both, said, stage

pytestmark = pytest.mark.anyio

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
}


async def submitted(s: Stage, body: dict[str, Any], path: str) -> GenerateParams:
    response = await s.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return s.scheduler.submitted[-1]


async def test_every_sampling_field_reaches_the_scheduler(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        own = {"logit_bias": {"9": 2.5, "300": -100}, "seed": 5, "bad_words": ["z"]}
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            params = await submitted(s, body | SAMPLING | own, path)
            assert {name: getattr(params, name) for name in SAMPLING} == SAMPLING
            assert params.logit_bias == {9: 2.5, 300: -100.0}
            assert (params.seed, params.width, params.budget) == (5, None, None)
            assert params.banned_ids == tuple(said(s.tokenizer, "z", end=False))
        request = pb.GenerateRequest(
            text="x", logit_bias={9: 2.5, 300: -100}, bad_words=["z"], seed=5, **SAMPLING
        )
        await generate(s, request)
        last = s.scheduler.submitted[-1]
        assert {name: getattr(last, name) for name in SAMPLING} == SAMPLING
        assert (last.logit_bias, last.banned_ids) == (params.logit_bias, params.banned_ids)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_request_leaves_open_is_the_models(tmp_path: Path, path: str) -> None:
    recommended = {"temperature": 0.75, "top_k": 20, "repetition_penalty": 1.25, "top_p": None}
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps(recommended | {"do_sample": True, "max_new_tokens": 4}))
    body = PROMPT if path == "/v1/completions" else CHAT
    async with stage(tmp_path, "abc") as s:
        params = await submitted(s, body, path)
        assert (params.temperature, params.top_k, params.repetition_penalty) == (0.75, 20, 1.25)
        assert (params.top_p, params.min_p) == (1.0, 0.0)
        params = await submitted(s, body | {"temperature": 0, "top_k": -1}, path)
        assert (params.temperature, params.top_k, params.repetition_penalty) == (0, 0, 1.25)
    async with stage(tmp_path, "abc", recommended=False) as s:
        params = await submitted(s, body, path)
        assert (params.temperature, params.top_k, params.repetition_penalty) == (1.0, 0, 1.0)
    config.write_text(json.dumps({"top_p": 7}))
    with pytest.raises(ConfigError, match="generation_config.json: top_p: .*7"):
        async with stage(tmp_path, "abc"):
            pass


@pytest.mark.parametrize(
    ("word", "tokens"), [("z", ["z"]), (" z", None), ("zz", None), ("漢", None)]
)
async def test_bad_words_are_single_tokens(
    tmp_path: Path, word: str, tokens: list[str] | None
) -> None:
    async with stage(tmp_path, "abc") as s:
        response = await s.http.post("/v1/completions", json=PROMPT | {"bad_words": ["y", word]})
        if tokens is None:
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "bad_words[1]" and repr(word) in error["message"]
        else:
            banned = s.scheduler.submitted[-1].banned_ids
            assert {s.tokenizer.vocabulary.name(token) for token in banned} == {"y", *tokens}


async def test_unknown_fields_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.service")
    async with stage(tmp_path, "abc") as s:
        for _ in range(3):
            body = PROMPT | {"odd": 1, "speculative": {"rare": 2}, "x" * 99: 3, "store": True}
            assert (await s.http.post("/v1/completions", json=body)).status_code == 200
        text = (await s.http.get("/metrics")).text
        for name in ("odd", "speculative.rare", "x" * 64 + "..."):
            assert f'slipstream_unknown_request_fields_total{{field="{name}"}} 3.0' in text
        assert "store" not in text
        assert len([r for r in caplog.records if "unknown fields" in r.message]) == 3
        many = {f"field{i}": 1 for i in range(300)}
        await s.http.post("/v1/completions", json=PROMPT | many)
        text = (await s.http.get("/metrics")).text
        assert 'slipstream_unknown_request_fields_total{field="(others)"} 203.0' in text


async def test_a_name_that_nobody_has_is_not_said_in_full(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        long = "m" * 200_000
        for body in ({"model": long}, {"structured_outputs": {long: 1}}):
            refused = await s.http.post("/v1/completions", json={"prompt": "x"} | body)
            assert refused.status_code in (400, 404) and len(refused.content) < 1_000
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(s, pb.GenerateRequest(text="x", model=long))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_names_of_the_model(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc", served_names=["mine", "yours"]) as s:
        models = (await s.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [
            ("mine", 512),
            ("yours", 512),
        ]
        for asked, told in ((None, "mine"), ("", "mine"), ("yours", "yours")):
            response = await s.http.post("/v1/completions", json=PROMPT | {"model": asked})
            assert response.json()["model"] == told
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            body = PROMPT | {"model": "fake-model", "tokens": [5]}
            response = await s.http.post(path, json=body)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
            assert "'fake-model' does not exist" in response.json()["error"]["message"]


async def test_the_default_limits(tmp_path: Path) -> None:
    async with stage(tmp_path, "ab" * 200, end=False, max_model_len=100) as s:
        assert (await submitted(s, {"prompt": [5]}, "/v1/completions")).max_tokens == 16
        chat = await submitted(s, CHAT, "/v1/chat/completions")
        assert chat.max_tokens == 100 - len(chat.prompt_ids)
        response = await s.http.post("/v1/completions", json={"prompt": [5] * 100})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 100 tokens" in error["message"]
        body = {"prompt": [5] * 100, "echo": True, "max_tokens": 0, "logprobs": 1}
        whole = await both(s.http, "/v1/completions", body)
        assert whole["usage"]["total_tokens"] == 100
        body = {"prompt": [5], "max_tokens": 0}
        assert (await s.http.post("/v1/completions", json=body)).status_code == 400


async def test_special_tokens_are_shown_when_asked_for(tmp_path: Path) -> None:
    def script(params: GenerateParams) -> list[int]:
        return [70, 1, 71, 3, 2]

    async with stage(tmp_path, script=script) as s:
        (usual,) = (await both(s.http, "/v1/completions", PROMPT))["choices"]
        body = PROMPT | {"skip_special_tokens": False, "logprobs": 0}
        (shown,) = (await both(s.http, "/v1/completions", body))["choices"]
        assert usual["text"] == s.tokenizer.decode([70, 71])
        assert shown["text"] == s.tokenizer.literal.decode([70, 1, 71, 3])
        assert "<|im_start|>" in shown["text"] and "<|im_end|>" not in shown["text"]
        body |= {"include_stop_str_in_output": True}
        (kept,) = (await both(s.http, "/v1/completions", body))["choices"]
        assert kept["text"] == shown["text"] + "<|im_end|>"


async def test_tokenize_and_detokenize(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        found = (await s.http.post("/tokenize", json={"prompt": TEXT})).json()
        ids = said(s.tokenizer, TEXT, end=False)
        assert found == {
            "count": len(ids),
            "max_model_len": 512,
            "tokens": ids,
            "token_strs": None,
        }
        body = {"prompt": "漢", "return_token_strs": True}
        names = (await s.http.post("/tokenize", json=body)).json()["token_strs"]
        assert names == ["bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2"]
        body = {"tokens": [1, *ids, 2]}
        text = (await s.http.post("/detokenize", json=body)).json()
        assert text == {"prompt": f"<|im_start|>{TEXT}<|im_end|>"}
        chat = (await s.http.post("/tokenize", json=CHAT)).json()
        await s.http.post("/v1/chat/completions", json=CHAT)
        assert tuple(chat["tokens"]) == s.scheduler.submitted[-1].prompt_ids
        open_end = CHAT | {"add_generation_prompt": False}
        assert (await s.http.post("/tokenize", json=open_end)).json()["count"] < chat["count"]
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [5, 320]}, "tokens[1]"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ):
            response = await s.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_version_documents_and_what_is_not_there(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        assert (await s.http.get("/version")).json() == {"version": __version__}
        page = await s.http.get("/docs")
        assert page.status_code == 200 and "/openapi.json" in page.text
        assert not re.findall(r"https?://|<script|<link|src=", page.text)  # it needs no network
        for told in ("POST /v1/chat/completions", "repetition_penalty", "Speculative", "budget"):
            assert told in page.text
        document = (await s.http.get("/openapi.json")).json()
        assert {"/v1/completions", "/tokenize", "/detokenize", "/version"} <= set(document["paths"])
        properties = document["components"]["schemas"]["CompletionBody"]["properties"]
        assert {"type": "null"} in properties["n"]["anyOf"]
        assert {"type": "null"} not in properties["prompt"]["anyOf"]
        response = await s.http.post("/v1/responses", json={"input": "x"})
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_far_too_long_is_not_tokenised(tmp_path: Path, stream: bool) -> None:
    """The same refusal as of one that is just too long, at once; and what fits is never refused."""
    async with stage(tmp_path, "ok", max_model_len=64) as s:
        encode = s.tokenizer._encode
        seen: list[int] = []

        def watched(texts: Sequence[str], special: bool) -> list[list[int]]:
            seen.extend(map(len, texts))
            return encode(texts, special)

        s.tokenizer._encode = watched  # type: ignore[method-assign]
        for path, field, long in (
            ("/v1/completions", "prompt", "z " * 500_000),
            ("/v1/completions", "prompt", ["z", "z " * 500_000]),
            ("/v1/chat/completions", "messages", [{"role": "user", "content": "z " * 500_000}]),
        ):
            body = {field: long, "stream": stream, "max_tokens": 5}
            response = await s.http.post(path, json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert "maximum context length is 64 tokens" in error["message"]
            assert "at least" in error["message"]
        assert not seen
        for length, status in ((63, 200), (64, 400)):
            body = {"prompt": "z" * length, "stream": stream, "max_tokens": 1}
            assert (await s.http.post("/v1/completions", json=body)).status_code == status
        assert [size for size in seen if size > len("ok")] == [63, 64]


async def test_a_long_body_is_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.get_ident()
    where: list[bool] = []

    def watched(schema: Any, data: object) -> Any:
        where.append(threading.get_ident() == here)
        return validate(schema, data)

    monkeypatch.setattr("gateway.app.validate", watched)
    async with stage(tmp_path, "ok") as s:
        for count, code in ((1, None), (20_000, "context_length_exceeded")):
            body = {"messages": CHAT["messages"] * count, "sped": 1}
            response = await s.http.post("/v1/chat/completions", json=body, timeout=60)
            assert response.json().get("error", {}).get("code") == code
        assert where == [True, False]
        assert 'field="sped"' in (await s.http.get("/metrics")).text


async def test_no_answer_is_longer_than_the_servers_cap(tmp_path: Path) -> None:
    """What asks for more is cut there, as by max_tokens."""
    async with stage(
        tmp_path, TEXT * 9, max_model_len=4096, settings={"max_output_tokens": 7}
    ) as s:
        for asked, length in ((None, 7), (100, 7), (7, 7), (3, 3)):
            for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
                whole = await both(s.http, path, body | {"max_tokens": asked})
                assert whole["usage"]["completion_tokens"] == length, (path, asked)
                assert whole["choices"][0]["finish_reason"] == "length"
        body = PROMPT | {"max_tokens": 100, "min_tokens": 50}
        assert (await s.http.post("/v1/completions", json=body)).status_code == 200
        assert s.scheduler.submitted[-1].min_tokens == 7
    async with stage(tmp_path, TEXT * 9, max_model_len=4096) as s:
        whole = await both(s.http, "/v1/completions", PROMPT | {"max_tokens": 100})
        assert whole["usage"]["completion_tokens"] == 100
