"""Counts of KV pages: the gateway counts them, the target names them.

A slot's watermark is the number of positions it holds pages for. It only rises; everything goes
back at release.
"""

from __future__ import annotations

from slipstream.errors import EngineFailed


class Ledger:
    """Pages of one target.

    Invariant: free + pages of all watermarks = pages. `version` grows with every change, so that a
    count that was taken earlier is known to be current or not.
    """

    def __init__(self, pages: int, page_size: int, slots: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.free = pages
        self.version = 0
        self._positions = [0] * slots
        self._held = [0] * slots

    def pages_for(self, positions: int) -> int:
        """Pages that hold `positions` positions."""
        return -(-positions // self.page_size)

    def watermark(self, slot: int) -> int:
        """Positions that `slot` holds pages for."""
        return self._positions[slot]

    def raise_to(self, slot: int, positions: int) -> bool:
        """Raises the watermark of `slot`; False, and nothing changed, without enough free pages."""
        if positions <= self._positions[slot]:
            return True
        more = self.pages_for(positions) - self._held[slot]
        if more > self.free:
            return False
        self._positions[slot] = positions
        if more > 0:
            self._held[slot] += more
            self.free -= more
            self.version += 1
        return True

    def give_back(self, slot: int) -> None:
        """Frees everything that `slot` holds."""
        self.free += self._held[slot]
        self._positions[slot] = self._held[slot] = 0
        self.version += 1

    def check(self, free_pages: int) -> None:
        """Compares with the target's own count. Raises EngineFailed with both."""
        held = sum(self._held)
        if self.free + held != self.pages:
            raise EngineFailed(f"ledger: free {self.free} + held {held} != pages {self.pages}")
        if free_pages != self.free:
            raise EngineFailed(f"free pages: the ledger has {self.free}, the target {free_pages}")
