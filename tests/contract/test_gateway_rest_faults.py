"""The REST door when things go wrong: errors, clients that leave, a gateway that drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from gateway.request import GenerateParams
from slipstream.errors import Draining, EngineFailed, PeerLost
from tests.fakes.front import CHAT, PROMPT, TEXT, Stage, events, idle, stage, until
from tests.fakes.scheduler import noise_script
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.anyio

BAD_REQUESTS: list[tuple[str, str, bytes | None, int, str | None, str | None]] = [
    ("GET", "/nowhere", None, 404, None, "not_found"),
    ("GET", "/v1/completions", None, 405, None, "method_not_allowed"),
    ("POST", "/v1/completions", b"{", 400, None, None),
    ("POST", "/v1/completions", b"", 400, None, None),
    ("POST", "/v1/completions", b"[" * 100_000, 400, None, None),
    ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400, None, None),
    ("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, None, None),
    ("POST", "/v1/completions", b"[]", 400, None, None),
    ("POST", "/v1/completions", b"{}", 400, "prompt", None),
    ("POST", "/v1/completions", b'{"prompt": [1, null]}', 400, "prompt[1]", None),
    ("POST", "/v1/completions", b'{"prompt": [320]}', 400, "prompt", None),
    (
        "POST",
        "/v1/completions",
        b'{"prompt": "x", "stop_token_ids": [320]}',
        400,
        "stop_token_ids",
        None,
    ),
    (
        "POST",
        "/v1/completions",
        b'{"prompt": "x", "model": "gpt"}',
        404,
        "model",
        "model_not_found",
    ),
    (
        "POST",
        "/v1/completions",
        json.dumps({"prompt": "z" * 64}).encode(),
        400,
        "prompt",
        "context_length_exceeded",
    ),
    (
        "POST",
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "z" * 64}]}).encode(),
        400,
        "messages",
        "context_length_exceeded",
    ),
    ("POST", "/v1/chat/completions", b'{"messages": []}', 400, "messages", None),
    ("GET", "/v1/models/gpt", None, 404, "model", "model_not_found"),
    ("POST", "/v1/models/", b"{}", 405, None, "method_not_allowed"),
    ("POST", "/nowhere/", b"{}", 404, None, "not_found"),
    ("POST", "/v1/completions/", b"{}", 400, "prompt", None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_one_shape(tmp_path: Path, stream: bool) -> None:
    async with stage(tmp_path, max_model_len=64) as s:
        for method, path, body, status, param, code in BAD_REQUESTS:
            if stream and body and body.endswith(b"}") and len(body) > 2:
                body = body[:-1] + b', "stream": true}'
            response = await s.http.request(method, path, content=body)
            assert response.status_code == status, (method, path, body)
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"] and error["type"] == "invalid_request_error"
            assert (error["param"], error["code"]) == (param, code), (method, path, body)
        assert (await s.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert len(s.scheduler.submitted) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01 this is TLS",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_the_same_shape(tmp_path: Path, sent: bytes) -> None:
    async with stage(tmp_path) as s:
        host, _, port = s.front.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert (await s.http.get("/v1/models")).status_code == 200


async def test_a_slash_at_the_end_changes_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        listed = await s.http.get("/v1/models/")
        assert listed.json() == (await s.http.get("/v1/models")).json()
        assert listed.json()["object"] == "list"
        for path, body in (("/v1/completions/", PROMPT), ("/v1/chat/completions/", CHAT)):
            assert (await s.http.post(path, json=body)).status_code == 200


async def test_a_body_too_large(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        response = await s.http.post("/v1/completions", content=b" " * (9 << 20))
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


async def test_a_body_too_large_is_refused_also_when_all_is_sent_first(tmp_path: Path) -> None:
    """Else a client that reads no answer before would see its connection reset."""
    async with stage(tmp_path) as s:
        connection = HTTPConnection(s.front.http)

        def post() -> int:
            body, last = b" " * (30 << 20), {"Connection": "close"}
            connection.request("POST", "/v1/completions", body, last)
            return connection.getresponse().status

        assert await asyncio.to_thread(post) == 413
        connection.close()


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    # Steps so slow that the first choice still runs when the second is given.
    async with stage(tmp_path, "abc", max_running=1, step_s=0.2) as s:
        response = await s.http.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["type"] == "rate_limit_error"
        await idle(s)
        assert s.scheduler.cancelled == [1]  # the choice that had been admitted
        assert (await s.http.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_not_connected_and_draining(tmp_path: Path) -> None:
    async with stage(tmp_path, ready=False) as s:
        for path in ("/v1/models", "/ready"):
            response = await s.http.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "backend_unavailable"
        assert (await s.http.get("/health")).json() == {"status": "ok"}
        response = await s.http.post("/v1/completions", json=PROMPT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        s.scheduler.ready = True
        assert (await s.http.get("/ready")).status_code == 200
        s.front.service.draining = True
        response = await s.http.post("/v1/chat/completions", json=CHAT)
        assert response.json()["error"]["code"] == "draining"
        assert (await s.http.get("/ready")).status_code == 503


async def test_our_own_fault_is_a_500_and_the_server_lives(tmp_path: Path) -> None:
    def script(params: GenerateParams) -> Sequence[int]:
        if params.prompt_ids == (13,):
            raise ZeroDivisionError("a bug")
        return [20, 2]

    async with stage(tmp_path, script=script) as s:
        response = await s.http.post("/v1/completions", json={"prompt": [13]})
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["type"], error["message"]) == ("server_error", "internal error")
        assert (await s.http.post("/v1/completions", json=PROMPT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(tmp_path: Path, stream: bool) -> None:
    async with stage(tmp_path, TEXT) as s:
        s.scheduler.fail_after = (0, PeerLost("the target is gone"))
        response = await s.http.post("/v1/completions", json=PROMPT | {"stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the target is gone"


async def test_an_error_later_is_an_event(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        s.scheduler.fail_after = (7, EngineFailed("a step failed"))
        response = await s.http.post("/v1/completions", json=PROMPT | {"stream": True})
        *chunks, last = events(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, w"
        assert last["error"] == {
            "message": "a step failed",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slots(
    tmp_path: Path, stream: bool, path: str
) -> None:
    async with stage(tmp_path, script=noise_script(10, 320), max_model_len=100_000) as s:
        body = PROMPT | CHAT | {"stream": stream, "n": 3, "max_tokens": 50_000}
        async with s.http.stream("POST", path, json=body) if stream else _abandoned(s, path, body):
            await until(lambda: s.scheduler.running == 3)
        await idle(s)
        assert sorted(s.scheduler.cancelled) == [1, 2, 3]


class _abandoned:
    """A whole answer that is waited for, and then not any more."""

    def __init__(self, s: Stage, path: str, body: dict[str, Any]) -> None:
        self._call = asyncio.ensure_future(s.http.post(path, json=body))

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._call


async def test_a_client_that_does_not_read_stops_no_one(tmp_path: Path) -> None:
    async with stage(
        tmp_path, script=noise_script(10, 320), max_model_len=200_000, per_step=500
    ) as s:
        body = PROMPT | {"stream": True, "max_tokens": 100_000, "stop": ["<never>"]}
        async with s.http.stream("POST", "/v1/completions", json=body):
            await until(lambda: s.scheduler.steps > 50, 10)
            other = await s.http.post("/v1/completions", json=PROMPT)
            assert other.json()["usage"]["completion_tokens"] == 200
        await idle(s)


async def test_running_requests_finish_in_the_drain_time(tmp_path: Path) -> None:
    async with stage(tmp_path, "ab" * 40, end=False, per_step=1, step_s=0.005) as s:
        running = asyncio.create_task(
            s.http.post("/v1/completions", json=PROMPT | {"max_tokens": 40})
        )
        await until(lambda: s.scheduler.running == 1)
        drained = asyncio.create_task(s.front.service.drain(10))
        await asyncio.sleep(0)
        assert (await s.http.post("/v1/completions", json=PROMPT)).status_code == 503
        assert (await running).json()["choices"][0]["text"] == "ab" * 20
        assert await drained


async def test_what_outlives_the_drain_time_is_told_so(tmp_path: Path) -> None:
    async with stage(tmp_path, script=noise_script(10, 320), max_model_len=100_000) as s:
        body = PROMPT | {"stream": True, "max_tokens": 90_000}
        running = asyncio.create_task(s.http.post("/v1/completions", json=body))
        await until(lambda: s.scheduler.running == 1)
        assert not await s.front.service.drain(0.05)
        assert events((await running).text)[-1]["error"]["code"] == "draining"
        await idle(s)
        with pytest.raises(Draining):
            s.front.service.info()


async def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    config = make_tokenizer(tmp_path) / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<|im_end|>"}))
    async with stage(tmp_path) as s:
        response = await s.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], "chat template" in error["message"]) == ("messages", True)
        assert (await s.http.post("/v1/completions", json=PROMPT)).status_code == 200
