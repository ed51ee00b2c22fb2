"""The official client, in both its kinds, over the fields of the API: whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.front import CHAT, TEXT, Stage, said, stage

pytestmark = pytest.mark.anyio

COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "once"},
    {"prompt": ["once", "twice"], "n": 2, "best_of": 2, "seed": 3},
    {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 2},
    {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0},
    {"prompt": "once", "stop": ["字", "never"], "max_tokens": 90},
    {"prompt": "once", "logit_bias": {"50": -3.0}, "presence_penalty": 1, "frequency_penalty": 1},
    {"prompt": "once", "temperature": 0, "top_p": 0.5, "user": "me", "max_tokens": 90},
    {
        "prompt": "once",
        "extra_body": {
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [70],
            "include_stop_str_in_output": True,
            "return_token_ids": True,
        },
    },
]
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1, "max_completion_tokens": 7},
    {"logprobs": True, "top_logprobs": 4},
    {"logprobs": True, "stop": "the", "max_tokens": 90},
    {"temperature": 0, "logit_bias": {"9": 1}, "extra_body": {"return_token_ids": True}},
]


@asynccontextmanager
async def clients(s: Stage) -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.OpenAI]]:
    common: dict[str, Any] = {"base_url": s.url + "/v1", "api_key": "none", "max_retries": 0}
    one = openai.AsyncOpenAI(**common, http_client=httpx.AsyncClient(trust_env=False))
    with openai.OpenAI(**common, http_client=httpx.Client(trust_env=False)) as other:
        async with one:
            yield one, other


async def ask(s: Stage, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, equal for both clients and to the stream's parts."""
    async with clients(s) as (one, other):
        create, create_now = (
            (client.completions if path == "completions" else client.chat.completions).create
            for client in (one, other)
        )
        asked = {"model": "fake-model"} | body
        whole = (await create(**asked)).model_dump()
        now = (await asyncio.to_thread(create_now, **asked)).model_dump()
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        stream = [chunk.model_dump() async for chunk in await create(**asked, **usage)]
        streamed = await asyncio.to_thread(_read, create_now, asked | usage)
    for other_one in (now, *map(_fold, (stream, streamed))):
        assert _told(other_one) == _told(whole)
    return whole


def _read(create: Callable[..., Iterator[Any]], asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk.model_dump() for chunk in create(**asked)]


def _fold(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "rows": [], "index": 0})
            text, rows = _said(part)
            choice |= {"index": part["index"], "finish_reason": part["finish_reason"]}
            choice["text"] += text
            choice["rows"] += rows
    return {"choices": [choices[index] for index in sorted(choices)], "usage": chunks[-1]["usage"]}


def _said(choice: dict[str, Any]) -> tuple[str, list[Any]]:
    """Text and log-probabilities, row by row."""
    message = choice.get("message") or choice.get("delta")
    text = choice["text"] if message is None else message["content"] or ""
    found = choice.get("logprobs") or {}
    if "content" in found:
        return text, found["content"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return text, list(zip(*(found[name] for name in names), strict=True)) if found else []


def _told(body: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    choices = [
        (
            choice["index"],
            choice["finish_reason"],
            *((choice["text"], choice["rows"]) if "rows" in choice else _said(choice)),
        )
        for choice in body["choices"]
    ]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return choices, {name: body["usage"][name] for name in counts}


@pytest.mark.parametrize("body", COMPLETIONS)
async def test_completions(tmp_path: Path, body: dict[str, Any]) -> None:
    async with stage(tmp_path, TEXT) as s:
        whole = await ask(s, "completions", body)
        wanted = len(body["prompt"]) if isinstance(body["prompt"][0], str | list) else 1
        wanted = 1 if isinstance(body["prompt"], str) else wanted
        assert len(whole["choices"]) == wanted * body.get("n", 1)
        if body.get("max_tokens") == 90:
            text = TEXT[: TEXT.index("字")] if "stop" in body else TEXT
            assert whole["choices"][0]["text"] == text
            assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("body", CHATS)
async def test_chats(tmp_path: Path, body: dict[str, Any]) -> None:
    async with stage(tmp_path, TEXT) as s:
        whole = await ask(s, "chat", CHAT | body)
        assert len(whole["choices"]) == body.get("n", 1)
        for choice in whole["choices"]:
            assert choice["message"]["role"] == "assistant"
            assert TEXT.startswith(choice["message"]["content"])
        if not body:
            assert whole["usage"]["completion_tokens"] == len(said(s.tokenizer, TEXT))


@pytest.mark.parametrize(
    ("body", "error", "param", "code"),
    [
        ({"prompt": "x", "model": "gpt"}, openai.NotFoundError, "model", "model_not_found"),
        ({"prompt": [5] * 600}, openai.BadRequestError, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "suffix": "y"}, openai.BadRequestError, "suffix", None),
        ({"prompt": "x", "n": 2, "best_of": 3}, openai.BadRequestError, "best_of", None),
        ({"prompt": "x", "logprobs": 50}, openai.BadRequestError, "logprobs", None),
        ({"prompt": "x", "logit_bias": {"999": 1}}, openai.BadRequestError, "logit_bias", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors(
    tmp_path: Path,
    body: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    async with stage(tmp_path, TEXT) as s, clients(s) as (one, other):
        asked = {"model": "fake-model", "stream": stream} | body
        with pytest.raises(error) as caught:
            await one.completions.create(**asked)
        assert (caught.value.param, caught.value.code) == (param, code)
        with pytest.raises(error):
            await asyncio.to_thread(other.completions.create, **asked)


async def test_responses_are_not_there(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s, clients(s) as (one, _):
        with pytest.raises(openai.NotFoundError, match="/v1/responses"):
            await one.responses.create(model="fake-model", input="x")


async def test_what_ended_an_answer(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        word = said(s.tokenizer, "w", end=False)[0]
        for given, told in (
            ({"stop": ["字: t", "漢字"]}, "漢字"),
            ({"stop_token_ids": [word]}, word),
            ({"stop_token_ids": [2]}, None),
            ({"max_tokens": 3, "stop": ["zzz"]}, None),
        ):
            for path, body in (("completions", {"prompt": "x"}), ("chat", CHAT)):
                whole = await ask(s, path, {"max_tokens": 90} | body | {"extra_body": given})
                assert whole["choices"][0].get("stop_reason") == told
