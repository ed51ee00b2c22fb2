"""Chat templates: messages to one prompt text, as the model was trained to see them.

A checkpoint's template is code from a stranger. It is rendered in jinja2's immutable sandbox with
the names that Hugging Face's libraries give to templates, and with plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.tokenizer import Tokenizer
from slipstream.errors import ConfigError, InvalidRequest

RESERVED = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "continue_final_message"}
)
"""Template variables that a request's own variables may not replace."""


_END = "\x03\ue000"  # stands behind the text that an answer goes on from


class ChatTemplate:
    """A compiled template and the special tokens it may name.

    Attributes:
        source: the template as the checkpoint has it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError when `source` does not parse."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint folder, None when it has none.

        chat_template.jinja goes before tokenizer_config.json, where several may be named: then it
        is the one called "default". Raises ConfigError naming what cannot be used.
        """
        path = folder / "chat_template.jinja"
        source: Any = (
            path.read_text(encoding="utf-8")
            if path.is_file()
            else tokenizer.config.get("chat_template")
        )
        if source is None:
            return None
        if isinstance(source, list):
            named = {item.get("name"): item.get("template") for item in source}
            if "default" not in named:
                raise ConfigError(f"chat_template: none is named 'default', got {list(named)}")
            source = named["default"]
        if not isinstance(source, str):
            raise ConfigError(f"chat_template: expected a string, got {type(source).__name__}")
        return cls(source, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `variables` are the request's own, such as a switch for thinking.

        With `continue_final_message` it ends where the text of the last message does. Raises
        InvalidRequest naming `messages` when the template refuses them.
        """
        values = {**self._special_tokens, **(variables or {})}
        values.update(add_generation_prompt=add_generation_prompt)
        values.update(tools=list(tools) or None, documents=None)
        if not continue_final_message:
            return self._render(values, messages)
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{_END} "}
        text, mark, rest = self._render(values, [*before, marked]).rpartition(_END)
        if not mark:
            raise InvalidRequest(
                "continue_final_message: the model's chat template does not show the last message",
                "continue_final_message",
            )
        # A template that strips its messages took the space: the text is stripped as well.
        return text if rest.startswith(" ") else text.rstrip()

    def _render(self, values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render({**values, "messages": messages})
        except Exception as error:  # templates fail in any way that Python code can
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", "messages"
            ) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` for templates: constructors only, no way to its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` for templates, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameters: a template may call namespace(self=...).
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace: {name!r} begins with an underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models have never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
