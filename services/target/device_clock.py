"""Stamps of a GPU's clock, read against this machine's."""

from __future__ import annotations

from services.target.runner import Stamps

WINDOW_NS = 5_000_000_000
"""Two clocks part by tens of microseconds in a second: over this time by less than a step."""


class DeviceClock:
    """Follows the steps of one device in their order."""

    def __init__(self) -> None:
        self._ended = 0
        self._least: int | None = None  # offset in the window that runs
        self._before: int | None = None  # in the one before
        self._since = 0

    def idle(self, stamps: Stamps) -> int:
        """How long in ns the device did nothing before a step: it waited for a draft, or a plan."""
        before, self._ended = self._ended, stamps.ended
        return max(stamps.began - before, 0) if before else 0

    def monotonic(self, stamp: int, ended: int, seen: int) -> int:
        """`stamp` on the host's monotonic clock, in ns.

        `ended` is a stamp whose step's results the host saw at `seen`: no result is seen before it
        is there, so the smallest difference of the two is the best guess of the clocks'. Of the
        last one or two windows only, since neither clock keeps the other's pace.
        """
        if seen - self._since >= WINDOW_NS:
            # After a pause of a whole window what was before says nothing.
            self._before = self._least if seen - self._since < 2 * WINDOW_NS else None
            self._least, self._since = None, seen
        offset = seen - ended
        if self._least is None or offset < self._least:
            self._least = offset
        return stamp + (self._least if self._before is None else min(self._least, self._before))
