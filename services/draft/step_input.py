"""What the host says to the device: the blocks of a step, how requests want their trees, pages.

Every copy is from a pinned buffer and is not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.draft.candidates import MOST_SHARE, NOISE_SHARE, Block
from services.draft.peer_input import IN_FLIGHT
from services.draft.runner import ContextRows, DraftEntry, Drafting
from slipstream.kernels.drafting import (
    BLOCK_INTS,
    SPEC_INTS,
    SPEC_REALS,
    Blocks,
    Specs,
    spec_row,
)
from slipstream.layers.staging import Upload

TABLE_UPDATES = 1024
"""Block table entries that one copy carries."""

_HEAD = 4  # int32 before the rows of a packed buffer: 16 bytes, so that these lie well


class BlockInput:
    """The blocks of draft steps, or of context rows, of up to `entries` entries."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.entries = entries
        self._upload = Upload((_HEAD + entries * BLOCK_INTS,), torch.int32, device)

    def blocks(self, most: int) -> Blocks:
        """Where the kernels of a step with at most `most` blocks find them."""
        device = self._upload.device
        fields = device[_HEAD:].view(self.entries, BLOCK_INTS)
        return Blocks(device[:2], fields[: min(most, self.entries)])

    def send_drafts(self, entries: Sequence[DraftEntry], counts: Sequence[int]) -> list[int]:
        """Blocks of `counts` rows. Returns the first node of each tree, and the number of nodes."""
        rows: list[int] = []
        row, nodes = 0, [0]
        for entry, count in zip(entries, counts, strict=True):
            head = (entry.slot, entry.start, entry.anchor, entry.nodes)
            rows += (*head, count, row, nodes[-1], 0)
            row += count
            nodes.append(nodes[-1] + entry.nodes)
        self._send(rows, row)
        return nodes

    def send_context(self, parts: Sequence[ContextRows]) -> None:
        """Rows of the context; they are no blocks, and no tree grows from them."""
        rows: list[int] = []
        row = 0
        for part in parts:
            rows += (part.slot, part.first_row, 0, 0, part.count, row, 0, 0)
            row += part.count
        self._send(rows, row)

    def _send(self, fields: list[int], rows: int) -> None:
        host = self._upload.host()
        host[:2] = (len(fields) // BLOCK_INTS, rows)
        host[_HEAD : _HEAD + len(fields)] = fields
        self._upload.send(_HEAD + len(fields))


class SpecInput:
    """How the requests in all slots want their trees."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._ints = Upload((slots, SPEC_INTS), torch.int32, device, ring=IN_FLIGHT)
        self._reals = Upload((slots, SPEC_REALS), torch.float64, device, ring=IN_FLIGHT)
        self.specs = Specs(self._ints.device, self._reals.device)
        self._host_ints = np.zeros((slots, SPEC_INTS), np.int32)
        self._host_reals = np.zeros((slots, SPEC_REALS), np.float64)
        self._changed = False

    def set(self, slot: int, drafting: Drafting) -> None:
        """Sent with the next `send`."""
        block = Block(1, 0, drafting)
        self._host_ints[slot], self._host_reals[slot] = spec_row(
            drafting.tree,
            looked_at=block.width,
            noisy=block.noisy,
            seed=drafting.seed,
            choice=drafting.choice,
            share=NOISE_SHARE * drafting.temperature,
            most_share=MOST_SHARE,
        )
        self._changed = True

    def send(self) -> None:
        """Copies what has changed, if anything has."""
        if not self._changed:
            return
        self._changed = False
        for upload, rows in ((self._ints, self._host_ints), (self._reals, self._host_reals)):
            upload.host()[:] = rows
            upload.send()


class PageInput:
    """Pages that slots were given since the last `send`."""

    def __init__(self, device: torch.device) -> None:
        size = _HEAD + 3 * TABLE_UPDATES
        self._upload = Upload((size,), torch.int32, device, ring=IN_FLIGHT)
        self.count: Tensor = self._upload.device[:1]
        self.updates: Tensor = self._upload.device[_HEAD:].view(TABLE_UPDATES, 3)
        self._pending: list[int] = []

    def add(self, slot: int, index: int, pages: Sequence[int]) -> None:
        """`pages` are those of the slot's table from `index` on."""
        for offset, page in enumerate(pages):
            self._pending += (slot, index + offset, page)

    def send(self) -> bool:
        """Copies as many as fit; whether there were any, so that `updates` is to be applied."""
        if not self._pending:
            return False
        part = self._pending[: 3 * TABLE_UPDATES]
        self._pending = self._pending[3 * TABLE_UPDATES :]
        host = self._upload.host()
        host[0] = len(part) // 3
        host[_HEAD : _HEAD + len(part)] = part
        self._upload.send(_HEAD + len(part))
        return True
