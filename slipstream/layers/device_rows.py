"""The rows of a step as device tensors with fixed addresses, which a CUDA graph can read.

`RowBatch` is built on the host for one step; these are allocated once, filled by kernels, and no
length in them is ever known to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from slipstream.layers.rows import WORD


class Mask(IntEnum):
    """What a row sees of its own entry's rows; the prefix it always sees, within the window."""

    CHAIN = 0  # rows up to itself
    TREE = 1  # its ancestors and itself, by `DeviceRows.bits`
    FULL = 2  # all rows of its entry


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Up to E entries of ragged rows, up to R rows in all; how many there are is device data.

    Row i of entry e (its node i) has its key at index `starts[e] + i` of its slot, whatever its
    position; index s lies in page `tables[slots[e], s // page_size]`. The slot's prefix fills the
    indices 0 .. starts[e] - 1, one for each position.

    Attributes:
        counts: (2,) int32, the entries S and the rows T of this step.
        slots: (E,) int32.
        offsets: (E + 1,) int32, rows of entry e are offsets[e] .. offsets[e + 1] - 1; T from S on.
        starts: (E,) int32, prefix length of each entry; 0 from S on.
        entries: (R,) int32, the entry of each row; -1 from T on.
        positions: (R,) int32, absolute positions; 0 from T on.
        bits: (R, W) int64 ancestor bit-sets over the entry's own rows, itself included; read only
            under `Mask.TREE`.
        tables: (slots, P) int32, block tables.
    """

    counts: Tensor
    slots: Tensor
    offsets: Tensor
    starts: Tensor
    entries: Tensor
    positions: Tensor
    bits: Tensor
    tables: Tensor

    @classmethod
    def allocate(
        cls, rows: int, entries: int, tables: Tensor, device: torch.device | str, words: int
    ) -> DeviceRows:
        """Room for `rows` rows of at most `entries` entries; ancestor sets of `words` words."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            counts=ints(2),
            slots=ints(entries),
            offsets=ints(entries + 1),
            starts=ints(entries),
            entries=ints(rows),
            positions=ints(rows),
            bits=torch.zeros(rows, words, dtype=torch.int64, device=device),
            tables=tables,
        )

    @property
    def capacity(self) -> int:
        """R, most rows."""
        return self.entries.shape[0]

    @property
    def most_entries(self) -> int:
        """E, most entries."""
        return self.slots.shape[0]

    @property
    def most_own_rows(self) -> int:
        """Most rows of an entry that `bits` can tell apart."""
        return self.bits.shape[1] * WORD

    def first(self, rows: int) -> DeviceRows:
        """The same memory seen as room for `rows` rows: what a graph of that bucket is given."""
        entries = min(rows, self.most_entries)
        return DeviceRows(
            self.counts,
            self.slots[:entries],
            self.offsets[: entries + 1],
            self.starts[:entries],
            self.entries[:rows],
            self.positions[:rows],
            self.bits[:rows],
            self.tables,
        )
