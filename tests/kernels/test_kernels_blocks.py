"""Rows laid out on the device are those of the plain version."""

from __future__ import annotations

import random
from dataclasses import fields as members

import pytest
import torch

from slipstream.kernels.blocks import lay_out, lay_out_reference
from slipstream.kernels.drafting import BLOCK_INTS, Blocks
from slipstream.layers.device_rows import DeviceRows


@pytest.mark.parametrize(
    ("most_rows", "most_entries", "counts"),
    [
        (1, 1, [1]),
        (16, 16, []),
        (16, 1, [16]),
        (64, 5, [16, 3, 1, 2]),
        (300, 300, [1] * 300),
        (300, 130, [200, 4, 30, 1]),
    ],
)
def test_rows_of_blocks(
    most_rows: int, most_entries: int, counts: list[int], device: torch.device
) -> None:
    rng = random.Random(most_rows)
    fields = torch.full((most_entries, BLOCK_INTS), -7, dtype=torch.int32)
    for entry, count in enumerate(counts):
        row = sum(counts[:entry])
        head = [rng.randrange(50), rng.randrange(9000), rng.randrange(1000)]
        fields[entry] = torch.tensor([*head, 9, count, row, 0, 0])
    blocks = Blocks(torch.tensor([len(counts), sum(counts)], dtype=torch.int32), fields)
    tables = torch.zeros(50, 4, dtype=torch.int32)
    want = DeviceRows.allocate(most_rows, most_entries, tables, "cpu", 1)
    want_ids = torch.full((most_rows,), -7, dtype=torch.int32)
    lay_out_reference(blocks, want, want_ids, 99)
    got = DeviceRows.allocate(most_rows, most_entries, tables.to(device), device, 1)
    got_ids = torch.full((most_rows,), -7, dtype=torch.int32, device=device)
    for name in ("slots", "offsets", "starts", "entries", "positions"):
        getattr(got, name).fill_(-7)
    on_device = Blocks(blocks.counts.to(device), fields.to(device))
    lay_out(on_device, got, got_ids, 99)
    for member in members(DeviceRows):
        assert getattr(got, member.name).tolist() == getattr(want, member.name).tolist()
    assert got_ids.tolist() == want_ids.tolist()
    lay_out(on_device, got)  # as for context rows, which have no ids
    assert got.entries.tolist() == want.entries.tolist()
    assert got_ids.tolist() == want_ids.tolist()
