"""The gateway's doors over a fake scheduler, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.checkpoint import Checkpoint
from gateway.request import Deliver, GenerateParams
from gateway.server import Front
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from tests.fakes.scheduler import FakeScheduler, Script, model_info
from tests.tiny import make_tokenizer

TEXT = "Hello, wörld! 😀 漢字: the end."
PROMPT = {"prompt": "once", "max_tokens": 200}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Stage:
    """A running front and what a test needs of it."""

    front: Front
    scheduler: FakeScheduler
    tokenizer: Tokenizer
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.front.http}"


def said(tokenizer: Tokenizer, text: str, *, end: bool = True) -> list[int]:
    """The ids of `text`, and the end token."""
    return tokenizer._encode([text], False)[0] + ([2] if end else [])


def script_of(tokenizer: Tokenizer, text: str, *, end: bool = True) -> Script:
    """Every request is answered with `text`."""

    def script(params: GenerateParams) -> Sequence[int]:
        return said(tokenizer, text, end=end)

    return script


@asynccontextmanager
async def stage(
    folder: Path,
    text: str = "hello world",
    *,
    end: bool = True,
    script: Script | None = None,
    max_model_len: int = 512,
    served_names: Sequence[str] = (),
    recommended: bool = True,
    settings: Mapping[str, Any] | None = None,
    **options: object,
) -> AsyncIterator[Stage]:
    """Both doors on free ports; every request is answered with `text` unless there is a script.

    `settings` are of the gateway, `options` of the scheduler.
    """
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(folder)
    checkpoint = Checkpoint.load(folder, recommended=recommended)
    tokenizer = checkpoint.tokenizer
    wanted = GatewaySettings(
        target="127.0.0.1:1",
        port=0,
        served_model_name=list(served_names),
        **(settings or {}),
    )

    def make(deliver: Deliver) -> FakeScheduler:
        return FakeScheduler(
            deliver,
            script or script_of(tokenizer, text, end=end),
            info=model_info(tokenizer.vocab_size, max_model_len),
            **options,  # type: ignore[arg-type]
        )

    front = Front(wanted, checkpoint, make)
    await front.start()
    try:
        url = f"http://{front.http}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
            yield Stage(front, front.scheduler, tokenizer, http)  # type: ignore[arg-type]
    finally:
        await front.stop(0.0)


def events(text: str) -> list[dict[str, Any]]:
    """The data of a stream, without its end mark."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def folded(text: str) -> dict[str, Any]:
    """A stream's chunks joined to what the whole answer would be, as far as both say it."""
    chunks = events(text)
    body: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        if chunk.get("usage") is not None:
            body["usage"] = chunk["usage"]
        for part in chunk["choices"]:
            choice = body["choices"].setdefault(part["index"], {"index": part["index"]})
            if "delta" in part:
                message = choice.setdefault("message", {})
                for name, value in part["delta"].items():
                    message[name] = value if name == "role" else message.get(name, "") + value
            for name, value in part.items():
                if name in ("index", "delta"):
                    continue
                choice[name] = _joined(choice.get(name), value)
    body["choices"] = [body["choices"][index] for index in sorted(body["choices"])]
    return body


def _joined(before: Any, value: Any) -> Any:
    if before is None or value is None:
        return before if value is None else value
    if isinstance(value, dict):
        return {name: _joined(before[name], value[name]) for name in value}
    return before + value


async def both(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, which is checked against the one that is streamed."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    whole = response.json()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    stream = folded((await http.post(path, json=body | usage)).text)
    assert stream == {name: whole[name] for name in ("choices", "usage")}, body
    return whole


async def until(condition: Any, seconds: float = 2.0) -> None:
    """Waits until `condition()` holds, at most `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.002)


async def idle(s: Stage) -> None:
    """Waits until no request runs."""
    await until(lambda: s.scheduler.running == 0)
