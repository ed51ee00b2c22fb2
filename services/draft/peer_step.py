"""The recorded work of a session whose messages stay on devices, beside that of `DraftStep`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from services.draft.completions import ResultRing
from services.draft.peer_input import IN_FLIGHT, PeerInput
from slipstream.kernels.accept import accept, edit_slots
from slipstream.kernels.drafting import Blocks
from slipstream.kernels.gather import gather
from slipstream.kernels.peer import STATE_INTS, VERDICT_INTS, VERDICTS
from slipstream.kernels.propose import open_blocks, put
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.graphs import Work, bucket_of

Write = Callable[[int, DeviceRows], None]
"""Writes keys and values of the first so many rows of the features' buffer."""

Piece = tuple[object, ...]
"""Key of recorded work."""


class PeerStep:
    """Buffers and work over one session's slots.

    Args:
        tables: (slots, P) int32, the context cache's block tables.
        features: (write_rows, width), what `write` reads.
        buckets: numbers of rows that a pass of context is made for.
        blocks: what a pass of drafts reads; `most_blocks` at once.
        sizes, nodes: what a pass of drafts leaves.
        vocab_size: of the anchors.
        results: stream for copies to the host; None on a CPU.

    Attributes:
        verdicts: of the last steps whose context was taken, see `accept`.
        results: their way to the host.
    """

    def __init__(
        self,
        *,
        tables: Tensor,
        features: Tensor,
        buckets: tuple[int, ...],
        write: Write,
        blocks: Blocks,
        most_blocks: int,
        sizes: Tensor,
        nodes: Tensor,
        vocab_size: int,
        results: torch.cuda.Stream | None,
    ) -> None:
        device, slots = tables.device, tables.shape[0]
        self.input = PeerInput(slots, device)
        self.most_blocks = most_blocks
        self._features, self._buckets, self._write = features, buckets, write
        self._blocks, self._sizes, self._nodes = blocks, sizes, nodes
        self._vocab_size = vocab_size

        def words(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.state = words(slots, STATE_INTS)
        self.verdicts = words(VERDICTS, 1 + slots, VERDICT_INTS)
        shape = (1 + slots, VERDICT_INTS)
        self.results = ResultRing(IN_FLIGHT, shape, device, results)
        self._rows = DeviceRows.allocate(features.shape[0], slots, tables, device, 1)
        self._begins = words(slots + 1, kind=torch.int32)
        self._done = words(1, kind=torch.int32)

    def pieces(self) -> dict[Piece, Work]:
        """All that is recorded."""
        pieces: dict[Piece, Work] = {
            ("edit",): self._edit,
            ("accept",): self._accept,
            ("take", "more"): self._take_more,
            ("open",): self._open,
            ("put",): self._put,
        }
        for size in reversed(self._buckets):
            pieces["take", size] = partial(self._take, size)
        return pieces

    def passes(self, rows: int) -> tuple[list[Piece], int]:
        """The work that takes up to `rows` fresh rows of a step, and how many it can take."""
        if rows <= 0:
            return [], 0
        most = self._buckets[-1]
        full = (rows - 1) // most
        last = bucket_of(self._buckets, rows - full * most)
        pieces: list[Piece] = [("take", "more")] * full
        return [*pieces, ("take", last)], full * most + last

    # The work

    def _edit(self) -> None:
        edit_slots(self.input.plan, self.state, edits_at=self.input.edits_at)

    def _accept(self) -> None:
        rows = self._rows
        accept(
            self.input.peer, self.input.plan, self.state, self.verdicts, rows.slots, rows.starts,
            self._begins, self._done, vocab_size=self._vocab_size,
        )  # fmt: skip

    @torch.inference_mode()
    def _take(self, size: int) -> None:
        rows = self._rows
        part = replace(rows, entries=rows.entries[:size], positions=rows.positions[:size])
        gather(self.input.peer, self._begins, self._done, part, self._features[:size])
        self._write(size, part)

    def _take_more(self) -> None:
        """A pass that is not the last."""
        self._take(self._buckets[-1])
        self._done.add_(self._buckets[-1])

    def _open(self) -> None:
        open_blocks(
            self.input.peer, self.input.plan, self.state, self._blocks, most=self.most_blocks
        )

    def _put(self) -> None:
        put(
            self.input.peer, self.input.plan, self.state, self._blocks, self._sizes, self._nodes,
            most=self.most_blocks,
        )  # fmt: skip
