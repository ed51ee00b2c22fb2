"""One tool call's JSON object, read as it comes: its name, and its arguments word for word.

The arguments are not written again: a client gets the text that the model wrote, whether it comes
in pieces or whole, so the two are equal by construction. Where they turn out to be no JSON object,
the call has failed, with what was given of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
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
        name: the function, one of those known; None until it is read.
        failed: what was read is no call. Once there is a name, it stays one that is cut short.
        done: the object is complete.
    """

    __slots__ = ("_arguments", "_at", "_escaped", "_key", "_names", "_open", "_quoted",
                 "_seen", "_text", "_written", "name")  # fmt: skip

    def __init__(self, names: Collection[str]) -> None:
        """`names` of the functions that may be called."""
        self._names = names
        self._at = _At.OPEN
        self._key: str | None = None  # None: the string being read is a key
        self._text: list[str] = []  # of the string or scalar being read
        self._arguments: list[str] = []  # not taken yet
        self._seen = False  # arguments began
        self._written: list[str] = []  # of a nested value
        self._open: list[str] = []  # within a nested value: the brackets that will close
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
            if self._key == "name" or (self._is_arguments and char == "["):
                self._at = _At.BROKEN
                return index
            self._at = _At.NESTED
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
            if self.name is None and value in self._names:
                self.name = value
            elif self.name is None:
                self._at = _At.BROKEN
        else:  # arguments as text, as clients have them
            self._seen = True
            if _is_object(value or "{}"):
                self._arguments.append(value or "{}")
            else:
                self._at = _At.BROKEN

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
            elif char in "{[":
                self._open.append("}" if char == "{" else "]")
            elif self._open.pop() != char:
                self._at = _At.BROKEN
                break
            elif not self._open:
                self._at = _At.COMMA
                break
        self._written.append(text[begin:index])
        if self._key in ARGUMENT_KEYS:
            self._arguments.append(text[begin:index])
        if self._at is _At.COMMA:
            self._end_nested()
        return index

    def _end_nested(self) -> None:
        written = "".join(self._written)
        self._written.clear()
        if self._key in ARGUMENT_KEYS and not _is_object(written):
            self._at = _At.BROKEN


def _is_object(text: str) -> bool:
    """Whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
