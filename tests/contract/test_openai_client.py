"""The official client's own view of the API: every field, with both of its kinds, whole and
streamed, over the real scheduler and over scripted answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.checkpoint import Checkpoint
from gateway.scheduler import Scheduler
from gateway.server import Front
from gateway.settings import GatewaySettings
from tests.fakes import draft
from tests.fakes.front import CHAT, stage
from tests.fakes.target import FakeTargetRunner, serve_fake
from tests.openai_client import Clients, Said, clients
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.anyio

VOCAB, WINDOW = 320, 512
THINKING = """{%- for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "time")
]
CALLS = ['{"city": "Bern"}', '{"city": "Zürich"}']
ANSWER = "<think>let me see</think>I look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in zip(("weather", "time"), CALLS, strict=True)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


@pytest.fixture(scope="module")
async def cell(folder: Path) -> AsyncIterator[Clients]:
    """Clients of a gateway with its own scheduler, over a fake target and a fake draft."""
    async with AsyncExitStack() as stack:
        runner = FakeTargetRunner(
            vocab=VOCAB, max_model_len=WINDOW, eos_ids=(2,), grammars=True, paranoid=False
        )
        target = await stack.enter_async_context(serve_fake(runner))
        drafts = await stack.enter_async_context(draft.serve(draft.FakeDraftRunner(vocab=VOCAB)))
        settings = GatewaySettings(
            target=f"127.0.0.1:{target.port}",
            draft=f"127.0.0.1:{drafts.port}",
            port=0,
            served_model_name=["fake", "other"],
        )
        front = Front(
            settings,
            Checkpoint.load(folder),
            lambda deliver: Scheduler(settings.scheduler(), deliver),
        )
        await front.start()
        stack.push_async_callback(front.stop, 0.0)
        await front.until_ready()
        yield await stack.enter_async_context(clients(front.http))


@asynccontextmanager
async def scripted(folder: Path, text: str) -> AsyncIterator[Clients]:
    """Clients of a gateway whose every answer is `text`, of a family that thinks and has tools."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": THINKING}))
    async with stage(folder, text, settings={"reasoning_parser": "think"}) as s:
        s.scheduler.info = replace(s.scheduler.info, grammars=True)
        async with clients(s.front.http) as made:
            yield made


COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3, "best_of": 3, "seed": 7, "temperature": 1.0},
    "prompts": {"prompt": ["once", "twice upon", "ü"], "n": 2},
    "ids": {"prompt": [70, 71, 72]},
    "lists of ids": {"prompt": [[70, 71], [72]], "logprobs": 1},
    "logprobs": {"logprobs": 5},
    "own logprobs": {"logprobs": 0},
    "echo": {"echo": True},
    "scored echo": {"echo": True, "logprobs": 1},
    "only scored": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -1, "logit_bias": {"70": 2}},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "seed": 1, "user": "me"},
    "more sampling": {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}},
    "least": {"extra_body": {"min_tokens": 9, "ignore_eos": True}},
    "words": {"extra_body": {"bad_words": ["a", "b"]}},
    "stop": {"stop": ["\ufffd\ufffd", "e"], "max_tokens": 200},
    "kept stop": {
        "stop": "e",
        "max_tokens": 200,
        "extra_body": {"include_stop_str_in_output": True},
    },
    "undrafted": {"extra_body": {"speculative": {"enabled": False}}},
    "narrow": {"extra_body": {"speculative": {"width": 1, "budget": 16}}},
    "grammar": {"extra_body": {"guided_regex": "[a-z]+"}},
    "nulls": {"stop": None, "seed": None, "logit_bias": None, "n": None},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 20},
    "n": {"n": 3, "seed": 7, "max_completion_tokens": 12},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 20},
    "own logprobs": {"logprobs": True, "max_tokens": 20},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -1, "max_tokens": 20},
    "bias": {"logit_bias": {"70": 2}, "temperature": 0.5, "top_p": 0.9, "max_tokens": 20},
    "stop": {"stop": ["e", "zz"]},
    "whole window": {},
    "object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}},
        "max_tokens": 20,
    },
    "text": {"response_format": {"type": "text"}, "max_tokens": 20},
    "parts": {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes?"},
            {"role": "user", "content": [{"type": "text", "text": "why?"}]},
        ],
        "max_tokens": 20,
    },
}


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_completions(cell: Clients, name: str) -> None:
    body = {"prompt": "once", "max_tokens": 24} | COMPLETIONS[name]
    extra = body.pop("extra_body", {}) | {"return_token_ids": True}
    answer = await cell.completion(**body, extra_body=extra)
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    prompts = body["prompt"] if name == "prompts" else prompts
    assert len(answer.choices) == len(prompts) * (body.get("n") or 1)
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == sum(len(choice.ids) for choice in answer.choices)
    for number, choice in enumerate(answer.choices):
        prompt = prompts[number // (body.get("n") or 1)]
        shown = await _text(cell, choice.prompt_ids or []) if body.get("echo") else ""
        _check(choice, body, shown)
        if isinstance(prompt, str):
            assert await _text(cell, choice.prompt_ids or []) == prompt
        else:
            assert choice.prompt_ids == prompt


def _check(choice: Said, body: dict[str, Any], shown: str) -> None:
    """What holds between a choice's fields, whatever the tokens are."""
    limit = body["max_tokens"]
    assert choice.finish == ("length" if len(choice.ids) == limit and not choice.stop else "stop")
    assert choice.text.startswith(shown)
    if choice.stop is not None:
        assert choice.stop in body["stop"]
        assert choice.stop not in choice.text[len(shown) : -len(str(choice.stop))]
    if body.get("logprobs") is None:
        assert not choice.rows
        return
    scored = (len(choice.prompt_ids or []) if shown else 0) + len(choice.ids)
    assert len(choice.rows) >= scored - 1  # an end token is not shown
    for number, (token, own, best, offset) in enumerate(choice.rows):
        assert 0 <= offset <= len(choice.text)
        if shown and number == 0:
            assert (own, best) == (None, None)
        else:
            assert best[token] == own


async def _text(cell: Clients, ids: list[int]) -> str:
    return str((await cell.http.post("/detokenize", json={"tokens": ids})).json()["prompt"])


@pytest.mark.parametrize("name", CHATS)
async def test_chats(cell: Clients, name: str) -> None:
    body = CHATS[name]
    answer = await cell.chat(**body, extra_body={"return_token_ids": True})
    assert len(answer.choices) == body.get("n", 1)
    limit = body.get("max_tokens") or body.get("max_completion_tokens")
    for choice in answer.choices:
        assert choice.finish in ("stop", "length")
        assert limit is None or len(choice.ids) <= limit
        if body.get("logprobs"):
            assert choice.rows
            for row in choice.rows:
                if body.get("top_logprobs"):
                    best = {entry["token"]: entry["logprob"] for entry in row["top_logprobs"]}
                    assert best[row["token"]] == row["logprob"]
                else:
                    assert row["top_logprobs"] == []
    if name == "whole window" and answer.only.finish == "length":
        assert answer.usage is not None
        assert answer.usage["total_tokens"] == WINDOW


async def test_drafting_is_seen_in_nothing_but_the_statistics(cell: Clients) -> None:
    body = {"prompt": "once", "max_tokens": 60, "logprobs": 1}
    drafted, plain = [
        await cell.completion(**body, extra_body={"return_token_ids": True, "speculative": wish})
        for wish in ({"stats": True}, {"stats": True, "enabled": False})
    ]
    assert drafted == plain
    stats = [
        (await cell.one.completions.create(model="", **body, extra_body=extra)).to_dict()
        for extra in ({"speculative": {"stats": True}}, {"speculative": {"enabled": False}})
    ]
    assert stats[0]["speculative"]["steps"] > 0
    assert "speculative" not in stats[1]


async def test_stop_tokens(cell: Clients) -> None:
    body: dict[str, Any] = {"prompt": "once", "max_tokens": 30}
    ids = (await cell.completion(**body, extra_body={"return_token_ids": True})).only.ids
    wanted = ids[7]
    extra = {"stop_token_ids": [wanted], "return_token_ids": True}
    answer = await cell.completion(**body, extra_body=extra)
    assert answer.only.ids == ids[: ids.index(wanted) + 1]
    assert (answer.only.finish, answer.only.stop) == ("stop", wanted)


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tools(tmp_path: Path, choice: str) -> None:
    make_tokenizer(tmp_path)
    async with scripted(tmp_path, ANSWER) as s:
        both = (await s.chat(tools=TOOLS, tool_choice=choice, logprobs=True)).only
        assert both.calls == [["weather", CALLS[0]], ["time", CALLS[1]]]
        assert (both.text, both.reasoning) == ("I look.", "let me see")
        assert both.finish == "tool_calls"
        one = (await s.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)).only
        assert one.calls == both.calls[:1]
        asked: dict[str, Any] = {"model": "", "messages": CHAT["messages"], "tools": TOOLS}
        async with s.one.chat.completions.stream(**asked) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        assert [call.function.arguments for call in message.tool_calls or ()] == CALLS
        # A tool's answer goes back as the client's own objects are written.
        told = [{"role": "tool", "tool_call_id": call[0], "content": "rain"} for call in both.calls]
        again = [*CHAT["messages"], message.to_dict(), *told]
        assert (await s.chat(messages=again, tools=TOOLS)).only.calls == both.calls


async def test_a_named_tool_and_none(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    async with scripted(tmp_path, ANSWER) as s:
        named = {"type": "function", "function": {"name": "weather"}}
        answer = (await s.chat(tools=TOOLS, tool_choice=named)).only
        assert answer.calls == [["weather", CALLS[0]]]
        answer = (await s.chat(tools=TOOLS, tool_choice="none")).only
        assert answer.calls == []
        assert answer.text.count("<tool_call>") == 2
        assert (answer.reasoning, answer.finish) == ("let me see", "stop")


async def test_a_parsed_object(tmp_path: Path) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    make_tokenizer(tmp_path)
    async with scripted(tmp_path, f"<think>so</think>{CALLS[1]}") as s:
        parsed = await s.one.chat.completions.parse(
            model="", messages=CHAT["messages"], response_format=City
        )
        assert parsed.choices[0].message.parsed == City(city="Zürich")


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix", "suffix"),
    ("completions", {"prompt": "x", "n": 2, "best_of": 3}, "best_of", "equal to n"),
    ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "20"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature", "-1"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "without echo"),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ("completions", {"prompt": [5, 320]}, "prompt", "320"),
    ("completions", {"prompt": ["x", [5]]}, "prompt[1]", "same kind"),
    ("completions", {"prompt": "x", "extra_body": {"bad_words": ["hello there"]}},
     "bad_words[0]", "single token"),
    ("completions", {"prompt": "x", "extra_body": {"speculative": {"width": 4, "budget": 2}}},
     "speculative.budget", "budget"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", "logprobs true"),
    ("chat", {"functions": [{"name": "f"}]}, "functions", "not supported"),
    ("chat", {"modalities": ["audio"]}, "modalities", "not supported"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type", "only text"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
    ("chat", {"tool_choice": "required"}, "tool_choice", "tools"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {"type": "nothing"}}}},
     "response_format.json_schema.schema", "nothing"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(cell: Clients, stream: bool) -> None:
    for door, given, param, words in REFUSED:
        one: Any = cell.one.completions if door == "completions" else cell.one.chat.completions
        sync: Any = cell.sync.completions if door == "completions" else cell.sync.chat.completions
        body = (CHAT if door == "chat" else {}) | given | {"model": "", "stream": stream}
        with pytest.raises(openai.BadRequestError) as caught:
            await one.create(**body)
        assert caught.value.param == param, given
        assert caught.value.type == "invalid_request_error"
        assert words in caught.value.message, given
        with pytest.raises(openai.BadRequestError) as again:
            await asyncio.to_thread(sync.create, **body)
        assert again.value.body == caught.value.body


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompts_and_unknown_models(cell: Clients, stream: bool) -> None:
    chats, texts = cell.one.chat.completions, cell.one.completions
    long = [{"role": "user", "content": "x" * 2 * WINDOW}]
    wanted = f"maximum context length is {WINDOW} tokens"
    asked: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (texts, {"prompt": [70] * WINDOW}, "prompt"),
        (chats, {"messages": long}, "messages"),
    )
    for door, body, param in asked:
        with pytest.raises(openai.BadRequestError, match=wanted) as caught:
            await door.create(model="fake", stream=stream, **body)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
        with pytest.raises(openai.NotFoundError) as unknown:
            await door.create(model="gpt", stream=stream, **body)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await cell.one.responses.create(model="fake", input="x")


async def test_models_and_tokens(cell: Clients) -> None:
    listed = [model.to_dict() async for model in cell.one.models.list()]
    assert [model["id"] for model in listed] == ["fake", "other"]
    others = await asyncio.to_thread(lambda: list(cell.sync.models.list()))
    assert [model.to_dict() for model in others] == listed
    found = (await cell.one.models.retrieve("other")).to_dict()
    assert (found["max_model_len"], found["object"]) == (WINDOW, "model")
    with pytest.raises(openai.NotFoundError):
        await cell.one.models.retrieve("gpt")

    text = "Hello, wörld! 漢字 \U0001f600"
    body = {"prompt": text, "return_token_strs": True}
    split = (await cell.http.post("/tokenize", json=body)).json()
    assert split["count"] == len(split["tokens"]) == len(split["token_strs"])
    assert await _text(cell, split["tokens"]) == text
    chat = (await cell.http.post("/tokenize", json=CHAT)).json()
    asked: dict[str, Any] = CHAT | {"max_tokens": 1, "extra_body": {"return_token_ids": True}}
    answer = (await cell.one.chat.completions.create(model="", **asked)).to_dict()
    assert answer["prompt_token_ids"] == chat["tokens"]
    assert answer["usage"]["prompt_tokens"] == chat["count"]
