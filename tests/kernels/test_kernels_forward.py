"""Norms, activation, embedding, RoPE and the scatter into pages, against the plain layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.activation import silu_mul, silu_mul_reference
from slipstream.kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    embed,
    embed_reference,
    head,
    rms_norm,
    rms_norm_reference,
)
from slipstream.kernels.rope_kv import (
    PlacedRows,
    rope_context,
    rope_reference,
    rope_table,
    rope_write,
    scatter_reference,
)
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope, RopeConfig

TYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def close(got: Tensor, want: Tensor) -> None:
    """Equal up to the order of sums; in bf16 a rounding may go the other way.

    The interpreter cuts bf16 off where a GPU rounds to the nearest.
    """
    rtol = atol = 1e-5
    if got.dtype == torch.bfloat16:
        rtol, atol = (2e-2, 4e-2) if got.is_cuda else (4e-2, 1e-1)
    torch.testing.assert_close(got.cpu().float(), want.cpu().float(), rtol=rtol, atol=atol)


def values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def ragged(
    counts: list[int], starts: list[int], device: torch.device, padding: int = 0, page_size: int = 4
) -> DeviceRows:
    """Chains; the entries' slots and pages are in no order."""
    total, entries = sum(counts), len(counts)
    pages = -(-max(s + c for s, c in zip(starts, counts, strict=True)) // page_size)
    tables = torch.randperm((entries + 1) * pages, generator=torch.Generator().manual_seed(1))
    tables = tables.view(entries + 1, pages).int().to(device)
    rows = DeviceRows.allocate(total + padding, entries + 1, tables, device, 1)
    ends = torch.tensor(counts).cumsum(0)
    owner = torch.arange(entries).repeat_interleave(torch.tensor(counts))
    places = [s + i for s, c in zip(starts, counts, strict=True) for i in range(c)]
    rows.counts.copy_(torch.tensor([entries, total]))
    rows.slots[:entries] = torch.arange(entries, 0, -1, device=device).int()
    rows.offsets[1 : entries + 1] = ends.int().to(device)
    rows.offsets[entries + 1 :] = total
    rows.starts[:entries] = torch.tensor(starts, dtype=torch.int32, device=device)
    rows.entries.fill_(-1)
    rows.entries[:total] = owner.int().to(device)
    rows.positions[:total] = torch.tensor(places, dtype=torch.int32, device=device)
    return rows


def make_rope(dim: int, device: torch.device, kind: str = "default") -> Rope:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 64} if kind == "yarn" else {}
    return Rope(RopeConfig(kind, 10000.0, dim, 256, parameters), device)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [48, 576, 4096])
def test_norms_equal_the_plain_layer(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (values(3, hidden, dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight = values(hidden, dtype=dtype, device=device, seed=2)
    out = poisoned(3, hidden, dtype=dtype, device=device)
    rms_norm(x, weight, EPS, out)
    close(out, rms_norm_reference(x, weight, EPS))
    total, normed = add_rms_norm_reference(x, residual, weight, EPS)
    taps = poisoned(3, 3 * hidden, dtype=dtype, device=device)
    add_rms_norm(x, residual, weight, EPS, out, taps[:, hidden : 2 * hidden])
    close(residual, total)
    assert torch.equal(taps[:, hidden : 2 * hidden], residual)
    assert taps[:, :hidden].isnan().all()
    assert taps[:, 2 * hidden :].isnan().all()
    close(out, normed)
    normed = add_rms_norm_reference(x, residual, weight, EPS)[1]
    add_rms_norm(x, residual, weight, EPS, out)
    close(out, normed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", [1, 4])
def test_norm_of_a_product_in_parts(parts: int, dtype: torch.dtype, device: torch.device) -> None:
    """Their sum is rounded before it is added, as a whole product would be."""
    cut = values(parts, 3, 576, dtype=torch.float32, device=device)
    residual, weight = (values(*s, dtype=dtype, device=device, seed=1) for s in ((3, 576), (576,)))
    total, normed = add_rms_norm_reference(cut.sum(0).to(dtype), residual, weight, EPS)
    out = poisoned(3, 576, dtype=dtype, device=device)
    add_rms_norm(cut, residual, weight, EPS, out)
    close(residual, total)
    close(out, normed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inner", [80, 1536])
def test_silu_mul(inner: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = 4 * values(5, 2 * inner, dtype=dtype, device=device)
    out = poisoned(5, inner, dtype=dtype, device=device)
    silu_mul(gate_up, out)
    close(out, silu_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", TYPES)
def test_embedding_scales_and_ignores_unknown_ids(dtype: torch.dtype, device: torch.device) -> None:
    table = values(9, 1100, dtype=dtype, device=device)
    ids = torch.tensor([3, 8, 0, -7, 9], dtype=torch.int32, device=device)
    for scale in (1.0, 1.7):
        out = poisoned(5, 1100, dtype=dtype, device=device)
        embed(ids, table, out, scale)
        close(out[:3], embed_reference(ids[:3], table, scale))
        assert not out[3:].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_head_gives_fp32(dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight = (values(n, 48, dtype=dtype, device=device, seed=n) for n in (3, 20))
    out = poisoned(3, 20, dtype=torch.float32, device=device)
    head(hidden, weight, out)
    loose = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out, hidden.float() @ weight.float().t(), rtol=loose, atol=loose)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rope_table_holds_the_values_of_rope(kind: str, device: torch.device) -> None:
    rope = make_rope(16, device, kind)
    table = rope_table(rope, 200)
    cos, sin = rope(torch.arange(200, device=device))
    assert torch.equal(table[:, 0], cos[:, 0, :8])
    assert torch.equal(table[:, 1], sin[:, 0, 8:])
    assert torch.equal(table[:, 1], -sin[:, 0, :8])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "turned", "normed"),
    [(4, 2, 16, 16, True), (9, 3, 64, 64, False), (32, 8, 128, 128, True), (6, 6, 80, 32, True)],
)
def test_rope_write(
    heads: int,
    kv: int,
    dim: int,
    turned: int,
    normed: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rows = ragged([1, 3, 2], [0, 7, 30], device, padding=2)
    total, capacity = 6, rows.capacity
    table = rope_table(make_rope(turned, device), 40)
    qkv = values(capacity, (heads + 2 * kv) * dim, dtype=dtype, device=device)
    q_norm, k_norm = (values(dim, dtype=dtype, device=device, seed=s) for s in (3, 4))
    before = qkv.clone()
    q_out = poisoned(capacity, heads, dim, dtype=dtype, device=device)
    shape = (rows.tables.numel(), 4, kv, dim)
    k_pages, v_pages = (poisoned(*shape, dtype=dtype, device=device) for _ in range(2))
    norms = (q_norm, k_norm) if normed else (None, None)
    rows.positions[total:] = 10**8  # of rows without an entry nothing is read
    placed = PlacedRows.allocate(capacity, table).find(rows, table, 4)
    rope_write(qkv, placed, *norms, EPS, q_out, k_pages, v_pages, 0.7)
    rows.positions[total:] = 0
    assert torch.equal(qkv, before)
    assert q_out[total:].isnan().all()

    parts = qkv.view(capacity, -1, dim).split((heads, kv, kv), 1)
    q, k = (
        rope_reference(x, norm, EPS, table, rows.positions)
        for x, norm in zip(parts, norms, strict=False)
    )
    close(q_out[:total], q[:total])
    for pages, wanted in ((k_pages, k), (v_pages, parts[2] * 0.7)):
        want = torch.full_like(pages, torch.nan)
        scatter_reference(want, rows, wanted)
        assert torch.equal(pages.isnan(), want.isnan())  # nothing else was touched
        close(pages.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rope_write_equals_the_plain_layers(kind: str, device: torch.device) -> None:
    rows = ragged([5], [9], device)
    heads, kv, dim = 4, 2, 16
    rope = make_rope(dim, device, kind)
    qkv = values(5, (heads + 2 * kv) * dim, dtype=torch.float32, device=device)
    weight = values(2, dim, dtype=torch.float32, device=device, seed=5)
    q_out = torch.empty(5, heads, dim, device=device)
    pages = torch.zeros(2, rows.tables.numel(), 4, kv, dim, device=device)
    table = rope_table(rope, 20)
    placed = PlacedRows.allocate(5, table).find(rows, table, 4)
    rope_write(qkv, placed, weight[0], weight[1], EPS, q_out, *pages)
    both = torch.cat([weight[:1].expand(heads, -1), weight[1:].expand(kv, -1)])
    qk = RMSNorm(both, EPS)(qkv.view(5, -1, dim)[:, : heads + kv])
    close(q_out, rope.rotate(qk, rope(rows.positions))[:, :heads])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kv", "dim", "turned"), [(2, 16, 16), (3, 64, 32), (8, 128, 128)])
def test_rope_context(
    kv: int, dim: int, turned: int, dtype: torch.dtype, device: torch.device
) -> None:
    layers, rows = 3, ragged([2, 4], [5, 0], device, padding=1)
    table = rope_table(make_rope(turned, device), 16)
    both = values(rows.capacity, layers * 2 * kv * dim, dtype=dtype, device=device)
    norm = values(layers * kv, dim, dtype=dtype, device=device, seed=6)
    shape = (layers, rows.tables.numel(), 4, kv, dim)
    k_cache, v_cache = (poisoned(*shape, dtype=dtype, device=device) for _ in range(2))
    rope_context(both, norm, EPS, table, rows, k_cache, v_cache, 1.3)
    split = both.view(-1, layers, 2, kv, dim)
    for layer in range(layers):
        weight = norm[layer * kv : (layer + 1) * kv]
        k = rope_reference(split[:, layer, 0], weight, EPS, table, rows.positions)
        for cache, wanted in ((k_cache, k), (v_cache, split[:, layer, 1] * 1.3)):
            want = torch.full_like(cache[layer], torch.nan)
            scatter_reference(want, rows, wanted)
            assert torch.equal(cache[layer].isnan(), want.isnan())
            close(cache[layer].nan_to_num(), want.nan_to_num())


def test_positions_may_differ_from_the_places(device: torch.device) -> None:
    """A tree's siblings share a position, and have a place each."""
    rows = ragged([4], [6], device)
    rows = replace(rows, positions=torch.tensor([6, 7, 7, 8], dtype=torch.int32, device=device))
    table = rope_table(make_rope(16, device), 16)
    qkv = values(1, 3 * 16, dtype=torch.float32, device=device).expand(4, -1).contiguous()
    pages = torch.zeros(2, rows.tables.numel(), 4, 1, 16, device=device)
    q_out = torch.empty(4, 1, 16, device=device)
    placed = PlacedRows.allocate(4, table).find(rows, table, 4)
    rope_write(qkv, placed, None, None, EPS, q_out, *pages)
    assert torch.equal(q_out[1], q_out[2])
    table_row = rows.tables[rows.slots[0].item()].tolist()
    stored = [pages[0, table_row[i // 4], i % 4] for i in (6, 7, 8, 9)]
    assert torch.equal(stored[1], stored[2])
    assert not torch.equal(stored[0], stored[1])
