"""Stamps of a GPU's clock, read against this machine's."""

from __future__ import annotations

from services.target.runner import Stamps


class DeviceClock:
    """Follows the steps of one device in their order."""

    def __init__(self) -> None:
        self._ended = 0
        self._offset: int | None = None

    def idle(self, stamps: Stamps) -> int:
        """How long in ns the device did nothing before a step: it waited for a draft, or a plan."""
        before, self._ended = self._ended, stamps.ended
        return max(stamps.began - before, 0) if before else 0

    def monotonic(self, stamp: int, ended: int, seen: int) -> int:
        """`stamp` on the host's monotonic clock, in ns.

        `ended` is a stamp whose step's results the host saw at `seen`: no result is seen before it
        is there, so the smallest difference of the two is the best guess of the clocks'.
        """
        offset = seen - ended
        if self._offset is None or offset < self._offset:
            self._offset = offset
        return stamp + self._offset
