"""Splits a thinking part off the beginning of an answer, as the text comes.

What is given out depends on the whole text only, never on how it was cut. White space at the
borders of the two parts belongs to neither: models put line breaks there.
"""

from __future__ import annotations

from enum import Enum, auto

from gateway.chat.formats import ThinkFormat


class Thinking(Enum):
    """Where an answer stands in its thinking part."""

    POSSIBLE = auto()
    """It begins with one if it begins with the opening mark."""
    OPENED = auto()
    """The prompt ended in the opening mark."""
    INSIDE = auto()
    AFTER = auto()
    """Behind the closing mark, before the content's first character."""
    CLOSED = auto()
    """All is content."""


def thinking_after(form: ThinkFormat, prompt: str, continued: str | None) -> Thinking:
    """Where an answer to `prompt` begins; `continued` is the text of a message that it goes on."""
    if continued is not None:
        begun = continued.lstrip().startswith(form.opening)
        inside = begun and form.closing not in continued
        return Thinking.INSIDE if inside else Thinking.CLOSED
    end = prompt.rstrip()
    if end.endswith(form.opening):
        return Thinking.OPENED
    return Thinking.CLOSED if end.endswith(form.closing) else Thinking.POSSIBLE


class ThinkingSplitter:
    """Splits one answer. `held` text could still turn out to be a mark, or white space to drop."""

    __slots__ = ("_form", "_held", "_lead", "state")

    def __init__(self, form: ThinkFormat, state: Thinking) -> None:
        self._form = form
        self._held = ""
        self._lead = state is Thinking.OPENED  # white space still to drop before the thinking
        self.state = state

    def feed(self, text: str) -> tuple[str, str]:
        """The thinking and the content that became certain with `text`."""
        if self.state is Thinking.CLOSED:
            return "", text
        self._held += text
        if self.state in (Thinking.POSSIBLE, Thinking.OPENED) and not self._open():
            return "", ""
        thought = self._think() if self.state is Thinking.INSIDE else ""
        if self.state is Thinking.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self.state = Thinking.CLOSED
        if self.state is not Thinking.CLOSED:
            return thought, ""
        content, self._held = self._held, ""
        return thought, content

    def _open(self) -> bool:
        """Decides about the opening mark; False while more text is needed."""
        text, mark = self._held.lstrip(), self._form.opening
        if mark.startswith(text) and text != mark:
            return False
        if text.startswith(mark):
            self.state, self._held, self._lead = Thinking.INSIDE, text[len(mark) :], True
        else:
            opened = self.state is Thinking.OPENED
            self.state = Thinking.INSIDE if opened else Thinking.CLOSED
        return True

    def _think(self) -> str:
        if self._lead:
            self._held = self._held.lstrip()
            self._lead = not self._held
        head, mark, tail = self._held.partition(self._form.closing)
        if mark:
            self.state, self._held = Thinking.AFTER, tail
            return head.rstrip()
        final = len(
            self._held[: len(self._held) - partial(self._held, self._form.closing)].rstrip()
        )
        thought, self._held = self._held[:final], self._held[final:]
        return thought

    def end(self) -> tuple[str, str]:
        """What is left when the answer has ended."""
        text, self._held = self._held, ""
        if self.state is Thinking.INSIDE or self.state is Thinking.OPENED:
            return text.strip() if self._lead else text.rstrip(), ""
        return "", text


def partial(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` without being all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
