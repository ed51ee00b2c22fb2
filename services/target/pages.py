"""The page pool: who holds which KV page, and how often.

One page id addresses KV and context features alike. The gateway counts pages, this pool names them.
"""

from __future__ import annotations

from collections.abc import Iterable


class NoPages(Exception):
    """Fewer free pages than asked for; nothing was taken."""


class PagePool:
    """Reference-counted pages 0 .. pages - 1.

    Invariant: a page is in the free list exactly when its count is 0.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._counts = [0] * pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Pages that hold `positions` positions."""
        return -(-positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages. Raises NoPages."""
        if count > len(self._free):
            raise NoPages(f"{count} pages wanted, {len(self._free)} of {self.pages} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._counts[page] = 1
        return taken

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
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that the pages of `holders` and the free ones are all pages, counted right."""
        seen = [0] * self.pages
        for pages in holders:
            for page in pages:
                seen[page] += 1
        wrong = [p for p in range(self.pages) if seen[p] != self._counts[p]]
        assert not wrong, f"pages {wrong[:8]}: held {[seen[p] for p in wrong[:8]]} times"
        assert sorted(self._free) == [p for p in range(self.pages) if seen[p] == 0], (
            "free pages are not those that nobody holds"
        )


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
            self.pages += self._pool.allocate(missing)

    def release(self) -> None:
        """Gives every page back."""
        self._pool.release(self.pages)
        self.pages = []
