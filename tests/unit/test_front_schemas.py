"""Requests: what is accepted, and that every refusal names the field and the bad value."""

from __future__ import annotations

import pytest

from gateway.schemas import ChatBody, CompletionBody, validate
from gateway.servicer import decode
from slipstream.errors import InvalidRequest
from slipstream.v1 import gateway_pb2 as pb

PROMPT = {"prompt": "x"}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_of_every_kind(given: object, prompts: list[object]) -> None:
    assert validate(CompletionBody, {"prompt": given}).prompt == prompts


@pytest.mark.parametrize(
    ("data", "param", "value"),
    [
        ({}, "prompt", "required"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "''"),
        ({"prompt": []}, "prompt", "[]"),
        ({"prompt": ["a", ""]}, "prompt[1]", "''"),
        ({"prompt": [[1], []]}, "prompt[1]", "[]"),
        ({"prompt": 5}, "prompt", "5"),
        ({"prompt": {"a": 1}}, "prompt", "{'a': 1}"),
        ({"prompt": [1, None]}, "prompt[1]", "null"),
        ({"prompt": [1, -4]}, "prompt[1]", "-4"),
        ({"prompt": [True]}, "prompt[0]", "True"),
        ({"prompt": [[1], [2.5]]}, "prompt[1][0]", "2.5"),
        ({"prompt": ["a", [1]]}, "prompt[1]", "[1]"),
        (PROMPT | {"temperature": "hot"}, "temperature", "'hot'"),
        (PROMPT | {"temperature": -1}, "temperature", "-1"),
        (PROMPT | {"temperature": 2.5}, "temperature", "2.5"),
        (PROMPT | {"temperature": True}, "temperature", "True"),
        (PROMPT | {"temperature": float("nan")}, "temperature", "nan"),
        (PROMPT | {"top_p": 0}, "top_p", "0"),
        (PROMPT | {"top_p": 1.5}, "top_p", "1.5"),
        (PROMPT | {"top_k": -2}, "top_k", "-2"),
        (PROMPT | {"top_k": 1.0}, "top_k", "1.0"),
        (PROMPT | {"seed": 2**64}, "seed", str(2**64)),
        (PROMPT | {"max_tokens": 0}, "max_tokens", "0"),
        (PROMPT | {"max_tokens": "5"}, "max_tokens", "'5'"),
        (PROMPT | {"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
        (PROMPT | {"min_tokens": 20}, "min_tokens", "20"),
        (PROMPT | {"n": 0}, "n", "0"),
        (PROMPT | {"n": 129}, "n", "129"),
        ({"prompt": ["a", "b"], "n": 100}, "n", "200"),
        (PROMPT | {"stop": ["a"] * 17}, "stop", "17"),
        (PROMPT | {"stop": ["a", ""]}, "stop[1]", "''"),
        (PROMPT | {"stop": [None]}, "stop[0]", "null"),
        (PROMPT | {"stop": 7}, "stop", "7"),
        (PROMPT | {"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "'a'"),
        (PROMPT | {"stop_token_ids": [None]}, "stop_token_ids[0]", "null"),
        (PROMPT | {"ignore_eos": "yes"}, "ignore_eos", "'yes'"),
        (PROMPT | {"stream": 1}, "stream", "1"),
        (PROMPT | {"stream_options": {"include_usage": True}}, "stream_options", "stream false"),
        (
            PROMPT | {"stream": True, "stream_options": {"include_usage": 3}},
            "stream_options.include_usage",
            "3",
        ),
        (PROMPT | {"speculative": {"enabled": "no"}}, "speculative.enabled", "'no'"),
        (PROMPT | {"speculative": 1}, "speculative", "1"),
        (PROMPT | {"model": 3}, "model", "3"),
        (PROMPT | {"user": 3}, "user", "3"),
        (PROMPT | {"logprobs": 0}, "logprobs", "0"),
        (PROMPT | {"logprobs": 5}, "logprobs", "5"),
        (PROMPT | {"presence_penalty": 0.5}, "presence_penalty", "0.5"),
        (PROMPT | {"logit_bias": {"5": 1}}, "logit_bias", "{'5': 1}"),
        (PROMPT | {"echo": True}, "echo", "True"),
        (PROMPT | {"best_of": 3}, "best_of", "3"),
        (PROMPT | {"suffix": "end"}, "suffix", "'end'"),
        (PROMPT | {"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ],
)
def test_bad_completions(data: dict[str, object], param: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(CompletionBody, data)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 4}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages(messages: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatBody, {"messages": messages})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("functions", [{}]),
        ("response_format", {"type": "json_schema"}),
        ("reasoning_effort", "high"),
        ("continue_final_message", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: is not supported yet") as caught:
        validate(ChatBody, MESSAGES | {name: value})
    assert caught.value.param == name


def test_neutral_values_and_unknown_fields_pass() -> None:
    body = validate(
        ChatBody,
        MESSAGES
        | {
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": {},
            "logprobs": False,
            "top_logprobs": None,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "store": True,
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "something_new": [1, 2, 3],
        },
    )
    assert body.n == 1


def test_null_counts_as_absent() -> None:
    names = CompletionBody.model_fields.keys() - {"prompt"}
    body = validate(CompletionBody, PROMPT | dict.fromkeys(names))
    assert body == validate(CompletionBody, PROMPT)
    assert body.max_tokens == 16
    nested = validate(CompletionBody, PROMPT | {"speculative": {"stats": True, "enabled": None}})
    assert nested.speculative.enabled


def test_the_newer_name_of_the_limit_wins() -> None:
    body = validate(ChatBody, MESSAGES | {"max_tokens": 5, "max_completion_tokens": 9})
    assert body.token_limit == 9
    assert validate(ChatBody, MESSAGES).token_limit is None


def test_text_parts_and_the_developer() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = validate(ChatBody, {"messages": [{"role": "developer", "content": parts}]})
    assert body.messages == [{"role": "system", "content": "one\ntwo"}]


@pytest.mark.parametrize("data", [None, 5, "text", [1]])
def test_a_body_that_is_no_object(data: object) -> None:
    with pytest.raises(InvalidRequest, match="body: must be an object"):
        validate(CompletionBody, data)


def test_template_variables_may_not_replace_the_request() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatBody, MESSAGES | {"chat_template_kwargs": {"messages": []}})
    assert caught.value.param == "chat_template_kwargs.messages"


def test_grpc_requests_become_the_same_body() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2]),
        max_tokens=7,
        temperature=0.0,
        top_k=3,
        seed=2**63,
        stop=["a"],
        stop_token_ids=[9],
        n=2,
        speculative=pb.Speculative(stats=True, enabled=False),
    )
    assert decode(request) == validate(
        CompletionBody,
        {
            "prompt": [1, 2],
            "max_tokens": 7,
            "temperature": 0.0,
            "top_k": 3,
            "seed": 2**63,
            "stop": ["a"],
            "stop_token_ids": [9],
            "n": 2,
            "speculative": {"stats": True, "enabled": False},
        },
    )
    assert decode(pb.GenerateRequest(text="x")) == validate(CompletionBody, PROMPT)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
        (pb.GenerateRequest(text="x", temperature=-1), "temperature"),
        (pb.GenerateRequest(text="x", max_tokens=0), "max_tokens"),
        (pb.GenerateRequest(text="x", stop=[""]), "stop[0]"),
    ],
)
def test_bad_grpc_requests(request_: pb.GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(request_)
    assert caught.value.param == param
