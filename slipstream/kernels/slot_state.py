"""What kernels know of the slots: lengths, and how each slot's tokens are drawn.

The host writes a slot's state when it admits a request (`services.target.device_slots`); from then
on only kernels change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

WORDS = 32
"""Columns of the parameter table. Numbers of the pipeline are fp32 bits, the rest is int32."""

FLAGS = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)
TOP_P = tl.constexpr(2)
TOP_K = tl.constexpr(3)
MIN_P_DEPTH = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
FREQUENCY = tl.constexpr(6)
REPETITION = tl.constexpr(7)
SEED_LOW = tl.constexpr(8)
SEED_HIGH = tl.constexpr(9)
CHOICE = tl.constexpr(10)
MIN_UNTIL = tl.constexpr(11)
"""Position from which on a stop id may be drawn, and ends the answer."""
LOGPROBS = tl.constexpr(12)
"""-1: none; k: the drawn token's own and the k best."""

GREEDY = tl.constexpr(1)
BIASED = tl.constexpr(2)
PENALISED = tl.constexpr(4)
HAS_TOP_P = tl.constexpr(8)
HAS_MIN_P = tl.constexpr(16)
HAS_STOPS = tl.constexpr(32)
GRAMMAR = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class SlotState:
    """Device state of all slots, row or element `slot` of each tensor.

    Attributes:
        start: (slots,) int32, KV rows, which is the position of the anchor.
        anchor: (slots,) int32, the last committed token.
        limit: (slots,) int32, committed tokens at the end of the request.
        finished: (slots,) int32, not 0 once a stop id or the limit ended the request.
        words: (slots, WORDS) int32, the columns above.
        stop_bits: (slots, ceil(V / 32)) int32, bit v % 32 of word v // 32: v is a stop id. Read
            only with HAS_STOPS.
        prompt_bits: the same for tokens of the prompt; read only with PENALISED.
        counts: (slots, V) int32, occurrences in the output; only with PENALISED.
        bias: (slots, V) fp32; only with BIASED.
    """

    start: Tensor
    anchor: Tensor
    limit: Tensor
    finished: Tensor
    words: Tensor
    stop_bits: Tensor
    prompt_bits: Tensor
    counts: Tensor
    bias: Tensor

    @classmethod
    def allocate(cls, slots: int, vocab_size: int, device: torch.device | str) -> SlotState:
        """Slots that hold nothing and are finished."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        bitmap = -(-vocab_size // 32)
        return cls(
            start=ints(slots),
            anchor=ints(slots),
            limit=ints(slots),
            finished=ints(slots) + 1,
            words=ints(slots, WORDS),
            stop_bits=ints(slots, bitmap),
            prompt_bits=ints(slots, bitmap),
            counts=ints(slots, vocab_size),
            bias=torch.zeros(slots, vocab_size, dtype=torch.float32, device=device),
        )

    @property
    def vocab_size(self) -> int:
        return self.counts.shape[1]
