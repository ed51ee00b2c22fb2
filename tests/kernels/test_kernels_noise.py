"""Counter noise in kernels: the values of `slipstream.noise`.

They are asserted to be equal bit for bit, except that one value in a million may be off by one unit
in the last place of fp32: fp64 logarithms of two libraries may differ in their last bit, and only
where that bit decides how the fp32 is rounded can it be seen.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.noise import gumbel_values, gumbel_vocabulary
from slipstream.noise import gumbel

SEEDS = (0, 1, 0x0123456789ABCDEF, 0xFFFFFFFFFFFFFFFF, 0x80000000_7FFFFFFF)


def _compare(values: Tensor, expected: Tensor) -> None:
    values, expected = values.cpu(), expected.cpu()
    off = (values.view(torch.int32).long() - expected.view(torch.int32).long()).abs()
    off[values == expected] = 0  # the two zeros
    assert int(off.max()) <= 1
    assert int((off > 0).sum()) <= 1 + len(off) // 1_000_000


@pytest.mark.parametrize("seed", SEEDS)
def test_any_ids_at_any_positions(device: torch.device, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    ids = torch.randint(0, 250_000, (3000,), generator=generator)
    positions = torch.randint(0, 1 << 31, (3000,), generator=generator)
    for choice in (0, 7, 0xFFFFFFFF):
        values = gumbel_values(seed, positions.int().to(device), choice, ids.int().to(device))
        _compare(values, gumbel(seed, positions, choice, ids))


@pytest.mark.parametrize("vocab_size", [1, 5, 1023, 4099])
def test_a_vocabulary(device: torch.device, cases: int, vocab_size: int) -> None:
    like = torch.empty(0, device=device)
    for position in range(min(3, cases)):
        values = gumbel_vocabulary(SEEDS[2], position, 3, vocab_size, like)
        _compare(values, gumbel(SEEDS[2], position, 3, torch.arange(vocab_size)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="millions of values")
def test_millions(device: torch.device) -> None:
    like = torch.empty(0, device=device)
    for position in range(20):
        values = gumbel_vocabulary(SEEDS[3], position, 0, 1 << 20, like)
        _compare(values, gumbel(SEEDS[3], position, 0, torch.arange(1 << 20)))
