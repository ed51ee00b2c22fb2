"""What draws at a step's rows read and leave, beside the rows and the slots themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

CHUNK = 2048
"""Tokens of a row that one program looks at."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What is drawn at each row; of padding nothing is written.

    Attributes:
        tokens: (R,) int32.
        logprobs: (R,) fp32, log-softmax of the raw logits at the token; like the next two only in
            rows whose slot wants logprobs.
        top_ids: (R, K) int32, the best of the raw logits, as many as the slot wants, then -1.
        top_values: (R, K) fp32, their log-softmax, then -inf.
    """

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_values: Tensor

    @classmethod
    def allocate(cls, rows: int, max_logprobs: int, device: torch.device | str) -> Draws:
        """For up to `rows` rows and `max_logprobs` best tokens of each, one at least."""
        best = max(1, max_logprobs)
        return cls(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(rows, best, dtype=torch.int32, device=device),
            torch.zeros(rows, best, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class RowMasks:
    """What grammars allow at the rows of a step; rows of slots without one are not looked at.

    Attributes:
        bits: (M, ceil(V / 32)) int32, bit v % 32 of word v // 32: v may be drawn.
        index: (R,) int32, the row of `bits` that holds for each row; -1: nothing may be drawn.
    """

    bits: Tensor
    index: Tensor


class DrawScratch:
    """What programs of a row leave for the one that combines them; for slices of `rows` rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        shape = (rows, triton.cdiv(vocab_size, CHUNK))
        self.keys = torch.zeros(4, *shape, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, *shape, dtype=torch.float64, device=device)
