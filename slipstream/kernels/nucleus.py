"""The filters of one row (min-p, top-k, top-p), asked after the race instead of before.

Every filter keeps a beginning of the tokens in their order (value descending, then id), so the kept
tokens are such a beginning K too. The winner of a race is the token with the best score among its
candidates. If the candidates hold all of K and the winner is in K, it is the best of K: the draw.
If it is not in K, neither is any token behind it, so the tokens before it still hold all of K, and
the race is run again among those. Each round leaves fewer candidates, and the first token of the
order is always kept, so it ends. The first race, among all tokens, holds K in any case.

Whether a token is in K is exact up to the rounding of sums of fp64: its value (min-p), the number
of tokens before it (top-k), and their mass against the mass of all that min-p and top-k keep
(top-p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.edits import LOWEST, edited, key_value, number, order_key
from slipstream.kernels.noise import gumbel_run
from slipstream.kernels.slot_state import (
    CHOICE,
    FLAGS,
    HAS_MIN_P,
    HAS_TOP_P,
    MIN_P_DEPTH,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)


@triton.jit
def scaled_block(logits, first, row, V: tl.constexpr, BLOCK: tl.constexpr):
    """Ids, logit / T and whether there is such a token, of a block; `row` as `row_of` gives it."""
    position, node, tree_ids, tree_parents, words, stop_bits, prompt_bits, counts, bias, allowed = (
        row
    )
    ids = first + tl.arange(0, BLOCK)
    inside = ids < V
    raw = tl.load(logits + ids, mask=inside, other=float("-inf"))
    value = edited(
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
    )
    temperature = number(words, TEMPERATURE)
    return ids, tl.div_rn(value, temperature + tl.zeros_like(value)), inside


@triton.jit
def relative_mass(value, top, here):
    """exp(value - top) in fp64 where `here`, else 0; no value there is above `top`."""
    top = tl.where(top > float("-inf"), top, 0.0)
    exponent = tl.where(here, value, top).to(tl.float64) - top.to(tl.float64)
    return tl.where(here, tl.exp(exponent), 0.0)


@triton.jit
def _before(logits, row, winner, top, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens before `winner`: their number, their mass, and the key of the best of them."""
    words = row[4]
    low = tl.load(words + SEED_LOW)
    high = tl.load(words + SEED_HIGH)
    choice = tl.load(words + CHOICE)
    rank = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    best = tl.full((), LOWEST, tl.int64)
    best_value = tl.full((), LOWEST, tl.int64)
    first = tl.full((), 0, tl.int32)
    while first < V:
        ids, scaled, inside = scaled_block(logits, first, row, V, BLOCK)
        key = order_key(scaled, ids)
        ahead = inside & (key > winner) & (scaled >= floor) & (scaled > float("-inf"))
        found = tl.sum(ahead.to(tl.int32), 0)
        if found > 0:
            rank += found
            mass += tl.sum(relative_mass(scaled, top, ahead), 0)
            score = scaled + gumbel_run(low, high, row[0], choice, first, BLOCK)
            race = tl.where(ahead, order_key(score, ids), LOWEST)
            leader = tl.max(race, 0)
            if leader > best:
                best = leader
                best_value = tl.max(tl.where(race == leader, key, LOWEST), 0)
        first += BLOCK
    return rank, mass, best_value


@triton.jit
def _digits(logits, row, floor, prefix, shift, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many kept tokens have each next 8 bits of their ordered value, given the ones above."""
    counts = tl.zeros((256,), tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < V:
        ids, scaled, inside = scaled_block(logits, first, row, V, BLOCK)
        ordered = (order_key(scaled, ids) >> 32) + (1 << 31)
        here = inside & (scaled >= floor) & (scaled > float("-inf"))
        here = here & ((ordered >> (shift + 8)) == prefix)
        if tl.sum(here.to(tl.int32), 0) > 0:
            counts += tl.histogram(((ordered >> shift) & 255).to(tl.int32), 256, mask=here)
        first += BLOCK
    return counts


@triton.jit
def _mass_down_to(logits, row, top, floor, edge, V: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the tokens from `floor` on whose value is above `edge`."""
    mass = tl.full((), 0.0, tl.float64)
    first = tl.full((), 0, tl.int32)
    while first < V:
        _, scaled, inside = scaled_block(logits, first, row, V, BLOCK)
        here = inside & (scaled >= floor) & (scaled > edge)
        if tl.sum(here.to(tl.int32), 0) > 0:
            mass += tl.sum(relative_mass(scaled, top, here), 0)
        first += BLOCK
    return mass


@triton.jit
def _mass_of_best(logits, row, top, floor, top_k, V: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the `top_k` best of the tokens from `floor` on: their least value, digit by digit."""
    digit = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.int64)
    wanted = top_k
    shift = tl.full((), 24, tl.int32)
    enough = tl.full((), 1, tl.int32)
    while (shift >= 0) & (enough > 0):
        counts = _digits(logits, row, floor, prefix, shift, V, BLOCK)
        from_on = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # tokens of this digit or more
        if tl.max(from_on, 0) < wanted:
            enough = tl.full((), 0, tl.int32)  # there are fewer: all are kept
        else:
            last = tl.max(tl.where(from_on >= wanted, digit, 0), 0)
            wanted -= tl.sum(tl.where(digit == last, from_on - counts, 0), 0)
            prefix = prefix * 256 + last
        shift -= 8
    if enough > 0:
        least = key_value((prefix - (1 << 31)) << 32)
        mass = _mass_down_to(logits, row, top, floor, least, V, BLOCK)
        # `wanted` of those that have exactly the least value
        mass += wanted.to(tl.float64) * tl.exp(least.to(tl.float64) - top.to(tl.float64))
    else:
        mass = _mass_down_to(logits, row, top, floor, float("-inf"), V, BLOCK)
    return mass


@triton.jit
def first_kept(logits, row, winner, top, whole, V: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the token that a filtered row draws.

    Args:
        logits: of the row, fp32.
        winner: key (logit / T, id) of the winner among all tokens.
        top: the largest logit / T, fp32.
        whole: mass of all tokens relative to the top one; read only with top-p alone.
    """
    words = row[4]
    flags = tl.load(words + FLAGS)
    top_k = tl.load(words + TOP_K)
    top_p = number(words, TOP_P).to(tl.float64)
    floor = tl.where(flags & HAS_MIN_P != 0, top - number(words, MIN_P_DEPTH), float("-inf"))
    total = tl.full((), -1.0, tl.float64)
    racing = tl.full((), 1, tl.int32)
    while racing > 0:
        rank, mass, following = _before(logits, row, winner, top, floor, V, BLOCK)
        value = key_value(winner)
        kept = (rank == 0) | ((value >= floor) & ((top_k == 0) | (rank < top_k)))
        if kept & (rank > 0) & (flags & HAS_TOP_P != 0):
            # The other filters keep those before it and itself: often that is enough to know.
            least = mass + tl.exp(value.to(tl.float64) - top.to(tl.float64))
            if mass >= top_p * least:
                if total < 0.0:
                    if top_k > 0:
                        total = _mass_of_best(logits, row, top, floor, top_k, V, BLOCK)
                    elif flags & HAS_MIN_P != 0:
                        total = _mass_down_to(logits, row, top, floor, float("-inf"), V, BLOCK)
                    else:
                        total = whole
                kept = mass < top_p * total
        if kept:
            racing = tl.full((), 0, tl.int32)
        else:
            winner = following
    return winner
