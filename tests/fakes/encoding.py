"""What the fake target and the fake draft share: context rows, and which token comes next.

A context row is 8 bytes: int32 token, int32 position, little-endian. It travels as a feature of
width 2 and element type float32 whose bits are never read as numbers.

`next_token` is the fake model: the token at a position is a pure hash of the position and of the
token before it. So a fake draft that knows the anchor can be right whenever it wants to be, and
anybody can say what an answer must hold.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

FEATURE_WIDTH = 2
FEATURE_DTYPE = "float32"
ROW_BYTES = 8
FINGERPRINTS = {"fc": "fake", "hidden_norm": "fake", "embedding": "fake", "lm_head": "fake"}

_MASK = (1 << 64) - 1


def encode_rows(first: int, tokens: Sequence[int]) -> bytes:
    """The context rows of `tokens`, which sit at positions first, first + 1, ..."""
    flat = [value for i, token in enumerate(tokens) for value in (token, first + i)]
    return struct.pack(f"<{len(flat)}i", *flat)


def decode_rows(rows: bytes | memoryview) -> list[tuple[int, int]]:
    """(token, position) of every row."""
    return [(token, position) for token, position in struct.iter_unpack("<ii", rows)]


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def next_token(previous: int, position: int, vocab: int) -> int:
    """The token drawn at `position` when `previous` sits at position - 1; in [0, vocab)."""
    return mix(previous, position) % vocab
