"""The REST door through a real socket: answers, streams, what is told beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import openai
import pytest

from gateway.request import GenerateParams
from tests.fakes.front import CHAT, PROMPT, TEXT, events, idle, said, stage

pytestmark = pytest.mark.anyio


def outcome(response: httpx.Response) -> tuple[str, str, dict[str, int]]:
    """Text, finish reason and usage of a completion of one choice, whole or streamed."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        whole = response.json()
        (choice,) = whole["choices"]
        return choice["text"], choice["finish_reason"], whole["usage"]
    *chunks, last = events(response.text)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    return text, chunks[-1]["choices"][0]["finish_reason"], last["usage"]


async def test_a_completion_whole_and_streamed(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        whole = (await s.http.post("/v1/completions", json=PROMPT)).json()
        (choice,) = whole["choices"]
        assert choice == {
            "index": 0,
            "text": TEXT,
            "logprobs": None,
            "finish_reason": "stop",
        }
        tokens = len(said(s.tokenizer, TEXT))
        assert whole["object"] == "text_completion" and whole["model"] == "fake-model"
        assert whole["id"].startswith("cmpl-")
        assert whole["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": tokens,
            "total_tokens": 3 + tokens,
        }
        response = await s.http.post("/v1/completions", json=PROMPT | {"stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = events(response.text)
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
        assert not any("usage" in chunk for chunk in chunks)


async def test_usage_in_a_stream_when_asked_for(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc", end=False) as s:
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        chunks = events((await s.http.post("/v1/chat/completions", json=body)).text)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_the_first_chat_delta_carries_the_role(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        body = CHAT | {"stream": True, "n": 2}
        chunks = events((await s.http.post("/v1/chat/completions", json=body)).text)
        for index in range(2):
            deltas = [
                chunk["choices"][0]["delta"]
                for chunk in chunks
                if chunk["choices"][0]["index"] == index
            ]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta["content"] for delta in deltas) == TEXT
            assert not any("role" in delta for delta in deltas[1:])
        assert chunks[0]["object"] == "chat.completion.chunk"
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert s.scheduler.submitted[0].prompt_ids == tuple(said(s.tokenizer, prompt, end=False))


async def test_the_openai_client(tmp_path: Path) -> None:
    async with (
        stage(tmp_path, TEXT, served_names=["mine"]) as s,
        openai.AsyncOpenAI(
            base_url=s.url + "/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False),
        ) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["mine"]
        answer = await client.chat.completions.create(model="mine", **CHAT)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="mine", stream=True, extra_body={"speculative": {"stats": True}}, **CHAT
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert chunks[-1].speculative["steps"] > 0
        text = await client.completions.create(model="mine", prompt=[5, 6], max_tokens=100)
        assert text.choices[0].text == TEXT
        with pytest.raises(openai.NotFoundError, match="other"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="mine", prompt="x", temperature=9)
        assert caught.value.param == "temperature"


async def test_several_prompts_and_choices_keep_their_places(tmp_path: Path) -> None:
    def script(params: GenerateParams) -> Sequence[int]:
        return [*params.prompt_ids, 10 + params.choice, 2]

    async with stage(tmp_path, script=script) as s:
        body = {"prompt": [[20, 21], [30]], "n": 2, "seed": -1}
        whole = (await s.http.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        expected = [s.tokenizer.decode([*ids, 10 + n]) for ids in ([20, 21], [30]) for n in (0, 1)]
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert whole["usage"]["prompt_tokens"] == 3
        assert whole["usage"]["completion_tokens"] == 4 + 4 + 3 + 3
        assert {params.seed for params in s.scheduler.submitted} == {2**64 - 1}
        assert [params.choice for params in s.scheduler.submitted] == [0, 1, 0, 1]


async def test_speculative_statistics(tmp_path: Path) -> None:
    async with stage(tmp_path, "abcdefgh", end=False, per_step=3) as s:
        body = PROMPT | {"max_tokens": 8, "speculative": {"stats": True}}
        whole = (await s.http.post("/v1/completions", json=body)).json()
        # One token from prefill, then runs of 3, 3 and 1.
        stats = {"steps": 3, "tau": pytest.approx(7 / 3), "accepted": [2] * 3, "nodes": [3] * 3}
        assert whole["speculative"] == stats
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await s.http.post("/v1/completions", json=body)).text)
        assert chunks[-1]["speculative"] == chunks[-2]["speculative"] == stats
        assert not any("speculative" in chunk for chunk in chunks[:-2])
        body = {"prompt": "x", "n": 2, "max_tokens": 8, "speculative": {"stats": True}}
        whole = (await s.http.post("/v1/completions", json=body)).json()
        assert [choice["speculative"] for choice in whole["choices"]] == [stats, stats]
        assert whole["speculative"]["steps"] == 6
        assert whole["speculative"]["tau"] == pytest.approx(7 / 3)
        body = PROMPT | {"speculative": {"enabled": False}}
        assert "speculative" not in (await s.http.post("/v1/completions", json=body)).json()
        assert not s.scheduler.submitted[-1].draft


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_text_and_request(tmp_path: Path, stream: bool) -> None:
    long = TEXT + " and on" * 50
    async with stage(tmp_path, long) as s:
        body = PROMPT | {"stop": ["字: t", "nowhere"], "stream": stream, "max_tokens": 400}
        if stream:
            body["stream_options"] = {"include_usage": True}
        ids = said(s.tokenizer, long)
        for per_step in (1, 2, 5, 40):
            s.scheduler.per_step = per_step
            response = await s.http.post("/v1/completions", json=body)
            text, reason, usage = outcome(response)
            assert (text, reason) == (TEXT[: TEXT.index("字")], "stop")
            count = usage["completion_tokens"]
            assert "字: t" in s.tokenizer.decode(ids[:count])
            assert "字: t" not in s.tokenizer.decode(ids[: count - 1])
            await idle(s)


async def test_end_tokens_and_limits_reach_the_scheduler(tmp_path: Path) -> None:
    async with stage(tmp_path, "abc", max_model_len=100) as s:
        for body in (
            {"prompt": [5], "stop_token_ids": [7, 9], "top_k": -1, "top_p": 0.5, "temperature": 0},
            {"prompt": [5], "ignore_eos": True, "min_tokens": 2, "max_tokens": 3},
        ):
            assert (await s.http.post("/v1/completions", json=body)).status_code == 200
        assert (await s.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        first, second, chat = s.scheduler.submitted
        assert (first.stop_ids, first.max_tokens) == ({2, 7, 9}, 16)
        assert (first.top_k, first.top_p, first.temperature) == (0, 0.5, 0)
        assert first.seed is None
        assert (second.stop_ids, second.min_tokens, second.max_tokens) == (frozenset(), 2, 3)
        assert chat.max_tokens == 100 - len(chat.prompt_ids)
        assert chat.temperature == 1.0


async def test_metrics(tmp_path: Path) -> None:
    async with stage(tmp_path, TEXT) as s:
        await s.http.post("/v1/completions", json=PROMPT)
        await s.http.post("/v1/completions", json={"prompt": ""})
        response = await s.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        samples = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in response.text.splitlines()
            if not line.startswith("#")
        }
        assert all(name.startswith("slipstream_") for name in samples)
        assert samples['slipstream_requests_total{endpoint="completion",status="200"}'] == 1
        assert samples['slipstream_requests_total{endpoint="completion",status="400"}'] == 1
        tokens = len(said(s.tokenizer, TEXT))
        assert samples["slipstream_output_tokens_total"] == tokens
        assert samples["slipstream_prompt_tokens_total"] == 3
        assert samples["slipstream_time_to_first_token_seconds_count"] == 1
        assert samples["slipstream_free_slots"] == 8
        assert samples["slipstream_queue_length"] == 0
        assert samples['slipstream_step_part_seconds_total{part="computed"}'] == 0.005
        assert samples["slipstream_scheduler_something_new_total"] == 3
        assert samples['slipstream_plan_latency_seconds{quantile="0.99"}'] == 2e-6
        steps = samples["slipstream_accepted_draft_tokens_count"]
        assert samples["slipstream_request_tau_sum"] == pytest.approx((tokens - 1) / steps)


async def test_the_openapi_document_names_the_bodies(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        document = (await s.http.get("/openapi.json")).json()
        post = document["paths"]["/v1/chat/completions"]["post"]
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ChatBody"}
        assert "speculative" in document["components"]["schemas"]["ChatBody"]["properties"]
