"""What grammars allow at a step's rows, worked out by the host while the forward runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from services.target.grammar import Matcher, Words, tree_masks
from services.target.runner import DecodeEntry
from slipstream.kernels.draw import RowMasks
from slipstream.layers.staging import Upload
from slipstream.tree import Tree

if TYPE_CHECKING:
    from llguidance import LLExecutor


class HostMasks:
    """The masks of one step, and their way to the device.

    A step with a grammar is read before the next is prepared, so one host buffer is enough.

    Attributes:
        rows: what kernels read; of fixed address.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        """For steps of up to `rows` rows."""
        words = -(-vocab_size // 32)
        self._bits = Upload((rows, words), torch.int32, device, ring=1)
        self._index = Upload((rows,), torch.int32, device, ring=1)
        self.rows = RowMasks(self._bits.device, self._index.device)

    def send(self, masks: Mapping[int, Words], rows: int) -> None:
        """Masks by row of a step of `rows` rows; at its other rows nothing may be drawn."""
        index, bits = self._index.host(), self._bits.host()
        index[:rows] = -1
        for place, (row, mask) in enumerate(masks.items()):
            index[row] = place
            bits[place] = mask
        self._index.send(rows)
        self._bits.send(len(masks))


def step_masks(
    entries: Sequence[DecodeEntry],
    matchers: Sequence[Matcher | None],
    vocab_size: int,
    pool: LLExecutor | None = None,
) -> dict[int, Words]:
    """By row of the step, at every node that the grammars of the entries let a walk reach."""
    firsts: list[int] = []
    requests: list[tuple[Matcher, Tree]] = []
    row = 0
    for entry, matcher in zip(entries, matchers, strict=True):
        if matcher is not None:
            firsts.append(row)
            requests.append((matcher, entry.tree(vocab_size)))
        row += entry.rows
    found = zip(firsts, tree_masks(requests, pool), strict=True)
    return {first + node: mask for first, masks in found for node, mask in masks.items()}
