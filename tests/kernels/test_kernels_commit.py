"""KV moves as through a temporary, features are rounded as by `RMSNorm`, nothing else moves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from slipstream.kernels.commit import gather_rows, move_kv, norm_scatter
from slipstream.kernels.walk import HEADER, Walks
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.norm import RMSNorm

PAGE, PAGES, SLOTS, ENTRIES = 4, 60, 3, 4


def _tables(rng: random.Random, device: torch.device) -> Tensor:
    pages = rng.sample(range(PAGES), SLOTS * 18)
    return torch.tensor(pages, dtype=torch.int32, device=device).view(SLOTS, 18)


def _flat(tables: Tensor, slot: int, index: int) -> int:
    return int(tables[slot, index // PAGE]) * PAGE + index % PAGE


def _path(rng: random.Random, most: int) -> list[int]:
    """Ascending nodes from 0 on: a beginning of a chain, then gaps."""
    path = list(range(rng.randint(1, most)))
    while path[-1] < most - 1 and rng.random() < 0.9:
        path.append(path[-1] + rng.randint(1, 3))
    return [node for node in path if node < most]


@pytest.mark.parametrize("shape", [(2, 3, 2, 8), (1, 2, 1, 300)])
def test_kv_moves_as_through_a_temporary(
    device: torch.device, cases: int, shape: tuple[int, int, int, int]
) -> None:
    layers, count, heads, dim = shape
    rng = random.Random(dim)
    most = 40
    for _ in range(max(4, cases // 100)):
        tables = _tables(rng, device)
        kv = torch.randn(layers, 2, PAGES, PAGE, heads, dim).to(device)
        rows = DeviceRows.allocate(8, ENTRIES, tables, device, 1)
        walks = Walks.allocate(8, ENTRIES + 1, most, device)
        walks.result.fill_(most)
        walks.path.fill_(7)
        rows.counts.copy_(torch.tensor([count, 0]))
        expected = kv.clone().view(layers * 2, PAGES * PAGE, heads, dim)
        old = expected.clone()
        for entry, slot in enumerate(rng.sample(range(SLOTS), count)):
            start, path = rng.randint(0, 20), _path(rng, most)
            path = path[: rng.randint(0, len(path))]
            rows.slots[entry], rows.starts[entry] = slot, start
            walks.result[entry, 0] = len(path)
            walks.path[entry, : len(path)] = torch.tensor(path, dtype=torch.int32).to(device)
            for i, node in enumerate(path):
                source, target = (_flat(tables, slot, start + n) for n in (node, i))
                expected[:, target] = old[:, source]
        move_kv(kv, rows, walks)
        assert torch.equal(kv.view_as(expected).cpu(), expected.cpu())
    assert HEADER == 4


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_normed_and_put_in_place(
    device: torch.device, width: int, dtype: torch.dtype
) -> None:
    rng = random.Random(width)
    tables = _tables(rng, device)
    rows = DeviceRows.allocate(12, ENTRIES, tables, device, 1)
    owners = [0, 0, 0, 1, 1, 1, 1, 1, -1, -1, -1, -1]
    places = [9, -1, 10, 0, 1, -1, 2, 3, 5, -1, 5, 5]
    rows.entries.copy_(torch.tensor(owners))
    rows.slots[:2] = torch.tensor([2, 0], dtype=torch.int32).to(device)
    dest = torch.tensor(places, dtype=torch.int32, device=device)
    projected = (torch.randn(12, width) * 3).to(device, dtype)
    projected[8:] = float("nan")
    weight = (torch.rand(width) + 0.5).to(device, dtype)
    features = torch.full((PAGES * PAGE, width), -7.0, dtype=dtype, device=device)
    expected = features.cpu().clone()
    normed = RMSNorm(weight, 1e-6)(projected).cpu()
    for row, (owner, place) in enumerate(zip(owners, places, strict=True)):
        if owner >= 0 and place >= 0:
            expected[_flat(tables, (2, 0)[owner], place)] = normed[row]
    norm_scatter(projected, weight, 1e-6, dest, rows, features, PAGE)
    # A sum in another order may turn the rounding of a value: one unit in the last place.
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(features.cpu(), expected, rtol=tolerance, atol=0)


def test_gathered_rows(device: torch.device) -> None:
    features = torch.randn(30, 1500).to(device)
    indices = torch.tensor([7, 29, 0, 7, 3], dtype=torch.int32, device=device)
    out = torch.full((5, 1500), -7.0, device=device)
    gather_rows(features, indices, 4, out)
    assert torch.equal(out[:4], features[indices[:4].long()])
    assert (out[4] == -7).all()
