"""Chats through the REST door: templates, thinking, tool calls and grammars, streamed and not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer

from slipstream.grammar import GrammarKind
from slipstream.v1 import common_pb2, gateway_pb2
from slipstream.v1 import gateway_pb2_grpc as rpc
from tests.fakes.front import CHAT, Stage, events, stage
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.anyio

TEMPLATE = """{%- if tools %}{{ '<tool_call>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments['city'] }}{% endfor -%}
{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = {"tools": [WEATHER]}
CALL = '{"name": "weather", "arguments": {"city": "Bern", "when": [1, 2]}}'
ARGUMENTS = '{"city": "Bern", "when": [1, 2]}'
ANSWER = (
    f"<think>\nlet me see\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>\n"
    f"<tool_call>\n{CALL}\n</tool_call>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("chat"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """A model whose marks are special tokens, which are not shown."""
    folder = make_tokenizer(tmp_path)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_special_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    raw.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def with_grammars(s: Stage) -> None:
    s.scheduler.info = replace(s.scheduler.info, grammars=True)


async def ask(s: Stage, **fields: Any) -> Any:
    response = await s.http.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def refused(s: Stage, **fields: Any) -> tuple[str, str]:
    response = await s.http.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def prompt(s: Stage) -> str:
    return s.tokenizer.literal.decode(s.scheduler.submitted[-1].prompt_ids)


def joined(text: str) -> dict[str, Any]:
    """The message and the end that a stream's chunks join to, as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    finish = None
    for chunk in events(text):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return message | {"finish": finish}


@pytest.mark.parametrize("per_step", [1, 3, 50])
async def test_an_answer_with_everything(folder: Path, per_step: int) -> None:
    async with stage(folder, ANSWER, per_step=per_step) as s:
        choice = await ask(s, **TOOLS)
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["reasoning_content"] == "let me see"
        assert message["content"] == "I look."
        calls = [(c["type"], c["function"]) for c in message["tool_calls"]]
        assert calls == [("function", {"name": "weather", "arguments": ARGUMENTS})] * 2
        stream = await s.http.post("/v1/chat/completions", json=CHAT | TOOLS | {"stream": True})
        assert joined(stream.text) == {
            "content": "I look.",
            "reasoning_content": "let me see",
            "calls": [["weather", ARGUMENTS]] * 2,
            "finish": "tool_calls",
        }
        one = await ask(s, **TOOLS, parallel_tool_calls=False)
        assert len(one["message"]["tool_calls"]) == 1


async def test_the_official_client_reads_streamed_calls(folder: Path) -> None:
    async with stage(folder, ANSWER) as s:
        client = AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0)
        async with client, client.chat.completions.stream(
            model="fake-model", messages=CHAT["messages"], tools=[WEATHER]
        ) as stream:  # fmt: skip
            message = (await stream.get_final_completion()).choices[0].message
        assert message.content == "I look."
        assert message.tool_calls is not None
        assert [c.function.arguments for c in message.tool_calls] == [ARGUMENTS] * 2


async def test_without_tools_calls_are_text(folder: Path) -> None:
    async with stage(folder, "<tool_call>{}</tool_call>") as s:
        for fields in ({}, TOOLS | {"tool_choice": "none"}):
            choice = await ask(s, **fields)
            assert choice["message"]["content"] == "<tool_call>{}</tool_call>"
            assert choice["finish_reason"] == "stop"
            assert "weather" not in prompt(s)


async def test_log_probabilities_of_text_that_is_held_back(folder: Path) -> None:
    async with stage(folder, ANSWER) as s:
        fields = TOOLS | {"logprobs": True, "top_logprobs": 1}
        whole = (await ask(s, **fields))["logprobs"]["content"]
        stream = await s.http.post("/v1/chat/completions", json=CHAT | fields | {"stream": True})
        rows = [
            row
            for chunk in events(stream.text)
            for choice in chunk["choices"]
            for row in (choice["logprobs"] or {}).get("content", [])
        ]
        assert rows == whole


async def test_marks_that_are_special_tokens_are_read(marked: Path) -> None:
    async with stage(marked, f"Well. <tool_call>{CALL}</tool_call>") as s:
        with_grammars(s)
        message = (await ask(s, **TOOLS, tool_choice="required"))["message"]
        assert message["content"] == "Well."
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        grammar = s.scheduler.submitted[-1].grammar
        assert grammar is not None
        assert f"<[{s.tokenizer.token_id('<tool_call>')}]>" in grammar.text
        assert (await ask(s))["message"]["content"] == f"Well. {CALL}"


async def test_what_the_template_gets(folder: Path) -> None:
    async with stage(folder, "ok") as s:
        await ask(s, **TOOLS)
        assert prompt(s).startswith(f"<tool_call>{json.dumps(WEATHER)}")
        conversation = [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        await ask(s, messages=conversation)
        assert prompt(s) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
            "<|im_start|>assistant\nBern<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        await ask(s, chat_template_kwargs={"enable_thinking": False})
        assert prompt(s).endswith("</think>\n\n")
        await ask(s, add_generation_prompt=False)
        assert prompt(s).endswith("hi<|im_end|>\n")


async def test_going_on_with_the_last_message(folder: Path) -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "<think>It is "}]
    async with stage(folder, "so.</think> Yes") as s:
        fields: dict[str, Any] = {"messages": begun, "continue_final_message": True}
        message = (await ask(s, **fields))["message"]
        assert (message["reasoning_content"], message["content"]) == ("so.", "Yes")
        assert prompt(s).endswith("assistant\n<think>It is ")
        param, _ = await refused(s, **fields, add_generation_prompt=True)
        assert param == "continue_final_message"
        param, _ = await refused(s, continue_final_message=True)
        assert param == "continue_final_message"


async def test_variables_of_the_server(folder: Path) -> None:
    chosen = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_parser": "none"}
    async with stage(folder, "<think>a</think>b", settings=chosen) as s:
        assert (await ask(s))["message"]["content"] == "<think>a</think>b"
        assert prompt(s).endswith("</think>\n\n")
        await ask(s, chat_template_kwargs={"enable_thinking": True})
        assert prompt(s).endswith("assistant\n")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "param", "kind", "has"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            GrammarKind.LARK,
            "thinking content",
        ),
        ({"guided_regex": "a+", **TOOLS}, "guided_regex", GrammarKind.LARK, "calls | content"),
        ({**TOOLS, "tool_choice": "required"}, "tool_choice", GrammarKind.LARK, "weather"),
        (
            {"guided_json": SCHEMA, "chat_template_kwargs": {"enable_thinking": False}},
            "guided_json",
            GrammarKind.JSON_SCHEMA,
            "integer",
        ),
    ],
)
async def test_grammars_reach_the_scheduler(
    folder: Path, fields: dict[str, Any], param: str, kind: GrammarKind, has: str
) -> None:
    async with stage(folder, "ok") as s:
        found, message = await refused(s, **fields)  # a server without grammars
        assert found == param
        assert message.startswith(f"{param}: ")
        with_grammars(s)
        await ask(s, **fields)
        grammar = s.scheduler.submitted[-1].grammar
        assert grammar is not None
        assert grammar.kind is kind
        assert s.scheduler.submitted[-1].grammar_param == param
        assert has in grammar.text.replace("(", "").replace(")", "")


async def test_tools_that_the_model_may_leave_bind_nothing(folder: Path) -> None:
    async with stage(folder, "ok") as s:
        await ask(s, **TOOLS, response_format={"type": "text"})
        assert s.scheduler.submitted[-1].grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format.json_schema.schema"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
async def test_refusals(folder: Path, fields: dict[str, Any], param: str) -> None:
    async with stage(folder, "ok") as s:
        with_grammars(s)
        assert (await refused(s, **fields))[0] == param
        assert not s.scheduler.submitted


async def test_completions_are_bound_too(folder: Path) -> None:
    async with stage(folder, "ok") as s:
        with_grammars(s)
        body = {"prompt": "a", "guided_choice": ["b", "c"]}
        assert (await s.http.post("/v1/completions", json=body)).status_code == 200
        grammar = s.scheduler.submitted[-1].grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.CHOICE


async def test_grammars_over_grpc(folder: Path) -> None:
    import grpc.aio

    async with stage(folder, "ok") as s, grpc.aio.insecure_channel(s.front.grpc) as channel:
        with_grammars(s)
        stub = rpc.GatewayServiceStub(channel)
        for kind, text, wanted in (
            (common_pb2.GRAMMAR_KIND_REGEX, "a+", GrammarKind.REGEX),
            (common_pb2.GRAMMAR_KIND_JSON_SCHEMA, json.dumps(SCHEMA), GrammarKind.JSON_SCHEMA),
            (common_pb2.GRAMMAR_KIND_JSON_OBJECT, "", GrammarKind.JSON_SCHEMA),
            (common_pb2.GRAMMAR_KIND_CHOICE, '["a"]', GrammarKind.CHOICE),
            (common_pb2.GRAMMAR_KIND_LARK, 'start: "a"', GrammarKind.LARK),
        ):
            request = gateway_pb2.GenerateRequest(
                text="x", grammar=common_pb2.Grammar(kind=kind, text=text)
            )
            assert [piece async for piece in stub.Generate(request)]
            grammar = s.scheduler.submitted[-1].grammar
            assert grammar is not None
            assert grammar.kind is wanted
        for kind, text in (
            (common_pb2.GRAMMAR_KIND_UNSPECIFIED, "a"),
            (common_pb2.GRAMMAR_KIND_CHOICE, "["),
            (common_pb2.GRAMMAR_KIND_REGEX, "("),
        ):
            request = gateway_pb2.GenerateRequest(
                text="x", grammar=common_pb2.Grammar(kind=kind, text=text)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [piece async for piece in stub.Generate(request)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_slow_check_delays_nobody_else(folder: Path) -> None:
    async with stage(folder, "ok") as s:
        with_grammars(s)
        slow = asyncio.create_task(refused(s, guided_regex="(a{10000}){10000}"))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(ask(s), 1.0)
        assert not slow.done()
        assert (await slow)[0] == "guided_regex"


@pytest.mark.parametrize(
    ("fields", "finish", "arguments"),
    [
        ({"stop": ["Bern"]}, "stop", '{"city": "'),
        ({"stop": ["</tool_call>"]}, "tool_calls", ARGUMENTS),
        ({"stop": ["weather"]}, "stop", None),
        ({"max_tokens": 60}, "length", None),
    ],
)
async def test_a_call_that_is_cut_is_not_to_be_carried_out(
    folder: Path, fields: dict[str, Any], finish: str, arguments: str | None
) -> None:
    async with stage(folder, f"<tool_call>\n{CALL}\n</tool_call>") as s:
        choice = await ask(s, **TOOLS, **fields)
        assert choice["finish_reason"] == finish
        calls = choice["message"].get("tool_calls", [])
        if arguments is not None:
            assert [call["function"]["arguments"] for call in calls] == [arguments]
        body = CHAT | TOOLS | fields | {"stream": True}
        streamed = joined((await s.http.post("/v1/chat/completions", json=body)).text)
        assert streamed["finish"] == finish
        assert streamed["calls"] == [
            [call["function"]["name"], call["function"]["arguments"]] for call in calls
        ]


async def test_a_function_that_nobody_declared_is_text(folder: Path) -> None:
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    async with stage(folder, text) as s:
        choice = await ask(s, **TOOLS)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
        assert "tool_calls" not in choice["message"]
