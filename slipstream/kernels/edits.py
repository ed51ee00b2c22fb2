"""What a request's parameters make of a row's logits, token by token, and the order of tokens.

The fp32 steps are those of `slipstream.sampling.apply_edits`, in its order and each rounded by
itself: kernels that use `edited` are launched with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.slot_state import (
    BIASED,
    FREQUENCY,
    GRAMMAR,
    HAS_STOPS,
    MIN_UNTIL,
    PENALISED,
    PRESENCE,
    REPETITION,
)

LOWEST = tl.constexpr(-(1 << 63))
"""Below the key of any token."""

_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_key(value, ids):
    """int64 keys that order tokens: the larger value first, of equal ones the lower id.

    NaN counts as -inf; the two zeros are equal.
    """
    value = tl.where(value == value, value, float("-inf"))
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & _LARGEST)
    return (ordered.to(tl.int64) << 32) | (ids ^ _LARGEST).to(tl.int64)


@triton.jit
def key_id(key):
    """The token id of a key."""
    return (key & _LARGEST).to(tl.int32) ^ _LARGEST


@triton.jit
def key_value(key):
    """The fp32 value of a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _LARGEST)).to(tl.float32, bitcast=True)


@triton.jit
def number(row, column: tl.constexpr):
    """A column of a row of the parameter table, as fp32."""
    return tl.load(row + column).to(tl.float32, bitcast=True)


@triton.jit
def has_bit(bits, ids, inside):
    """Whether each id is in a bitmap."""
    word = tl.load(bits + (ids >> 5), mask=inside, other=0)
    return (word >> (ids & 31)) & 1 != 0


@triton.jit
def edited(
    raw,
    ids,
    inside,
    position,
    node,
    tree_ids,
    tree_parents,
    words,
    stop_bits,
    prompt_bits,
    counts,
    bias,
    allowed,
):
    """Logits (a block, fp32) with bias, penalties, bans and grammar; NaN becomes -inf.

    Args:
        raw, ids, inside: logits of the token ids, where `inside`.
        position: the position that the draw decides.
        node: of the row; its path's tokens count as output.
        tree_ids, tree_parents: of the row's entry.
        words, stop_bits, prompt_bits, counts, bias: the rows of the row's slot.
        allowed: bitmap of what the row's grammar allows; read only with GRAMMAR.
    """
    flags = tl.load(words)
    value = raw
    if flags & BIASED != 0:
        value = value + tl.load(bias + ids, mask=inside, other=0.0)
    if flags & PENALISED != 0:
        count = tl.load(counts + ids, mask=inside, other=0)
        at = node
        while at > 0:
            count += (ids == tl.load(tree_ids + at)).to(tl.int32)
            at = tl.load(tree_parents + at)
        factor = number(words, REPETITION) + tl.zeros_like(value)
        repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        known = (count > 0) | has_bit(prompt_bits, ids, inside)
        value = tl.where(known & (factor != 1.0), repeated, value)
        lowered = value - number(words, FREQUENCY) * count.to(tl.float32)
        lowered = lowered - number(words, PRESENCE)
        value = tl.where(count > 0, lowered, value)
    if (flags & HAS_STOPS != 0) & (position < tl.load(words + MIN_UNTIL)):
        value = tl.where(has_bit(stop_bits, ids, inside), float("-inf"), value)
    if flags & GRAMMAR != 0:
        value = tl.where(has_bit(allowed, ids, inside), value, float("-inf"))
    return tl.where(value == value, value, float("-inf"))
