"""The rows of one forward pass: which entry each belongs to, where it stands, what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WORD = 64


@dataclass(slots=True)
class RowBatch:
    """S entries of ragged rows, T rows in all; made by `build`.

    Row i of an entry (its node i) has its key in slot `start + i` of the entry's pages, whatever
    its position; the entry's prefix fills the slots 0 .. start - 1, one for each position. Slot s
    lies in page `block_table[entry][s // page_size]`.

    Attributes:
        row_offsets: (S + 1,) int32, rows of entry e are row_offsets[e] .. row_offsets[e + 1] - 1.
        starts: (S,) int32, prefix length of each entry.
        positions: (T,) int64, absolute positions, for RoPE and windows.
        block_table: (S, P) int32, padded with 0.
        ancestors: (T, W) int64 bit-sets over the entry's own rows, bit j % 64 of word j // 64 set
            when row j is visible (itself included); None: a row sees the rows of its entry up to
            itself, or all of them when `bidirectional`.
        offsets, start_list, pages: the same on the host: nothing is read back from a device.
    """

    row_offsets: Tensor
    starts: Tensor
    positions: Tensor
    block_table: Tensor
    ancestors: Tensor | None
    bidirectional: bool
    offsets: list[int]
    start_list: list[int]
    pages: list[list[int]]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What the attention backend worked out for this batch once, for all layers."""

    @classmethod
    def build(
        cls,
        counts: Sequence[int],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        positions: Sequence[int] | Tensor | None = None,
        ancestors: Sequence[int] | Tensor | None = None,
        bidirectional: bool = False,
        device: torch.device | str = "cpu",
    ) -> RowBatch:
        """Makes a batch from host data.

        Args:
            counts: rows of each entry, each at least 1.
            starts: prefix length of each entry.
            pages: page ids of each entry, enough for start + count slots.
            positions: of every row; by default start + i.
            ancestors: one Python int per row (bit j: row j of the entry is visible), or the
                finished (T, W) int64 tensor; None for chains.
        """
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        if positions is None:
            rows = zip(starts, counts, strict=True)
            positions = [p for start, count in rows for p in range(start, start + count)]
        if not isinstance(positions, Tensor):
            positions = torch.tensor(positions, dtype=torch.int64)
        if ancestors is not None and not isinstance(ancestors, Tensor):
            ancestors = pack_bits(ancestors, max(counts))
        width = max(map(len, pages))
        table = [[*row, *([0] * (width - len(row)))] for row in pages]
        return cls(
            row_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
            starts=torch.tensor(starts, dtype=torch.int32, device=device),
            positions=positions.to(device),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            ancestors=None if ancestors is None else ancestors.to(device),
            bidirectional=bidirectional,
            offsets=offsets,
            start_list=list(starts),
            pages=[list(row) for row in pages],
        )

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.start_list)

    def count(self, entry: int) -> int:
        """Rows of `entry`."""
        return self.offsets[entry + 1] - self.offsets[entry]


def pack_bits(bits: Sequence[int], rows: int) -> Tensor:
    """Python bit-sets to a (len(bits), ceil(rows / 64)) int64 tensor; bit 63 becomes the sign."""
    words = -(-rows // WORD)
    mask = (1 << WORD) - 1
    data = [[_signed(value >> (WORD * w) & mask) for w in range(words)] for value in bits]
    return torch.tensor(data, dtype=torch.int64).view(len(bits), words)


def unpack_bits(words: Tensor, rows: int) -> Tensor:
    """(R, W) int64 bit-sets to an (R, rows) bool tensor."""
    shifts = torch.arange(WORD, device=words.device)
    return (words[:, :, None] >> shifts & 1).bool().flatten(1)[:, :rows]


def _signed(word: int) -> int:
    return word - (1 << WORD) if word >> (WORD - 1) else word


def slots_of(pages: Sequence[int], first: int, last: int, page_size: int) -> Tensor:
    """Slot indices in the flat cache (page id x page_size + offset) of slots first .. last - 1."""
    index = torch.arange(first, last)
    return torch.tensor(pages)[index // page_size] * page_size + index % page_size


def flat_start(pages: Sequence[int], first: int, last: int, page_size: int) -> int | None:
    """Flat index of slot `first` when slots first .. last - 1 lie side by side, else None."""
    low, high = first // page_size, (last - 1) // page_size
    used = pages[low : high + 1]
    if any(b - a != 1 for a, b in zip(used, used[1:], strict=False)):
        return None
    return used[0] * page_size + first % page_size
