"""The page pool: who holds which KV page, and how often.

One page id addresses KV and context features alike. The gateway counts pages, this pool names them,
side by side where it can: a slot whose pages are neighbours is read in place.
"""

from __future__ import annotations

from collections.abc import Iterable


class NoPages(Exception):
    """Fewer free pages than asked for; nothing was taken."""


class PagePool:
    """Reference-counted pages 0 .. pages - 1.

    Invariant: a page is free exactly when nobody holds it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = bytearray(b"\x01" * pages)  # 1: free
        self._free_count = pages
        self._counts = [0] * pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free_count

    def pages_for(self, positions: int) -> int:
        """Pages that hold `positions` positions."""
        return -(-positions // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` pages, from the neighbour of page `after` on if that is free.

        Raises NoPages.
        """
        if count > self._free_count:
            raise NoPages(f"{count} pages wanted, {self._free_count} of {self.pages} free")
        taken: list[int] = []
        page = self.pages if after is None else after + 1
        for _ in range(count):
            if page >= self.pages or not self._free[page]:
                page = self._widest()
            self._free[page] = 0
            self._counts[page] = 1
            taken.append(page)
            page += 1
        self._free_count -= count
        return taken

    def _widest(self) -> int:
        """Where to begin in the longest run of free pages: its middle, so that the slot before the
        run can grow too; its first page when nobody is before it."""
        longest = max(map(len, bytes(self._free).split(b"\x00")))
        first = self._free.find(b"\x01" * longest)
        return first if first == 0 else first + longest // 2

    def share(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page."""
        for page in pages:
            if self._counts[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes one holder from each page; those without any are free again."""
        for page in pages:
            if self._counts[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free[page] = 1
                self._free_count += 1

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that the pages of `holders` and the free ones are all pages, counted right."""
        seen = [0] * self.pages
        for pages in holders:
            for page in pages:
                seen[page] += 1
        wrong = [p for p in range(self.pages) if seen[p] != self._counts[p]]
        assert not wrong, f"pages {wrong[:8]}: held {[seen[p] for p in wrong[:8]]} times"
        free = [p for p in range(self.pages) if self._free[p]]
        assert free == [p for p in range(self.pages) if seen[p] == 0], (
            "free pages are not those that nobody holds"
        )
        assert len(free) == self._free_count, f"{self._free_count} pages counted, {len(free)} free"


class BlockTable:
    """The pages of one slot in position order; it only grows until it is released."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []

    @property
    def positions(self) -> int:
        """Positions that the pages hold."""
        return len(self.pages) * self._pool.page_size

    def reserve(self, positions: int) -> None:
        """Raises the watermark to `positions`; a lower one changes nothing. Raises NoPages."""
        missing = self._pool.pages_for(positions) - len(self.pages)
        if missing > 0:
            last = self.pages[-1] if self.pages else None
            self.pages += self._pool.allocate(missing, last)

    def release(self) -> None:
        """Gives every page back."""
        self._pool.release(self.pages)
        self.pages = []
