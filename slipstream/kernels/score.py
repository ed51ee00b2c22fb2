"""Log-probabilities of given tokens: those that a draw of them would have.

For prompts, whose tokens are known. The sums are those of `slipstream.kernels.draw`, in its order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.best import store_logprobs
from slipstream.kernels.draw_buffers import CHUNK, Draws, DrawScratch
from slipstream.kernels.edits import LOWEST, key_value, order_key
from slipstream.kernels.nucleus import relative_mass


def score(
    logits: Tensor, row0: int, tokens: Tensor, wanted: Tensor, scores: Draws, scratch: DrawScratch
) -> None:
    """Writes `scores`, but for its tokens, of the rows that are wanted.

    Args:
        logits: (n, V) fp32, rows contiguous; n at most the scratch's rows.
        row0: row of the step that logits[0] is.
        tokens: (R,) int32, the token that each row scores.
        wanted: (R,) int32, how many best tokens are wanted too; -1: the row is not scored.
    """
    count, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    chunk = min(CHUNK, max(64, triton.next_power_of_2(vocab_size)))
    _sum[(count, chunks)](
        logits,
        wanted,
        scratch.keys,
        scratch.sums,
        row0,
        STRIDE=logits.stride(0),
        V=vocab_size,
        CHUNKS=chunks,
        CHUNK=chunk,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _score[(count,)](
        logits,
        tokens,
        wanted,
        scratch.keys,
        scratch.sums,
        row0,
        scores.logprobs,
        scores.top_ids,
        scores.top_values,
        STRIDE=logits.stride(0),
        V=vocab_size,
        CHUNKS=chunks,
        CHUNK=chunk,
        LANES=triton.next_power_of_2(chunks),
        MOST=scores.top_ids.shape[1],
        num_warps=16,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["row0"])
def _sum(
    logits,
    wanted,
    keys,
    sums,
    row0,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The top of a chunk of a row, and its mass relative to that."""
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(wanted + row0 + index) < 0:
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    raw = tl.load(logits + index.to(tl.int64) * STRIDE + token, mask=inside, other=float("-inf"))
    top = tl.max(tl.where(inside, order_key(raw, token), LOWEST), 0)
    here = inside & (raw > float("-inf"))
    at = index * CHUNKS + chunk
    tl.store(keys + at, top)
    tl.store(sums + at, tl.sum(relative_mass(raw, key_value(top), here), 0))


@triton.jit(do_not_specialize=["row0"])
def _score(
    logits,
    tokens,
    wanted,
    keys,
    sums,
    row0,
    logprobs,
    top_ids,
    top_values,
    STRIDE: tl.constexpr,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
):
    index = tl.program_id(0)
    row = row0 + index
    best = tl.load(wanted + row)
    if best < 0:
        return
    store_logprobs(
        logits + index.to(tl.int64) * STRIDE,
        tl.load(tokens + row),
        best,
        keys,
        sums,
        index * CHUNKS,
        logprobs + row,
        top_ids + row * MOST,
        top_values + row * MOST,
        V,
        CHUNKS,
        CHUNK,
        LANES,
        MOST,
    )
