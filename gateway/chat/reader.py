"""One tool call's JSON object, read as it comes: its name, and its arguments word for word.

The arguments are not parsed and written again: a client gets the text that the model wrote, whether
it comes in pieces or whole, so the two are equal by construction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from gateway.chat.formats import ARGUMENT_KEYS

SPACE = " \t\n\r"

_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]]')
_IN_SCALAR = re.compile(r"[,}\s]")
_SCALAR = re.compile(r"true|false|null|-?\d[\d.eE+-]*")


class _At(Enum):
    """What comes next."""

    OPEN = auto()
    FIRST_KEY = auto()  # or the object's end
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()
    SCALAR = auto()
    NESTED = auto()
    COMMA = auto()  # or the object's end
    DONE = auto()
    BROKEN = auto()


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, its keys in any order, others ignored.

    Attributes:
        name: the function, None until it is known.
        failed: what was read is no call. Once there is a name, it stays one that is cut short.
        done: the object is complete.
    """

    __slots__ = ("_accept", "_arguments", "_at", "_depth", "_escaped", "_key", "_quoted", "_seen",
                 "_text", "name")  # fmt: skip

    def __init__(self, accept: Callable[[str], bool]) -> None:
        """`accept` says whether a name is one of a function."""
        self._accept = accept
        self._at = _At.OPEN
        self._key: str | None = None  # None: the string being read is a key
        self._text: list[str] = []  # of the string or scalar being read
        self._arguments: list[str] = []  # not taken yet
        self._seen = False  # arguments began
        self._depth = 0
        self._quoted = False  # within a nested value: in a string
        self._escaped = False
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.BROKEN

    def take(self) -> str:
        """The arguments' text since the last call; "" while there is no name."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str, start: int) -> int:
        """Reads on from text[start]; returns where it stopped: at the end, or behind the object."""
        index, size = start, len(text)
        while index < size and self._at not in (_At.DONE, _At.BROKEN):
            if self._at is _At.STRING:
                index = self._string(text, index)
            elif self._at is _At.NESTED:
                index = self._nested(text, index)
            elif self._at is _At.SCALAR:
                index = self._scalar(text, index)
            else:
                index = self._mark(text, index)
        return index

    def _mark(self, text: str, index: int) -> int:
        """One character between values."""
        char, at = text[index], self._at
        if char in SPACE:
            return index + 1
        if at is _At.OPEN and char == "{":
            self._at = _At.FIRST_KEY
        elif char == '"' and at in (_At.FIRST_KEY, _At.KEY):
            self._key, self._at = None, _At.STRING
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is _At.COMMA and char == ",":
            self._at = _At.KEY
        elif char == "}" and at in (_At.FIRST_KEY, _At.COMMA):
            self._finish()
        elif at is _At.VALUE:
            return self._value(char, index)
        else:
            self._at = _At.BROKEN
        return index + 1

    def _finish(self) -> None:
        if self.name is None:
            self._at = _At.BROKEN
            return
        if not self._seen:
            self._arguments.append("{}")
        self._at = _At.DONE

    def _value(self, char: str, index: int) -> int:
        """A value's first character."""
        if char in "{[":
            if self._key == "name":
                self._at = _At.BROKEN
                return index
            self._at, self._depth = _At.NESTED, 0
            if self._is_arguments:
                self._seen = True
            else:
                self._key = ""
            return index
        self._at = _At.STRING if char == '"' else _At.SCALAR
        return index + 1 if char == '"' else index

    @property
    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._seen

    def _string(self, text: str, index: int) -> int:
        """More of a string, which ends at a quote that is not escaped."""
        if self._escaped:
            self._text.append(text[index])
            self._escaped = False
            return index + 1
        found = _IN_STRING.search(text, index)
        if found is None:
            self._text.append(text[index:])
            return len(text)
        self._text.append(text[index : found.start()])
        if found.group() == "\\":
            self._text.append("\\")
            self._escaped = True
        else:
            self._end_string()
        return found.end()

    def _end_string(self) -> None:
        raw = "".join(self._text)
        self._text.clear()
        self._at = _At.COMMA
        if self._key is not None and self._key != "name" and not self._is_arguments:
            return
        try:
            value = json.loads(f'"{raw}"', strict=False)
            value.encode()  # half a surrogate pair cannot be sent
        except ValueError:
            self._at = _At.BROKEN
            return
        if self._key is None:
            self._key, self._at = value, _At.COLON
        elif self._key == "name":
            if self.name is None and self._accept(value):
                self.name = value
            elif self.name is None:
                self._at = _At.BROKEN
        else:  # arguments as text, as clients have them
            self._seen = True
            self._arguments.append(value)

    def _scalar(self, text: str, index: int) -> int:
        """More of a number or a word, which its follower ends."""
        found = _IN_SCALAR.search(text, index)
        end = len(text) if found is None else found.start()
        self._text.append(text[index:end])
        if found is None:
            return end
        word = "".join(self._text)
        self._text.clear()
        fits = _SCALAR.fullmatch(word) and self._key != "name"
        if fits and self._is_arguments:
            fits = word == "null"  # no arguments
        self._at = _At.COMMA if fits else _At.BROKEN
        return end

    def _nested(self, text: str, index: int) -> int:
        """More of an object or a list, to where its brackets close."""
        begin = index
        while index < len(text):
            if self._escaped:
                self._escaped = False
                index += 1
                continue
            found = (_IN_STRING if self._quoted else _IN_VALUE).search(text, index)
            if found is None:
                index = len(text)
                break
            index, char = found.end(), found.group()
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    self._at = _At.COMMA
                    break
        if self._key in ARGUMENT_KEYS:
            self._arguments.append(text[begin:index])
        return index
