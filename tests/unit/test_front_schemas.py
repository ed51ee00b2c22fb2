"""Requests: what is accepted, and that every refusal names the field and the bad value."""

from __future__ import annotations

import pytest

from gateway.schemas import ChatBody, CompletionBody, unknown_fields, validate
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
        (PROMPT | {"logprobs": 21}, "logprobs", "21"),
        (PROMPT | {"logprobs": True}, "logprobs", "True"),
        (PROMPT | {"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
        (PROMPT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "1"),
        (PROMPT | {"presence_penalty": 2.5}, "presence_penalty", "2.5"),
        (PROMPT | {"frequency_penalty": "a"}, "frequency_penalty", "'a'"),
        (PROMPT | {"repetition_penalty": 0}, "repetition_penalty", "0"),
        (PROMPT | {"min_p": 1.5}, "min_p", "1.5"),
        (PROMPT | {"logit_bias": [1]}, "logit_bias", "[1]"),
        (PROMPT | {"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
        (PROMPT | {"logit_bias": {"-5": 1}}, "logit_bias", "'-5'"),
        (PROMPT | {"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "'05'"),
        (PROMPT | {"logit_bias": {"5": 101}}, "logit_bias.5", "101"),
        (PROMPT | {"logit_bias": {"5": None}}, "logit_bias.5", "null"),
        (PROMPT | {"logit_bias": {"5": True}}, "logit_bias.5", "True"),
        (PROMPT | {"bad_words": "no"}, "bad_words", "'no'"),
        (PROMPT | {"bad_words": ["no", ""]}, "bad_words[1]", "''"),
        (PROMPT | {"echo": 1}, "echo", "1"),
        (PROMPT | {"speculative": {"width": 0}}, "speculative.width", "0"),
        (PROMPT | {"speculative": {"budget": 257}}, "speculative.budget", "257"),
        (PROMPT | {"n": 2, "best_of": 1}, "best_of", "1"),
        (PROMPT | {"use_beam_search": True}, "use_beam_search", "True"),
        (PROMPT | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "5"),
        (PROMPT | {"best_of": 3}, "best_of", "3"),
        (PROMPT | {"suffix": "end"}, "suffix", "'end'"),
        (PROMPT | {"regex": "a+"}, "regex", "'a+'"),
        (PROMPT | {"min_new_tokens": 3}, "min_new_tokens", "3"),
        (PROMPT | {"response_format": "json"}, "response_format", "json"),
        (PROMPT | {"guided_choice": ["a", 1]}, "guided_choice[1]", "1"),
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
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_bad_messages(messages: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatBody, {"messages": messages})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"voice": "a"}),
        ("modalities", ["text", "audio"]),
        ("echo", True),
        ("functions", [{}]),
        ("reasoning_effort", "high"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: is not supported") as caught:
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
    for schema, least in ((CompletionBody, PROMPT), (ChatBody, MESSAGES)):
        names = (schema.model_fields.keys() | schema.unsupported.keys()) - least.keys()
        assert validate(schema, least | dict.fromkeys(names)) == validate(schema, least)
    body = validate(CompletionBody, PROMPT)
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


def test_what_nobody_knows_is_named() -> None:
    data = PROMPT | {
        "store": True,
        "suffix": None,
        "whatever": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "odd": 1},
        "speculative": {"stats": True, "depth": 3},
    }
    found = ["whatever", "stream_options.odd", "speculative.depth"]
    assert list(unknown_fields(CompletionBody, data)) == found
    assert list(unknown_fields(ChatBody, MESSAGES | {"prompt": 1, "tools": []})) == ["prompt"]
    assert list(unknown_fields(ChatBody, [1])) == []


def test_log_probabilities_asked_for() -> None:
    def scores(body: type[ChatBody | CompletionBody], **given: object) -> tuple[object, object]:
        made = validate(body, PROMPT | MESSAGES | given)
        return made.scores, made.prompt_scores

    assert scores(CompletionBody) == scores(CompletionBody, logprobs=False) == (None, None)
    assert scores(CompletionBody, logprobs=0) == (0, None)
    assert scores(CompletionBody, logprobs=3, echo=True) == (3, 3)
    assert scores(CompletionBody, logprobs=3, echo=True, prompt_logprobs=5) == (3, 5)
    assert scores(CompletionBody, echo=True, max_tokens=0) == (None, None)
    assert scores(ChatBody, logprobs=True, top_logprobs=2) == (2, None)
    assert scores(ChatBody, logprobs=True) == (0, None)
    assert scores(ChatBody, logprobs=False) == (None, None)
    with pytest.raises(InvalidRequest, match="^top_logprobs: only allowed with logprobs true"):
        scores(ChatBody, top_logprobs=2)


def test_a_bias_for_each_token() -> None:
    body = validate(CompletionBody, PROMPT | {"logit_bias": {"5": -100, "17": 0.5}, "best_of": 1})
    assert body.logit_bias == {5: -100.0, 17: 0.5}


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
        speculative=pb.Speculative(stats=True, enabled=False, width=2, budget=16),
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=2,
        logit_bias={7: -1.5},
        bad_words=["no"],
        logprobs=0,
        prompt_logprobs=2,
        echo=True,
        include_stop_str_in_output=True,
        return_token_ids=True,
        add_special_tokens=False,
        skip_special_tokens=False,
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
            "speculative": {"stats": True, "enabled": False, "width": 2, "budget": 16},
            "min_p": 0.25,
            "presence_penalty": -1,
            "frequency_penalty": 0.5,
            "repetition_penalty": 2,
            "logit_bias": {"7": -1.5},
            "bad_words": ["no"],
            "logprobs": 0,
            "prompt_logprobs": 2,
            "echo": True,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
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
