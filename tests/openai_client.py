"""Answers as the official client reads them: by both of its kinds, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.fakes.front import CHAT

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Clients:
    """Both clients of one server."""

    one: openai.AsyncOpenAI
    sync: openai.OpenAI
    http: httpx.AsyncClient

    async def completion(self, **body: Any) -> Answer:
        """The answer, which is the same in four ways of asking."""
        return await self._same(self.one.completions, self.sync.completions, body)

    async def chat(self, **body: Any) -> Answer:
        """As `completion`; without messages in `body`, those of `CHAT`."""
        return await self._same(self.one.chat.completions, self.sync.chat.completions, CHAT | body)

    async def _same(self, one: Any, sync: Any, body: dict[str, Any]) -> Answer:
        asked: dict[str, Any] = {"model": ""} | body
        found = Answer.of([(await one.create(**asked)).to_dict()])
        streamed = [chunk.to_dict() async for chunk in await one.create(**asked, **USAGE)]
        others = {
            "sync": [(await asyncio.to_thread(sync.create, **asked)).to_dict()],
            "streamed": streamed,
            "sync, streamed": await asyncio.to_thread(_read, sync.create, asked | USAGE),
        }
        for name, bodies in others.items():
            assert Answer.of(bodies) == found, name
        bare = [chunk.to_dict() async for chunk in await one.create(**asked, stream=True)]
        assert all("usage" not in chunk for chunk in bare)
        assert Answer.of(bare).choices == found.choices
        return found


def _read(create: Callable[..., Iterator[Any]], asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk.to_dict() for chunk in create(**asked)]


@dataclass
class Said:
    """All that a choice says, whichever way it came."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    rows: list[Any] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def add(self, part: dict[str, Any]) -> None:
        """Takes a whole choice, or the next part of it."""
        assert self.finish is None, "a part behind the last one"
        message = part.get("message") or part.get("delta") or {}
        self.text += part.get("text") or message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or ""
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            if call.get("index", number) == len(self.calls):
                assert call["id"] and call["type"] == "function"
                self.calls.append([function["name"], ""])
            self.calls[call.get("index", number)][1] += function["arguments"]
        self.ids += part.get("token_ids") or ()
        self.prompt_ids = part.get("prompt_token_ids") or self.prompt_ids
        self.rows += _rows(part.get("logprobs") or {})
        self.finish, self.stop = part["finish_reason"], part.get("stop_reason")


def _rows(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True)) if logprobs else []


@dataclass
class Answer:
    """An answer's choices and usage."""

    choices: list[Said]
    usage: dict[str, int] | None

    @classmethod
    def of(cls, bodies: list[dict[str, Any]]) -> Answer:
        """From one whole body, or a stream's chunks."""
        found: dict[int, Said] = {}
        for body in bodies:
            for part in body["choices"]:
                found.setdefault(part["index"], Said()).add(part)
        return cls([found[index] for index in range(len(found))], bodies[-1].get("usage"))

    @property
    def only(self) -> Said:
        """The one choice."""
        (choice,) = self.choices
        return choice


@asynccontextmanager
async def clients(http: str) -> AsyncIterator[Clients]:
    common: dict[str, Any] = {"base_url": f"http://{http}/v1", "api_key": "x", "max_retries": 0}
    raw = httpx.AsyncClient(base_url=f"http://{http}", trust_env=False)
    one = openai.AsyncOpenAI(**common, http_client=httpx.AsyncClient(trust_env=False))
    with openai.OpenAI(**common, http_client=httpx.Client(trust_env=False)) as sync:
        async with one, raw:
            yield Clients(one, sync, raw)
