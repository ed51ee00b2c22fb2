"""Requests that offer to speak another protocol, byte by byte."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes.front import Stage, stage

pytestmark = pytest.mark.anyio

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def post(prompt: str, offer: bytes = OFFER, chunked: bool = False) -> tuple[bytes, bytes]:
    """Head and body of a request for one token."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "return_token_ids": True}).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    if chunked:
        parts = [body[:7], body[7:]]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])
        length = b"Transfer-Encoding: chunked\r\n"
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + offer + length + b"\r\n", body


async def answers(s: Stage, *packets: bytes) -> list[tuple[int, dict]]:
    """Status and body of all answers of a connection, which ends with `LAST`."""
    host, _, port = s.front.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for packet in (*packets, LAST):
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0.02)
    rest = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    found = []
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        lines = [line.lower() for line in head.split(b"\r\n")]
        (length,) = (int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        found.append((int(head.split()[1]), json.loads(rest[:length])))
        rest = rest[length:]
    return found


@pytest.mark.parametrize("offer", [OFFER, WEBSOCKET, b""])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("cut", ["together", "apart", "in pieces"])
async def test_the_body_is_the_requests(
    tmp_path: Path, offer: bytes, chunked: bool, cut: str
) -> None:
    async with stage(tmp_path, "abc") as s:
        sent = []
        for prompt in ("hello", "a longer one"):
            head, body = post(prompt, offer, chunked)
            match cut:
                case "together":
                    sent.append(head + body)
                case "apart":
                    sent += [head, body]
                case _:
                    whole = head + body
                    sent += [whole[at : at + 90] for at in range(0, len(whole), 90)]
        found = await answers(s, *sent)
        assert [status for status, _ in found] == [200, 200, 200]
        for prompt, (_, answer) in zip(("hello", "a longer one"), found, strict=False):
            (choice,) = answer["choices"]
            assert choice["prompt_token_ids"] == s.tokenizer.encode_now(prompt)
        assert "version" in found[2][1]


async def test_a_body_is_not_taken_for_a_request(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        head, _ = post("")
        inner = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        head = head[: head.index(b"Content-Length")] + b"Content-Length: %d\r\n\r\n" % len(inner)
        (refused, error), (status, _) = await answers(s, head, inner)
        assert (refused, status) == (400, 200) and "not valid JSON" in error["error"]["message"]


async def test_a_large_body(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc", max_model_len=512) as s:
        head, body = post("x" * 1_500_000)
        (status, error), _ = await answers(s, head, body[:700_000], body[700_000:])
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


async def test_requests_without_a_body(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n"
        found = await answers(s, get, get + get)
        assert [status for status, _ in found] == [200] * 4
        assert all(body["object"] == "list" for _, body in found[:3])


async def test_it_is_no_proxy(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc") as s:
        ((status, error),) = await answers(s, b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n")
        assert status == 400 and error["error"]["type"] == "invalid_request_error"
        assert (await s.http.get("/v1/models")).status_code == 200
