"""Paged K and V of the committed tokens of one session, for every draft layer.

Position p of a slot lies in page `pages[p // page_size]`, whatever its layer. The positions after a
slot's context are scratch: a block writes its own K and V there, and the next context rows or the
next block overwrite them.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from services.draft.runner import NoPages
from slipstream.layers.attention import write_kv
from slipstream.layers.rows import RowBatch


def page_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.dtype:
    """Element type of pages for weights of `dtype`.

    Attention on a CPU runs in fp32 (`slipstream.layers.attention`): pages in fp32 spare it the
    conversion of a slot's whole context in every layer of every step.
    """
    return torch.float32 if torch.device(device).type == "cpu" else dtype


class PagePool:
    """Free page ids; the lowest go first, so that a slot's pages tend to lie side by side."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Raises NoPages when fewer are free."""
        if count > len(self._free):
            raise NoPages(f"{count} context pages are needed, {len(self._free)} are free")
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)


class ContextCache:
    """The pages of one session and who holds them.

    Attributes:
        k, v: (layers, pages, page_size, kv_heads, head_dim).
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        # Not filled: on a CPU a page takes no memory before it is first written.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.page_size = page_size
        self.pages = pages
        self._pool = PagePool(pages)
        self._held: dict[int, list[int]] = {}

    @staticmethod
    def page_bytes(
        layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page, K and V of all layers."""
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def free_pages(self) -> int:
        return self._pool.free

    def open(self, slot: int) -> None:
        """Gives the slot an empty table. Raises ValueError when it has one."""
        if slot in self._held:
            raise ValueError(f"slot {slot} already holds {len(self._held[slot])} pages")
        self._held[slot] = []

    def reserve(self, slot: int, positions: int) -> None:
        """Makes room for positions 0 .. positions - 1. Raises NoPages and changes nothing."""
        held = self._held[slot]
        missing = -(-positions // self.page_size) - len(held)
        if missing > 0:
            held.extend(self._pool.take(missing))

    def table(self, slot: int, positions: int) -> list[int]:
        """The pages of positions 0 .. positions - 1."""
        return self._held[slot][: -(-positions // self.page_size)]

    def release(self, slot: int) -> None:
        self._pool.give(self._held.pop(slot))

    def clear(self) -> None:
        """Frees every slot's pages."""
        for slot in list(self._held):
            self.release(slot)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: RowBatch) -> None:
        """Writes the rows' k and v, (rows, kv_heads, head_dim), at start + row of their entries."""
        write_kv(self.k[layer], self.v[layer], k, v, batch)
