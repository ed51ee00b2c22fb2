"""The launcher's log: one stream, each line led by the coloured name of the process behind it."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

RESET = "\x1b[0m"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"

_NAMES = {
    "up": BOLD,
    "target": "\x1b[36m",
    "draft": "\x1b[35m",
    "gateway": "\x1b[32m",
    "prepare": "\x1b[34m",
}
_LEVELS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m", "DEBUG": DIM}
_LEVEL = re.compile(r"^\S+ (DEBUG|WARNING|ERROR|CRITICAL)\b")
_WIDTH = max(map(len, _NAMES))


def use_colour(stream: TextIO) -> bool:
    """Whether `stream` gets ANSI colours: it is a terminal, and NO_COLOR is unset or empty."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


class Console:
    """Writes log lines of several processes to one stream.

    A child's line is written as it is, coloured by its level word where `slipstream.log` put one.
    """

    def __init__(self, stream: TextIO | None = None, colour: bool | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._colour = use_colour(self._stream) if colour is None else colour

    def line(self, name: str, text: str) -> None:
        """Writes one line of process `name`; a closed stream is ignored: the processes go on."""
        label = name.ljust(_WIDTH)
        if self._colour:
            label = f"{_NAMES.get(name, '')}{label}{RESET}"
            level = _LEVEL.match(text)
            if level:
                text = f"{_LEVELS[level.group(1)]}{text}{RESET}"
        try:
            self._stream.write(f"{label} | {text}\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            pass

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self.line("up", text)
