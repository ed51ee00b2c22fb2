"""Log-probabilities, echoes and ids, whole and streamed, in each of their shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.request import TokenLogprob
from slipstream.v1 import gateway_pb2 as pb
from tests.contract.test_gateway_grpc import generate
from tests.fakes.front import CHAT, PROMPT, TEXT, Stage, both, said, stage
from tests.fakes.scheduler import scored
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.anyio

VOCAB = 320


def rows(prompt: list[int], output: list[int], wanted: int) -> list[TokenLogprob | None]:
    """Of prompt and output, one after the other."""
    found = [scored(t, i, VOCAB, wanted) for i, t in enumerate([*prompt, *output])]
    return [None, *found[1:]]


def name(s: Stage, token: int) -> str:
    return s.tokenizer.vocabulary.name(token)


@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
@pytest.mark.parametrize("per_step", [1, 4])
async def test_completions(tmp_path: Path, wanted: int, per_step: int) -> None:
    async with stage(tmp_path, TEXT, per_step=per_step) as s:
        whole = await both(s.http, "/v1/completions", PROMPT | {"logprobs": wanted})
        (choice,) = whole["choices"]
        found, output = choice["logprobs"], said(s.tokenizer, TEXT)
        prompt = said(s.tokenizer, "once", end=False)
        assert found["tokens"] == [name(s, token) for token in output]
        expected = rows(prompt, output, wanted)[len(prompt) :]
        assert found["token_logprobs"] == [row.logprob for row in expected if row]
        for token, row, value, top in zip(
            output, expected, found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert row is not None
            assert top[name(s, token)] == value == row.logprob
            assert len(top) == (wanted if dict(row.top).get(token) else wanted + 1)
        assert found["text_offset"][0] == 0
        assert found["text_offset"][-1] == len(TEXT)
        check_offsets(s, choice, output)
        assert whole["usage"]["completion_tokens"] == len(output)


def check_offsets(s: Stage, choice: dict[str, Any], ids: list[int]) -> None:
    """Each token's text begins where the text of those before it ends."""
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    for count, offset in enumerate(offsets):
        assert text[:offset] == s.tokenizer.decode(ids[:count]).rstrip("\ufffd")


@pytest.mark.parametrize("prompt", ["漢字 once 😀", [70, 71, 72, 200, 201], [5]])
@pytest.mark.parametrize("limit", [0, 1, 7])
@pytest.mark.parametrize("wanted", [None, 0, 3])
async def test_echo(
    tmp_path: Path, prompt: str | list[int], limit: int, wanted: int | None
) -> None:
    async with stage(tmp_path, TEXT) as s:
        body = {"prompt": prompt, "echo": True, "max_tokens": limit, "return_token_ids": True}
        if wanted is not None:
            body["logprobs"] = wanted
        whole = await both(s.http, "/v1/completions", body)
        (choice,) = whole["choices"]
        ids = said(s.tokenizer, prompt, end=False) if isinstance(prompt, str) else prompt
        output = said(s.tokenizer, TEXT)[:limit]
        shown = prompt if isinstance(prompt, str) else s.tokenizer.decode(ids)
        assert choice["text"] == shown + s.tokenizer.decode(output)
        assert choice["prompt_token_ids"] == ids and choice["token_ids"] == output
        assert choice["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == limit
        assert whole["usage"]["prompt_tokens"] == len(ids)
        if wanted is None:
            assert choice["logprobs"] is None
            return
        found = choice["logprobs"]
        expected = rows(ids, output, wanted)
        assert found["token_logprobs"] == [None if row is None else row.logprob for row in expected]
        assert found["top_logprobs"][0] is None
        assert found["tokens"] == [name(s, token) for token in [*ids, *output]]
        assert len(found["text_offset"]) == len(expected)
        check_offsets(s, {"text": shown} | choice, [*ids, *output])


@pytest.mark.parametrize("hidden", [True, False])
async def test_special_tokens_that_a_prompt_spells_out_have_their_places(
    tmp_path: Path, hidden: bool
) -> None:
    async with stage(tmp_path, TEXT) as s:
        prompt = "<|im_start|>user\n漢<|im_end|>"
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
        body |= {"skip_special_tokens": hidden, "return_token_ids": True}
        (choice,) = (await both(s.http, "/v1/completions", body))["choices"]
        ids = choice["prompt_token_ids"]
        spelt = [
            s.tokenizer.literal.decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids))
        ]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [*map(len, spelt), len(prompt)]
        assert choice["text"].startswith(prompt) and offsets[1] == len("<|im_start|>")


async def test_what_the_tokenizer_adds_takes_no_place(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    told = json.loads((folder / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(told))
    async with stage(folder, TEXT) as s:
        body = {"prompt": "xyz", "echo": True, "logprobs": 0, "max_tokens": 1}
        (choice,) = (await both(s.http, "/v1/completions", body))["choices"]
        assert choice["logprobs"]["tokens"][0] == "<|im_start|>"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("wanted", [0, 2])
async def test_chat(tmp_path: Path, wanted: int) -> None:
    async with stage(tmp_path, TEXT) as s:
        body = CHAT | {"logprobs": True, "top_logprobs": wanted, "return_token_ids": True}
        response = await s.http.post("/v1/chat/completions", json=body)
        whole = response.json()
        (choice,) = whole["choices"]
        output = said(s.tokenizer, TEXT)
        prompt = list(s.scheduler.submitted[0].prompt_ids)
        assert whole["prompt_token_ids"] == prompt
        assert choice["token_ids"] == output
        entries = choice["logprobs"]["content"]
        expected = rows(prompt, output, wanted)[len(prompt) :]
        assert [entry["logprob"] for entry in entries] == [row.logprob for row in expected if row]
        shown = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert shown.decode() == TEXT + "<|im_end|>"
        for entry, token in zip(entries, output, strict=True):
            own = {key: entry[key] for key in ("token", "logprob", "bytes")}
            assert entry["token"] == name(s, token)
            assert not wanted or own in entry["top_logprobs"]
            assert len(entry["top_logprobs"]) in ((0,) if not wanted else (wanted, wanted + 1))
        await both(s.http, "/v1/chat/completions", body)


async def test_tokens_by_their_ids(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc", end=False) as s:
        body = PROMPT | {"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 3}
        (choice,) = (await both(s.http, "/v1/completions", body))["choices"]
        ids = said(s.tokenizer, "abc", end=False)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_logprobs_without_echo(tmp_path: Path, path: str) -> None:
    async with stage(tmp_path, "abc") as s:
        body = {"prompt": "once"} if path == "/v1/completions" else CHAT
        whole = (await s.http.post(path, json=body | {"prompt_logprobs": 2})).json()
        found = whole.get("prompt_logprobs") or whole["choices"][0]["prompt_logprobs"]
        prompt = list(s.scheduler.submitted[0].prompt_ids)
        assert found[0] is None and len(found) == len(prompt)
        for token, row, entry in zip(prompt[1:], rows(prompt, [], 2)[1:], found[1:], strict=True):
            assert row is not None
            assert entry[str(token)]["logprob"] == row.logprob
            assert entry[str(token)]["decoded_token"] == name(s, token)
            assert entry[str(row.top[1][0])]["rank"] == 2


async def test_several_prompts_and_choices(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        body = {"prompt": ["one", "and two"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 5}
        whole = await both(s.http, "/v1/completions", body | {"seed": 3})
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        starts = [choice["text"][:3] for choice in whole["choices"]]
        assert starts == ["one", "one", "and", "and"]
        read = sum(len(said(s.tokenizer, text, end=False)) for text in body["prompt"])
        assert whole["usage"]["prompt_tokens"] == read
        assert whole["usage"]["completion_tokens"] == 4 * 5
        assert [params.choice for params in s.scheduler.submitted[:4]] == [0, 1, 0, 1]


async def test_grpc_tells_the_same(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        request = pb.GenerateRequest(
            text="once", max_tokens=9, logprobs=2, prompt_logprobs=1, echo=True,
            return_token_ids=True,
        )  # fmt: skip
        messages = await generate(s, request)
        ids, output = said(s.tokenizer, "once", end=False), said(s.tokenizer, TEXT)[:9]
        text = "".join(message.text for message in messages)
        assert text == "once" + s.tokenizer.decode(output)
        assert list(messages[0].prompt_token_ids) == ids
        first, *scores = messages[0].prompt_logprobs
        assert not first.HasField("logprob") and first.token == ids[0]
        expected = rows(ids, output, 2)
        assert [row.logprob for row in scores] == [row.logprob for row in expected[1 : len(ids)]]
        found = [row for message in messages for row in message.logprobs]
        assert [row.token for row in found] == output
        for row, right in zip(found, expected[len(ids) :], strict=True):
            assert right is not None and row.logprob == right.logprob
            assert list(row.top_ids) == [token for token, _ in right.top]
        assert all(len(m.logprobs) == len(m.token_ids) for m in messages)
        assert not any(message.prompt_logprobs for message in messages[1:])
