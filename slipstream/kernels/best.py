"""What programs of a row's chunks left, put together; and the best tokens of a row's raw logits."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.edits import LOWEST, key_id, key_value, order_key
from slipstream.kernels.nucleus import relative_mass


@triton.jit
def combined(keys, sums, at, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """The top value (fp32) of chunks, their masses relative to it added, and the chunks' keys."""
    lane = tl.arange(0, LANES)
    there = lane < CHUNKS
    tops = tl.load(keys + at + lane, mask=there, other=LOWEST)
    masses = tl.load(sums + at + lane, mask=there, other=0.0)
    top = key_value(tl.max(tops, 0))
    here = there & (key_value(tops) > float("-inf"))
    share = relative_mass(key_value(tops), top, here)
    return top, tl.sum(tl.where(here, masses * share, 0.0), 0), tops


@triton.jit
def store_logprobs(
    logits,
    token,
    wanted,
    keys,
    sums,
    at,
    logprob,
    top_ids,
    top_values,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Log-softmax of a row's raw logits at `token`, and the best one after the other.

    Each chunk shows the best of it that is not stored yet; what was taken last is replaced from its
    chunk.
    """
    top, mass, heads = combined(keys, sums, at, CHUNKS, LANES)
    whole = top.to(tl.float64) + tl.log(mass)
    own = tl.load(logits + token).to(tl.float64) - whole
    tl.store(logprob, own.to(tl.float32))
    lane = tl.arange(0, LANES)
    place = tl.full((), 0, tl.int32)
    while place < MOST:
        best = tl.max(heads, 0)
        if (place < wanted) & (best > LOWEST):
            value = (key_value(best).to(tl.float64) - whole).to(tl.float32)
            tl.store(top_ids + place, key_id(best))
            tl.store(top_values + place, value)
            chunk = key_id(best) // CHUNK
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = ids < V
            key = order_key(tl.load(logits + ids, mask=inside, other=float("-inf")), ids)
            following = tl.max(tl.where(inside & (key < best), key, LOWEST), 0)
            heads = tl.where(lane == chunk, following, heads)
        else:
            tl.store(top_ids + place, -1)
            tl.store(top_values + place, float("-inf"))
        place += 1
