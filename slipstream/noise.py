"""Counter noise: the Gumbel value of a token depends on seed, position, choice and token id only.

Token v at position p gets word v mod 4 of Philox4x32-10 with key (seed's low word, high word) and
counter (v // 4, p, choice, 0). With x that word and w = (x + 0.5) 2^-32, its value is
-log(-log1p(-w)), rounded to fp32. w needs 33 bits, so both logarithms are taken in fp64; all values
lie in [GUMBEL_LOW, GUMBEL_HIGH].

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]
F32: TypeAlias = npt.NDArray[np.float32]

GUMBEL_LOW = -3.14
GUMBEL_HIGH = 22.88

_ROUNDS = 10
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 14  # Counters whose temporaries fit a core's second-level cache.


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10, word by word: the reference.

    Every word is an int64 tensor with values in [0, 2^32); shapes broadcast. The product of two
    words wraps in int64, which leaves all of its 64 bits right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        high0, low0 = (product0 >> 32) & _MASK, product0 & _MASK
        high1, low1 = (product1 >> 32) & _MASK, product1 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, position: int | Tensor, choice: int, token_ids: Tensor) -> Tensor:
    """The fp32 Gumbel value of every token id, in the shape of `token_ids`.

    `position` is the position that the draw decides; a tensor of positions broadcasts against
    `token_ids`, a (depths, candidates) block for one.
    """
    if token_ids.device.type == "cpu" and not (isinstance(position, Tensor) and position.is_cuda):
        return _gumbel_numpy(seed, position, choice, token_ids)
    return _gumbel_torch(seed, position, choice, token_ids)


def _gumbel_torch(seed: int, position: int | Tensor, choice: int, token_ids: Tensor) -> Tensor:
    device = token_ids.device
    at = torch.as_tensor(position, device=device).long()
    ids, at = torch.broadcast_tensors(token_ids.long(), at)  # type: ignore[no-untyped-call]
    fixed = torch.tensor([choice, 0, seed & _MASK, seed >> 32], device=device)
    words = philox4x32((ids // 4, at, fixed[0], fixed[1]), (fixed[2], fixed[3]))
    x = torch.stack(words, dim=-1).gather(-1, (ids % 4).unsqueeze(-1)).squeeze(-1)
    w = (x.double() + 0.5) * 2.0**-32
    return (-(-torch.log1p(-w)).log()).float()


def _gumbel_numpy(seed: int, position: int | Tensor, choice: int, token_ids: Tensor) -> Tensor:
    """The same values as `_gumbel_torch`, about four times as fast on a few thousand ids."""
    at = torch.as_tensor(position).long()
    ids, at = torch.broadcast_tensors(token_ids.long(), at)  # type: ignore[no-untyped-call]
    flat: I64 = ids.reshape(-1).numpy()
    positions: I64 = at.reshape(-1).numpy()
    bits = token_words(flat, positions.astype(np.uint64), _words(choice), _words(seed))
    return torch.from_numpy(gumbel_of(bits)).reshape(ids.shape)


def gumbel_of(words: U64) -> F32:
    """The fp32 Gumbel value of each 32-bit word."""
    w = (words.astype(np.float64) + 0.5) * 2.0**-32
    gumbels: F32 = (-np.log(-np.log1p(-w))).astype(np.float32)
    return gumbels


def token_words(token_ids: I64, positions: U64, choices: U64, seeds: U64) -> U64:
    """The word of each token id, (N,); the other arguments are (N,) or (1,)."""
    x = _philox((token_ids >> 2).astype(np.uint64), positions, choices, seeds)
    lane = token_ids & 3
    return np.where(lane < 2, np.where(lane == 0, x[0], x[1]), np.where(lane == 2, x[2], x[3]))


def vocabulary_words(vocab_size: int, position: int, choice: int, seed: int) -> U64:
    """The words of ids 0 .. vocab_size - 1, a quarter of the work of asking for each."""
    counters = (vocab_size + 3) // 4
    words = np.empty((counters, 4), np.uint64)
    for first in range(0, counters, _CHUNK):
        ids = np.arange(first, min(first + _CHUNK, counters), dtype=np.uint64)
        for lane, x in enumerate(_philox(ids, _words(position), _words(choice), _words(seed))):
            words[first : first + len(ids), lane] = x
    return words.reshape(-1)[:vocab_size]


def _words(*values: int) -> U64:
    return np.array(values, np.uint64)


def _philox(c0: U64, c1: U64, c2: U64, seeds: U64) -> tuple[U64, U64, U64, U64]:
    """`philox4x32` on arrays of one dimension, with counter word 3 = 0 and the key split here.

    Words 1 and 3 of the counter are only ever combined by xor, so they carry the upper half of
    their product along, and one mask per word and round cuts it off.
    """
    mask, half = np.uint64(_MASK), np.uint64(32)
    k0, k1 = seeds & mask, seeds >> half
    c3 = np.zeros(1, np.uint64)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * np.uint64(_MULTIPLIER[0]), c2 * np.uint64(_MULTIPLIER[1])
        c0 = ((product1 >> half) ^ c1 ^ k0) & mask
        c2 = ((product0 >> half) ^ c3 ^ k1) & mask
        c1, c3 = product1, product0
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    return c0, c1 & mask, c2, c3 & mask
