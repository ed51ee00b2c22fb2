"""The flags of one set as one process sees them."""

from __future__ import annotations

from slipstream.handoff.cuda_ipc.segment import Segment
from slipstream.handoff.cuda_ipc.signals import Signals
from slipstream.handoff.layout import Flag, flag_word

UNTOUCHED = 0
"""DRAFT_BEAT of a set that no draft uses yet; while a draft connects it holds minus its process's
number, then counts, and is RELEASED at last."""


class Lane:
    """One set: `wait` and `write` go to the current stream, `load` and `store` happen at once.

    Loads and stores are of one aligned word each; any thread may make them. A flag that a stream
    writes is stored here only to reset it, when no stream is on it, or to release its waits.
    """

    def __init__(self, segment: Segment, signals: Signals, which: int) -> None:
        self.which = which
        self.signals = signals
        self._words = segment.words
        self._at = [flag_word(which, flag) for flag in Flag]

    def wait(self, flag: Flag, value: int) -> None:
        self.signals.wait(self._at[flag], value)

    def write(self, flag: Flag, value: int) -> None:
        self.signals.write(self._at[flag], value)

    def load(self, flag: Flag) -> int:
        return int(self._words[self._at[flag]])

    def store(self, flag: Flag, value: int) -> None:
        self._words[self._at[flag]] = value

    def reset(self, value: int) -> None:
        """Sets the flags that count steps."""
        for flag in (Flag.CONTEXT, Flag.PROPOSAL, Flag.CONSUMED, Flag.PLANNED):
            self.store(flag, value)

    def ask(self, number: int, address: int) -> None:
        """The target's half of a probe, through PLANNED as the number's source."""
        self.store(Flag.PLANNED, number)
        self.signals.ask(self._at[Flag.PLANNED], address, self._at[Flag.CONTEXT])

    def answer(self, address: int) -> None:
        """The draft's half; PROPOSAL is the echo."""
        self.signals.answer(self._at[Flag.CONTEXT], address, self._at[Flag.PROPOSAL])
