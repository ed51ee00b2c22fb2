"""The largest raw logit of every row: what greedy requests without edits draw."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.draw_buffers import DrawScratch
from slipstream.kernels.edits import LOWEST, key_id, order_key

_GREEDY_CHUNK = 4096


def draw_greedy(logits: Tensor, row0: int, tokens: Tensor, scratch: DrawScratch) -> None:
    """tokens[row0 + i] = the largest of logits[i], of equals the lowest id.

    NaN counts as -inf; a row without any finite logit gives 0. Padding rows are drawn too.

    Args:
        logits: (n, V) fp32, rows contiguous; n at most the scratch's rows.
        row0: row of the step that logits[0] is.
        tokens: (R,) int32.
    """
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _GREEDY_CHUNK)
    _largest[(rows, chunks)](
        logits,
        scratch.keys,
        STRIDE=logits.stride(0),
        V=vocab_size,
        CHUNKS=chunks,
        CHUNK=_GREEDY_CHUNK,
        num_warps=8,
    )
    _take_largest[(rows,)](
        scratch.keys, tokens, row0, CHUNKS=chunks, LANES=triton.next_power_of_2(chunks), num_warps=1
    )


@triton.jit
def _largest(
    logits, keys, STRIDE: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < V
    value = tl.load(logits + row.to(tl.int64) * STRIDE + ids, mask=inside, other=float("-inf"))
    best = tl.max(tl.where(inside, order_key(value, ids), LOWEST), 0)
    tl.store(keys + row * CHUNKS + chunk, best)


@triton.jit(do_not_specialize=["row0"])
def _take_largest(keys, tokens, row0, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    best = tl.max(tl.load(keys + row * CHUNKS + lane, mask=lane < CHUNKS, other=LOWEST), 0)
    tl.store(tokens + row0 + row, key_id(best))
