"""From a chat request to its prompt, the way its answers are read, and what binds them.

The chat template decides more than the prompt: which way its model writes tool calls, whether it
thinks first, and whether the prompt leaves it in the middle of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.chat.answer import AnswerFormat
from gateway.chat.formats import (
    ReasoningParserName,
    ToolParserName,
    think_format,
    tool_format,
)
from gateway.chat.messages import may_continue
from gateway.chat.reasoning import Thinking, thinking_after
from gateway.chat.tools import ToolUse
from gateway.grammar import FIELDS, Bound, constraint
from gateway.schemas import ChatBody, GenerateBody
from gateway.template import RESERVED, ChatTemplate
from slipstream.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the operator says of chats; `variables` are for the template, below a request's own."""

    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)


NO_OPTIONS = ChatOptions()


@dataclass(frozen=True, slots=True)
class Question:
    """A chat request, read."""

    prompt: str
    form: AnswerFormat
    bound: Bound


def bound_text(body: GenerateBody) -> Bound:
    """What binds an answer that is nothing but text. Raises InvalidRequest naming the field."""
    return Bound(constraint({name: getattr(body, name) for name in FIELDS}))


class Dialogue:
    """Chats with one model."""

    def __init__(self, template: ChatTemplate, options: ChatOptions = NO_OPTIONS) -> None:
        """Raises ConfigError naming an option that cannot be had."""
        for name in options.variables:
            if name in RESERVED:
                raise ConfigError(f"--chat-template-kwargs: {name} is each request's own")
        self._template = template
        self._variables = dict(options.variables)
        self._tools = tool_format(options.tool_parser, template.source)
        self._think = think_format(options.reasoning_parser, template.source)

    def read(self, body: ChatBody) -> Question:
        """Raises InvalidRequest naming the field that does not fit the others or the template."""
        use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
        if use.forced and self._tools is None:
            raise InvalidRequest("tool_choice: this server reads no tool calls", "tool_choice")
        continued = may_continue(body.messages) if body.continue_final_message else None
        prompt = self._template.render(
            body.messages,
            add_generation_prompt=body.opens_answer,
            continue_final_message=continued is not None,
            tools=use.declared,
            variables=self._variables | body.chat_template_kwargs,
        )
        return self._question(body, use, prompt, continued)

    def _question(
        self, body: ChatBody, use: ToolUse, prompt: str, continued: str | None
    ) -> Question:
        thinking = Thinking.CLOSED
        if self._think is not None:
            thinking = thinking_after(self._think, prompt, continued)
        form = AnswerFormat(
            self._think,
            thinking,
            self._tools if use.declared else None,
            use.names,
            use.parallel,
        )
        content = bound_text(body).content
        # Content that is bound rules no calls out; calls that are forced rule content out.
        either = content is not None and not use.forced and form.tools is not None
        bound = Bound(
            None if use.forced else content,
            form.tools,
            dict(enumerate(use.declared)) if either else use.forced,
            use.parallel,
            either,
            self._think,
            thinking,
        )
        return Question(prompt, form, bound)
