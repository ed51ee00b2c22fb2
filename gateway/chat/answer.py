"""One choice's answer taken apart: thinking, content and tool calls, as OpenAI's API gives them.

A whole answer is one that came in a single piece: streamed and unstreamed answers are made by the
same code, and parts that depend on the whole text only are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gateway.chat.calls import CallDelta, CallFinder
from gateway.chat.formats import ThinkFormat, ToolFormat
from gateway.chat.reasoning import Thinking, ThinkingSplitter


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one request are read; every choice gets its own parser.

    Attributes:
        think: None when no thinking part is split off.
        thinking: where the prompt leaves the answer.
        tools: None when calls stay text.
        names: the declared functions.
        parallel: whether more than one call is given out.
    """

    think: ThinkFormat | None = None
    thinking: Thinking = Thinking.CLOSED
    tools: ToolFormat | None = None
    names: Collection[str] = ()
    parallel: bool = True

    @property
    def plain(self) -> bool:
        """Whether all text is content, so that no parser is needed."""
        return self.tools is None and (self.think is None or self.thinking is Thinking.CLOSED)

    @property
    def marks(self) -> frozenset[str]:
        """Texts that must reach the parser even where special tokens are not shown."""
        found: set[str] = set()
        if self.think is not None and self.thinking is not Thinking.CLOSED:
            found |= {self.think.opening, self.think.closing}
        if self.tools is not None:
            found |= {self.tools.opening, self.tools.closing}
        return frozenset(filter(None, found))


PLAIN = AnswerFormat()
"""All text is content."""


@dataclass(slots=True)
class AnswerDelta:
    """What was added to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def body(self) -> dict[str, Any]:
        """The `delta` of a stream's chunk: only what there is."""
        body: dict[str, Any] = {}
        if self.reasoning:
            body["reasoning_content"] = self.reasoning
        if self.content:
            body["content"] = self.content
        if self.calls:
            body["tool_calls"] = [_call_body(call) for call in self.calls]
        return body

    def message(self) -> dict[str, Any]:
        """The `message` of a whole answer, of which this is all."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if not self.content and (self.calls or self.reasoning):
            message["content"] = None
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls: dict[int, dict[str, Any]] = {}
        for call in self.calls:
            if call.name is None:
                calls[call.index]["function"]["arguments"] += call.arguments
            else:
                calls[call.index] = _call_body(call)
                del calls[call.index]["index"]
        if calls:
            message["tool_calls"] = list(calls.values())
        return message


def _call_body(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


class AnswerParser:
    """Takes the text of one choice."""

    __slots__ = ("_calls", "_thinking")

    def __init__(self, form: AnswerFormat) -> None:
        self._thinking: ThinkingSplitter | None = None
        self._calls: CallFinder | None = None
        if form.think is not None:
            self._thinking = ThinkingSplitter(form.think, form.thinking)
        if form.tools is not None:
            self._calls = CallFinder(form.tools, form.names, parallel=form.parallel)

    def feed(self, text: str, last: bool) -> AnswerDelta:
        """What became certain with `text`; with `last`, all that is left."""
        reasoning, content = self._thinking.feed(text) if self._thinking else ("", text)
        if last and self._thinking:
            more, rest = self._thinking.end()
            reasoning, content = reasoning + more, content + rest
        if self._calls is None:
            return AnswerDelta(content, reasoning)
        found = self._calls.feed(content)
        if last:
            rest_found = self._calls.end()
            found.content += rest_found.content
            found.calls += rest_found.calls
        return AnswerDelta(found.content, reasoning, found.calls)

    def finish(self, reason: str | None) -> str | None:
        """OpenAI's finish_reason for an answer that ended for `reason`; None: it goes on.

        Only an answer whose calls are all complete asks for them to be carried out.
        """
        calls = self._calls
        called = calls is not None and calls.count > 0 and calls.complete == calls.count
        return "tool_calls" if called and reason == "stop" else reason


def parser_of(form: AnswerFormat) -> AnswerParser | None:
    """For one choice; None when its text is its content."""
    return None if form.plain else AnswerParser(form)
