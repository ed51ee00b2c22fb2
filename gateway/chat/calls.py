"""Finds the tool calls in an answer as its text comes.

What is given out depends on the whole text only, never on how it was cut. Text before and between
calls stays content, without the white space that separates it from them; what looks like a call
and turns out to be none before its function is known stays content to the letter, and so does a
call of a function that was not declared. A call that breaks off later stays one that is cut short.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.chat.formats import ToolFormat
from gateway.chat.reader import SPACE, CallReader
from gateway.chat.reasoning import partial

_SEPARATORS = SPACE + ",;[]"
_DROPPED = -1  # in place of a call's number


def new_call_id() -> str:
    """A name for one call, by which the tool's answer refers to it."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class CallDelta:
    """What was added to call number `index`; `id` and `name` are there once, at its beginning."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Found:
    """Content and calls, since the last time."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _At(Enum):
    TEXT = auto()
    CALLS = auto()  # where calls may begin
    CALL = auto()
    SKIP = auto()  # behind a broken call: to the next mark


class CallFinder:
    """The tool calls of one answer.

    From a mark, or JSON at the beginning, until a function's name is known, what is read is on
    trial: kept in `_tried`, to become content if it is no call.

    Attributes:
        count: calls given out.
        complete: those of them that came to their end.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        parallel: bool = True,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`names` are the declared functions; without `parallel` calls after the first are
        dropped."""
        self._form = form
        self._names = frozenset(names)
        self._parallel = parallel
        self._make_id = make_id
        self._at = _At.TEXT
        self._held = ""  # not decided yet
        self._trial = False
        self._tried = ""
        self._lead = 0  # characters of a failed trial that are not looked at again
        self._loose = False  # no closing mark will come
        self._fresh = True  # only white space so far
        self._behind = False  # directly behind calls, where white space is dropped
        self._reader = CallReader(self._names)
        self._number: int | None = None  # of the reader's call, once its function is known
        self._found = Found()
        self.count = self.complete = 0

    def feed(self, text: str) -> Found:
        """What became certain with `text`."""
        self._held += text
        self._run()
        found, self._found = self._found, Found()
        return found

    def end(self) -> Found:
        """What is left when the answer has ended."""
        while self._trial:
            self._give_up()
            self._run()
        if self._at is _At.TEXT and (self._held.strip() or not self._behind):
            self._say(len(self._held))
        self._held = ""
        found, self._found = self._found, Found()
        return found

    def _run(self) -> None:
        step = {
            _At.TEXT: self._text,
            _At.CALLS: self._calls,
            _At.CALL: self._call,
            _At.SKIP: self._skip,
        }
        while self._held and step[self._at]():
            pass

    # Each of these takes what it can from the held text; False when it needs more.

    def _text(self) -> bool:
        held, mark = self._held, self._form.opening
        if self._form.bare and self._fresh:
            start = held.lstrip(SPACE)
            if not start:
                return False
            if start[0] in "{[":
                size = len(held) - len(start)
                return self._try(size, size + 1, marked=False)
        where = held.find(mark) if mark else -1
        if where < 0:
            undecided = partial(held, mark)
            self._say(len(held[: len(held) - undecided].rstrip(SPACE)))
            return False
        before = len(held[:where].rstrip(SPACE))
        self._say(before)
        size = where - before + len(mark)
        return self._try(size, size, marked=True)

    def _calls(self) -> bool:
        held, form = self._held, self._form
        gap = len(held) - len(held.lstrip(_SEPARATORS))
        if gap:
            self._pass(gap)
            return True
        if held[0] == "{":
            self._reader, self._number = CallReader(self._names), None
            self._at = _At.CALL
            if self._loose and not self._trial:
                self._trial, self._tried, self._lead = True, "", 1
            return True
        if not self._trial:
            for mark in filter(None, (form.closing, form.opening)):
                if held.startswith(mark):
                    self._held = held[len(mark) :]
                    self._at = _At.TEXT if mark is form.closing else _At.CALLS
                    return True
                if mark.startswith(held):
                    return False
        self._break()
        return True

    def _call(self) -> bool:
        reader = self._reader
        self._pass(reader.feed(self._held, 0))
        if reader.name is not None:
            self._give(reader)
        if reader.failed:
            self._break()
        elif reader.done:
            self.complete += self._number != _DROPPED
            self._at = _At.CALLS
        return True

    def _skip(self) -> bool:
        held, form = self._held, self._form
        marks = [mark for mark in (form.closing, form.opening) if mark]
        found = min((at for mark in marks if (at := held.find(mark)) >= 0), default=-1)
        if found < 0:
            keep = max(partial(held, mark) for mark in marks)
            self._held = held[len(held) - keep :]
            return False
        closed = bool(form.closing) and held.startswith(form.closing, found)
        self._held = held[found + len(form.closing if closed else form.opening) :]
        self._at = _At.TEXT if closed else _At.CALLS
        return True

    def _give(self, reader: CallReader) -> None:
        """Gives out what is new of a call whose function is known."""
        self._trial, self._behind = False, True
        text, calls = reader.take(), self._found.calls
        if self._number is None:
            if self.count and not self._parallel:
                self._number = _DROPPED
                return
            self._number = self.count
            self.count += 1
            calls.append(CallDelta(self._number, self._make_id(), reader.name, text))
        elif text and self._number != _DROPPED:
            if calls and calls[-1].index == self._number:
                calls[-1].arguments += text
            else:
                calls.append(CallDelta(self._number, arguments=text))

    def _try(self, size: int, lead: int, *, marked: bool) -> bool:
        """The first `size` held characters, white space and a mark, lead to calls."""
        self._trial, self._lead = True, lead
        self._loose = not (marked and self._form.closing)
        self._tried, self._held = self._held[:size], self._held[size:]
        self._at = _At.CALLS
        return True

    def _pass(self, size: int) -> None:
        if self._trial:
            self._tried += self._held[:size]
        self._held = self._held[size:]

    def _break(self) -> None:
        """What was read is no call, or no call goes on like this."""
        if self._trial:
            self._give_up()
        else:
            self._at = _At.TEXT if self._loose else _At.SKIP

    def _give_up(self) -> None:
        """What was on trial is content; all but its lead is looked at again."""
        self._held = self._tried + self._held
        self._trial, self._tried, self._at = False, "", _At.TEXT
        self._say(self._lead)

    def _say(self, size: int) -> None:
        """The first `size` held characters are content."""
        text, self._held = self._held[:size], self._held[size:]
        if self._behind:
            text = text.lstrip(SPACE)
        if text:
            self._found.content += text
            self._fresh = self._behind = False
