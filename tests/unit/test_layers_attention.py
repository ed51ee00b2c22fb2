"""Paged attention against its row-by-row reference."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import slipstream.layers.attention as attention
from slipstream.errors import ConfigError
from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.attention_reference import paged_attention_reference
from slipstream.layers.rows import RowBatch, pack_bits, unpack_bits

PAGE, KV, HEADS, DIM = 8, 2, 6, 16


def random_tree(n: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Ancestor bits and depths of a random tree of n nodes."""
    bits, depths = [1], [0]
    for node in range(1, n):
        parent = rng.randrange(node)
        bits.append(bits[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return bits, depths


def make_case(
    counts: list[int],
    starts: list[int],
    *,
    tree: bool = False,
    bidirectional: bool = False,
    consecutive: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, RowBatch]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    need = [-(-(s + c) // PAGE) for s, c in zip(starts, counts, strict=True)]
    ids = list(range(sum(need) + 3))
    if not consecutive:
        rng.shuffle(ids)
    pages = [[ids.pop(0) for _ in range(n)] for n in need]
    positions = ancestors = None
    if tree:
        trees = [random_tree(c, rng) for c in counts]
        ancestors = [b for bits, _ in trees for b in bits]
        positions = [s + d for s, (_, depths) in zip(starts, trees, strict=True) for d in depths]
    batch = RowBatch.build(
        counts, starts, pages, positions=positions, ancestors=ancestors,
        bidirectional=bidirectional,
    )  # fmt: skip
    shape = (sum(need) + 3, PAGE, KV, DIM)
    k_pages, v_pages = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    rows = sum(counts)
    write_kv(k_pages, v_pages, torch.randn(rows, KV, DIM), torch.randn(rows, KV, DIM), batch)
    return torch.randn(rows, HEADS, DIM), k_pages, v_pages, batch


SHAPES = [
    ([1], [20]),
    ([1], [0]),
    ([7], [0]),
    ([5, 5, 5], [30, 31, 29]),
    ([1, 1, 1, 1], [11, 12, 40, 9]),
    ([16, 3, 1, 16], [50, 2, 50, 45]),
    ([4, 4], [3, 100]),
    ([150, 2], [5, 9]),
    ([70], [33]),
]


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("kind", ["chain", "tree", "bidirectional"])
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize(("counts", "starts"), SHAPES)
def test_equals_reference(
    counts: list[int], starts: list[int], window: int | None, kind: str, consecutive: bool
) -> None:
    q, k, v, batch = make_case(
        counts, starts, tree=kind == "tree", bidirectional=kind == "bidirectional",
        consecutive=consecutive,
    )  # fmt: skip
    got = paged_attention(q, k, v, batch, scale=0.25, window=window)
    want = paged_attention_reference(q, k, v, batch, scale=0.25, window=window)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_direction_can_differ_by_layer_in_one_batch() -> None:
    q, k, v, batch = make_case([6, 6], [20, 21])
    for both in (False, True, None):
        got = paged_attention(q, k, v, batch, scale=0.25, bidirectional=both)
        want = paged_attention_reference(q, k, v, batch, scale=0.25, bidirectional=both)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_bf16_pages_are_read_in_fp32() -> None:
    q, k, v, batch = make_case([3, 5], [9, 40], dtype=torch.bfloat16)
    got = paged_attention(q, k, v, batch, scale=0.25)
    want = paged_attention_reference(q, k, v, batch, scale=0.25)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_write_touches_only_the_rows_own_slots() -> None:
    counts, starts, pages = [3, 2], [7, 0], [[4, 1], [2]]
    batch = RowBatch.build(counts, starts, pages)
    k_pages, v_pages = torch.zeros(6, PAGE, KV, DIM), torch.zeros(6, PAGE, KV, DIM)
    k, v = torch.randn(5, KV, DIM), torch.randn(5, KV, DIM)
    write_kv(k_pages, v_pages, k, v, batch)
    where = [(4, 7), (1, 0), (1, 1), (2, 0), (2, 1)]
    for row, (page, offset) in enumerate(where):
        assert torch.equal(k_pages[page, offset], k[row])
        assert torch.equal(v_pages[page, offset], v[row])
        k_pages[page, offset] = 0
    assert not k_pages.any()


def test_rows_unseen_by_a_tree_node_do_not_reach_it() -> None:
    q, k, v, batch = make_case([12], [10], tree=True)
    before = paged_attention(q, k, v, batch, scale=0.25)
    assert batch.ancestors is not None
    hidden = 10 + 11  # the last node is nobody's ancestor but its own
    slot = batch.pages[0][hidden // PAGE], hidden % PAGE
    k[slot], v[slot] = 100.0, 100.0
    after = paged_attention(q, k, v, batch, scale=0.25)
    assert torch.equal(before[:11], after[:11])
    assert not torch.equal(before[11], after[11])


def test_a_chain_never_builds_a_mask_from_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError("mask code ran")

    monkeypatch.setattr(attention, "mask_from_ancestors", fail)
    q, k, v, batch = make_case([8, 8, 1], [30, 12, 5])
    paged_attention(q, k, v, batch, scale=0.25)


def test_runs_are_identical() -> None:
    q, k, v, batch = make_case([16] * 4, [90, 80, 70, 95], tree=True)
    first = paged_attention(q, k, v, batch, scale=0.25)
    batch.cache.clear()
    assert torch.equal(first, paged_attention(q, k, v, batch, scale=0.25))


def test_bits_survive_packing() -> None:
    rng = random.Random(1)
    bits = [rng.getrandbits(200) for _ in range(200)]
    words = pack_bits(bits, 200)
    assert words.shape == (200, 4)
    mask = unpack_bits(words, 200)
    assert mask.tolist() == [[bool(b >> j & 1) for j in range(200)] for b in bits]


def test_unknown_backend_is_refused() -> None:
    q, k, v, batch = make_case([1], [3])
    with pytest.raises(ConfigError, match="'cudnn'"):
        paged_attention(q, k, v, batch, scale=1.0, backend="cudnn")
