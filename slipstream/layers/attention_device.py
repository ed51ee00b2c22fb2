"""What attention over `DeviceRows` is, and its plain version: the backend `torch`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.layers.device_rows import DeviceRows, Mask
from slipstream.layers.rows import unpack_bits

BLOCK = 128  # query rows of one product: bounds the memory of scores


class DeviceAttention(Protocol):
    """Attention for one bucket of rows: `plan` once for a forward pass, then a call per layer."""

    def plan(self, rows: DeviceRows) -> None:
        """Prepares for `rows` as they are now."""

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: DeviceRows,
        scale: float,
        window: int | None,
        mask: Mask,
        out: Tensor,
    ) -> Tensor:
        """Writes the attention of q (R, heads, hd) to out (R, heads * hd) and returns it.

        Pages are (pages, page_size, kv, hd), and hold the own rows' keys and values already; with a
        window W a key is visible when |q_pos - k_pos| < W. Rows without an entry become zeros.
        """


@dataclass(slots=True)
class _Entry:
    """One entry, read from the device: rows first .. last - 1, `start` keys before them."""

    first: int
    last: int
    start: int
    places: Tensor  # (start + rows,) its keys' places in the flat cache
    positions: Tensor  # (start + rows,)
    bits: Tensor  # (rows, W)
    hidden: dict[tuple[int | None, Mask], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, kind: Mask) -> Tensor:
        """(rows, start + rows) bool, True where a row does not see a key."""
        found = self.hidden.get((window, kind))
        if found is None:
            found = self.hidden[(window, kind)] = self._mask(window, kind)
        return found

    def _mask(self, window: int | None, kind: Mask) -> Tensor:
        count = self.last - self.first
        device = self.places.device
        seen = torch.ones(count, self.start + count, dtype=torch.bool, device=device)
        if kind == Mask.CHAIN:
            seen[:, self.start :].tril_()
        elif kind == Mask.TREE:
            seen[:, self.start :] = unpack_bits(self.bits, count)
        if window is not None:
            own = self.positions[self.start :, None]
            seen &= (own - self.positions).abs() < window
        return ~seen


class TorchAttention:
    """The plain version, in fp32. It reads the rows to the host: not for CUDA graphs."""

    def __init__(
        self,
        rows: DeviceRows,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        """The arguments of `TritonAttention`."""
        self.kv_heads, self.page_size = kv_heads, page_size
        self._entries: list[_Entry] = []

    def plan(self, rows: DeviceRows) -> None:
        """See `DeviceAttention`; waits for the device."""
        entries, _ = rows.counts.tolist()
        offsets, starts = rows.offsets.tolist(), rows.starts.tolist()
        slots = rows.slots.tolist()
        device = rows.entries.device
        self._entries = []
        for e in range(entries):
            first, last, start = offsets[e], offsets[e + 1], starts[e]
            index = torch.arange(start + last - first, device=device)
            pages = rows.tables[slots[e]].long()[index // self.page_size]
            places = pages * self.page_size + index % self.page_size
            own = rows.positions[first:last].long()
            positions = torch.cat([index[:start], own])
            bits = rows.bits[first:last].clone()
            self._entries.append(_Entry(first, last, start, places, positions, bits))

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: DeviceRows,
        scale: float,
        window: int | None,
        mask: Mask,
        out: Tensor,
    ) -> Tensor:
        """See `DeviceAttention`."""
        dim, groups = q.shape[2], q.shape[1] // self.kv_heads
        result = out.view(q.shape)
        result[self._entries[-1].last if self._entries else 0 :].zero_()
        for entry in self._entries:
            k, v = (  # (kv, keys, hd) each
                pages.flatten(0, 1)[entry.places].float().transpose(0, 1)
                for pages in (k_pages, v_pages)
            )
            hidden = entry.mask(window, mask)
            for low in range(entry.first, entry.last, BLOCK):
                high = min(low + BLOCK, entry.last)
                query = q[low:high].float().view(-1, self.kv_heads, groups, dim)
                scores = torch.einsum("nkgd,ksd->kgns", query, k) * scale
                scores.masked_fill_(hidden[low - entry.first : high - entry.first], -torch.inf)
                mixed = torch.einsum("kgns,ksd->nkgd", scores.softmax(-1), v)
                result[low:high] = mixed.flatten(1, 2).to(out.dtype)
        return out
