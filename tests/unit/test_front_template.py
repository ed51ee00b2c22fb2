"""Chat templates render as transformers renders them, and cannot reach out of the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.template import ChatTemplate
from gateway.tokenizer import Tokenizer
from slipstream.errors import ConfigError, InvalidRequest
from tests.tiny import CHAT_TEMPLATE, make_tokenizer

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] | trim ~ '<|im_end|>' }}

{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

HEADERS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{% else %}{% set system = '' %}{% endif %}
<|start|>system<|end|>

Today: {{ strftime_now('%Y') }}{% if not tools is none %}tools{% endif %}
{{ system }}<|eot|>{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
<|start|>{{ m['role'] }}<|end|>

{{ m['content'] }}<|eot|>
{% endfor %}{{ eos_token }}"""

THINKING = """
{%- set ns = namespace(last=-1, count=0) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' and ns.last < 0 %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set ns.count = ns.count + 1 %}
    {%- set text = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content
            else m.content %}
    {%- if loop.index0 <= ns.last %}{{- m.role.upper() + ': ' + text + '\\n' }}
    {%- else %}{{- m.role ~ ': ' ~ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT: ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}({{ ns.count }})"""

JSON_AND_LOOPS = """{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{{ m | tojson }} {{ {'b': '<&>', 'a': ['é', 1.5, none, true]} | tojson(indent=2) }}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}{{ dict(a=1)['a'] }} {{ messages | map(attribute='role') | join(',') }}"""

GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}{% set x = m.content %}{{ x }}{{ eos_token }}
{% endgeneration %}{% else %}
[{{ m.content }}]{{ x }}
{% endif %}
{% endfor %}"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello  "}],
    [
        {"role": "system", "content": "Be brief & <kind>."},
        {"role": "user", "content": "漢字 😀"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    [
        {"role": "user", "content": "a\n\n"},
        {"role": "assistant", "content": "<think>x</think>b"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<think>y</think>c", "name": "bot"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


@pytest.mark.parametrize(
    "source",
    [CHAT_TEMPLATE, CHATML, HEADERS, THINKING, JSON_AND_LOOPS, GENERATION],
    ids=["tiny", "chatml", "headers", "thinking", "json", "generation"],
)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "system", "open"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["plain", "off"])
def test_equal_to_transformers(
    folder: Path,
    theirs: Any,
    source: str,
    conversation: list[dict[str, Any]],
    prompt: bool,
    variables: dict[str, Any],
) -> None:
    template = ChatTemplate(source, Tokenizer.load(folder).special_tokens)
    expected = theirs.apply_chat_template(
        conversation,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=prompt,
        **variables,
    )
    assert (
        template.render(conversation, add_generation_prompt=prompt, variables=variables) == expected
    )


def test_a_template_that_refuses_is_the_clients_error() -> None:
    template = ChatTemplate(HEADERS, {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([{"role": "assistant", "content": "me first"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception.__globals__ }}{{ missing.attribute }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_nothing_outside_the_sandbox_can_be_reached_or_changed(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_the_places_a_template_may_stand(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    messages = [{"role": "user", "content": "x"}]

    def render(value: Any) -> str | None:
        config_path.write_text(json.dumps(config | {"chat_template": value}))
        template = ChatTemplate.load(folder, Tokenizer.load(folder))
        return template and template.render(messages)

    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert render("plain") == "plain"
    assert render(named) == "D"
    assert render(None) is None
    for bad in (named[1:], 5, "{% if"):
        with pytest.raises(ConfigError, match="chat.template"):
            render(bad)
    (folder / "chat_template.jinja").write_text("from the file{{ bos_token }}", encoding="utf-8")
    assert render("plain") == "from the file<|im_start|>"
