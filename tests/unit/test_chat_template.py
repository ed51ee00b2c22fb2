"""Tools and answers to go on from reach the template as transformers gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.chat.messages import conversation
from gateway.dialogue import ChatOptions, Dialogue
from gateway.settings import GatewaySettings
from gateway.template import ChatTemplate
from gateway.tokenizer import Tokenizer
from slipstream.errors import ConfigError, InvalidRequest
from slipstream.settings import parse
from tests.tiny import CHAT_TEMPLATE, make_tokenizer

HERMES = """{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
    {%- if call.function %}{% set call = call.function %}{% endif %}
    {{- '\\n<tool_call>\\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' }}
    {{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
DROPS = "{% for message in messages %}{{ message.role }}{% endfor %}"

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}},
    }
]
CALLED = conversation(
    [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def test_tools_as_transformers_gives_them(theirs: Any) -> None:
    wanted = theirs.apply_chat_template(
        CALLED, tools=TOOLS, chat_template=HERMES, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(HERMES, {}).render(CALLED, tools=TOOLS) == wanted


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, HERMES, TRIMS], ids=["tiny", "hermes", "trims"])
@pytest.mark.parametrize("text", ["So it", "So it ", " two\nlines\n", "a<|im_end|>", "é 漢"])
def test_going_on_as_transformers_does(theirs: Any, source: str, text: str) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    wanted = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    found = ChatTemplate(source, {}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert found == wanted


def test_a_template_that_shows_no_message() -> None:
    with pytest.raises(InvalidRequest, match="does not show") as caught:
        ChatTemplate(DROPS, {}).render(
            [{"role": "assistant", "content": "a"}], continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"


def test_flags(folder: Path) -> None:
    settings = parse(
        GatewaySettings,
        [
            *("--target", "127.0.0.1:1", "--tool-parser", "hermes", "--reasoning-parser", "none"),
            *("--chat-template-kwargs", '{"enable_thinking": false}'),
        ],
    )
    assert settings.chat() == ChatOptions("hermes", "none", {"enable_thinking": False})
    assert parse(GatewaySettings, ["--target", "a:1"]).chat() == ChatOptions()
    for flag, value in (
        ("--tool-parser", "x"),
        ("--chat-template-kwargs", "{"),
        ("--chat-template-kwargs", "[1]"),
    ):
        with pytest.raises(ConfigError, match="chat.template.kwargs|tool.parser"):
            parse(GatewaySettings, ["--target", "a:1", flag, value])
    template = ChatTemplate.load(folder, Tokenizer.load(folder))
    assert template is not None
    with pytest.raises(ConfigError, match="--chat-template-kwargs: tools"):
        Dialogue(template, ChatOptions(variables={"tools": []}))
