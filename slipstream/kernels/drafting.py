"""How requests want their trees, and which blocks a step has: device tables that kernels read.

Both are written by the host and small. A slot's row changes when a request takes it; the blocks
change with every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from slipstream.kernels.noise import int32_word
from slipstream.tree import TreeMode, TreeSpec, candidates_needed

SPEC_INTS = 12
"""Columns of `Specs.ints`."""

SPEC_REALS = 4
"""Columns of `Specs.reals`."""

BLOCK_INTS = 8
"""Columns of `Blocks.fields`."""

# Columns of `Specs.ints`.
MODE = tl.constexpr(0)
WIDTH = tl.constexpr(1)
BUDGET = tl.constexpr(2)
SPINE = tl.constexpr(3)
NEEDED = tl.constexpr(4)  # candidates that the tree reads
LOOKED_AT = tl.constexpr(5)  # best tokens that are ranked to find them
NOISY = tl.constexpr(6)
CHOICE = tl.constexpr(7)
SEED_LOW = tl.constexpr(8)
SEED_HIGH = tl.constexpr(9)
INTS = tl.constexpr(SPEC_INTS)

# Columns of `Specs.reals`.
SHARE = tl.constexpr(0)
OUTSIDE = tl.constexpr(1)  # log of what the noise adds to the mass of all other tokens
BETA = tl.constexpr(2)
GAP0 = tl.constexpr(3)
REALS = tl.constexpr(SPEC_REALS)

# Values of MODE.
CHAIN = tl.constexpr(0)
ACCUM_LOGP = tl.constexpr(1)
TOP2GAP = tl.constexpr(2)
BEST_FIRST = tl.constexpr(3)

# Columns of `Blocks.fields`.
SLOT = tl.constexpr(0)
START = tl.constexpr(1)
ANCHOR = tl.constexpr(2)
NODES = tl.constexpr(3)
COUNT = tl.constexpr(4)
ROW = tl.constexpr(5)
OUT = tl.constexpr(6)
FIELDS = tl.constexpr(BLOCK_INTS)

_MODES = {TreeMode.ACCUM_LOGP: 1, TreeMode.TOP2GAP: 2, TreeMode.BEST_FIRST: 3}


@dataclass(frozen=True, slots=True)
class Specs:
    """Per slot, how its trees are built; made of `spec_row`.

    Attributes:
        ints: (slots, SPEC_INTS) int32.
        reals: (slots, SPEC_REALS) fp64.
    """

    ints: Tensor
    reals: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one step.

    Attributes:
        counts: (2,) int32, blocks and rows.
        fields: (E, BLOCK_INTS) int32: slot, start, anchor, most nodes of its tree, rows of the
            block, its first row, first node of its tree in the output.
    """

    counts: Tensor
    fields: Tensor


def spec_row(
    spec: TreeSpec,
    *,
    looked_at: int,
    noisy: bool,
    seed: int = 0,
    choice: int = 0,
    share: float = 0.0,
    most_share: float = 0.75,
) -> tuple[list[int], list[float]]:
    """One row of `Specs.ints` and of `Specs.reals`.

    Args:
        seed, choice: of the request's noise.
        looked_at: the best tokens among which a noisy request's candidates are ranked; without
            noise the candidates themselves.
        share: factor on the noise; what it adds to the mass of the tokens that draw none of it is
            Gamma(1 - share), with share cut to `most_share`.
    """
    mode = 0 if spec.is_chain else _MODES[spec.mode]
    outside = math.lgamma(1 - min(share, most_share)) if noisy else 0.0
    needed = candidates_needed(spec)
    ints = [mode, spec.width, spec.budget, int(spec.spine), needed, looked_at, int(noisy)]
    ints += [int32_word(choice), int32_word(seed), int32_word(seed >> 32), 0, 0]
    return ints, [share if noisy else 0.0, outside, spec.beta, spec.gap0]
