"""Counter noise inside kernels: `slipstream.noise` as device functions.

`gumbel` is for any token ids, `gumbel_run` for a run of them, at a quarter of the words' cost.
Logarithms are fp64: 1 - w is exact there, so log(1 - w) is what log1p(-w) would be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)
_BLOCK = 1024


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10; all six words uint32, of shapes that broadcast. Returns four words."""
    m0 = tl.cast(_MULTIPLIER_0, tl.uint32)
    m1 = tl.cast(_MULTIPLIER_1, tl.uint32)
    w0 = tl.cast(_WEYL_0, tl.uint32)
    w1 = tl.cast(_WEYL_1, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def words_of(seed_low, seed_high, position, choice, counter):
    """The four words of each counter word 0; everything int32, read as uint32, and any shape."""
    c0 = counter.to(tl.uint32, bitcast=True)
    zero = c0 ^ c0
    return philox(
        c0,
        zero + position.to(tl.uint32, bitcast=True),
        zero + choice.to(tl.uint32, bitcast=True),
        zero,
        zero + seed_low.to(tl.uint32, bitcast=True),
        zero + seed_high.to(tl.uint32, bitcast=True),
    )


@triton.jit
def gumbel_of(word):
    """The fp32 Gumbel value of a uint32 word: -log(-log(1 - w)), w = (word + 0.5) 2^-32."""
    w = (word.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
    return (-tl.log(-tl.log(1.0 - w))).to(tl.float32)


@triton.jit
def gumbel(seed_low, seed_high, position, choice, token_ids):
    """The fp32 Gumbel value of each of `token_ids`, a block of int32.

    The seed's two words and `choice` are int32 scalars with the bits of the unsigned words;
    `position`, the position that the draw decides, is an int32 scalar or a block like the ids.
    """
    x0, x1, x2, x3 = words_of(seed_low, seed_high, position, choice, token_ids >> 2)
    lane = token_ids & 3
    low = tl.where(lane == 0, x0, x1)
    high = tl.where(lane == 2, x2, x3)
    return gumbel_of(tl.where(lane < 2, low, high))


@triton.jit
def gumbel_run(seed_low, seed_high, position, choice, first, BLOCK: tl.constexpr):
    """The fp32 Gumbel values of ids first .. first + BLOCK - 1; both are multiples of 4."""
    counter = (first >> 2) + tl.arange(0, BLOCK // 4)
    x0, x1, x2, x3 = words_of(seed_low, seed_high, position, choice, counter)
    # Interleaving (x0, x2) with (x1, x3) puts the words of a counter in order.
    return gumbel_of(tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3)))


@triton.jit(do_not_specialize=["count"])
def _gumbel_kernel(key, positions, token_ids, out, count, RUN: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    mask = at < count
    low = tl.load(key)
    high = tl.load(key + 1)
    choice = tl.load(key + 2)
    if RUN:
        values = gumbel_run(low, high, tl.load(positions), choice, first, BLOCK)
    else:
        ids = tl.load(token_ids + at, mask=mask, other=0)
        position = tl.load(positions + at, mask=mask, other=0)
        values = gumbel(low, high, position, choice, ids)
    tl.store(out + at, values, mask=mask)


def int32_word(value: int) -> int:
    """The low 32 bits of `value` as the int32 that has them."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def gumbel_values(seed: int, positions: Tensor, choice: int, token_ids: Tensor) -> Tensor:
    """`slipstream.noise.gumbel` by kernel: for tests, not for steps.

    Args:
        positions: (N,) int32, one for each id.
        token_ids: (N,) int32.
    """
    return _launch(seed, positions, choice, token_ids, len(token_ids))


def gumbel_vocabulary(
    seed: int, position: int, choice: int, vocab_size: int, like: Tensor
) -> Tensor:
    """The values of ids 0 .. vocab_size - 1 at one position, on the device of `like`."""
    positions = torch.tensor([position], dtype=torch.int32, device=like.device)
    return _launch(seed, positions, choice, None, vocab_size)


def _launch(
    seed: int, positions: Tensor, choice: int, token_ids: Tensor | None, count: int
) -> Tensor:
    words = [int32_word(seed), int32_word(seed >> 32), int32_word(choice)]
    key = torch.tensor(words, dtype=torch.int32, device=positions.device)
    out = torch.empty(count, dtype=torch.float32, device=positions.device)
    ids = positions if token_ids is None else token_ids
    grid = (triton.cdiv(count, _BLOCK),)
    _gumbel_kernel[grid](key, positions, ids, out, count, RUN=token_ids is None, BLOCK=_BLOCK)
    return out
