"""The fused stack against the plain models, over the same cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import TritonAttention
from slipstream.kernels.norm import embed, head
from slipstream.kernels.rope_kv import rope_context, rope_table
from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.attention_device import DeviceAttention, TorchAttention
from slipstream.layers.device_rows import DeviceRows, Mask
from slipstream.layers.rows import RowBatch, pack_bits
from slipstream.models import fused as fused_module
from slipstream.models.causal_lm import CausalLM
from slipstream.models.decoder import Attend
from slipstream.models.draft_head import DraftHead
from slipstream.models.fused import FusedDecoder, FusedLinear, choose_parts
from tests.tiny import Kind, make_pair, make_target

PAGE = 4
PADDING = 3
SCALE = 16**-0.5
Make = Callable[..., DeviceAttention]


def device_rows(batch: RowBatch, device: torch.device) -> DeviceRows:
    """The same rows, with padding, on the device; slot e + 1 is entry e's."""
    number, total = len(batch), batch.offsets[-1]
    tables = torch.cat([torch.zeros_like(batch.block_table[:1]), batch.block_table]).to(device)
    rows = DeviceRows.allocate(total + PADDING, number + 1, tables, device, 1)
    rows.counts.copy_(torch.tensor([number, total]))
    rows.slots[:number] = torch.arange(1, number + 1, dtype=torch.int32, device=device)
    rows.offsets.fill_(total)
    rows.offsets[: number + 1] = batch.row_offsets.to(device)
    rows.starts[:number] = batch.starts.to(device)
    rows.entries.fill_(-1)
    for e in range(number):
        rows.entries[batch.offsets[e] : batch.offsets[e + 1]] = e
    rows.positions[:total] = batch.positions.int().to(device)
    if batch.ancestors is not None:
        rows.bits[:total] = batch.ancestors.to(device)
    return rows


def make_cache(layers: int, batch: RowBatch, device: torch.device, seed: int = 0) -> Tensor:
    """(2, layers, pages, PAGE, kv 2, hd 16): prefixes that both sides find there, else NaN."""
    pages = max(max(row) for row in batch.pages) + 1
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((2, layers, pages, PAGE, 2, 16), torch.nan)
    for e, start in enumerate(batch.start_list):
        for index in range(start):
            place = batch.pages[e][index // PAGE], index % PAGE
            cache[:, :, place[0], place[1]] = torch.randn(2, layers, 2, 16, generator=generator)
    return cache.to(device)


def plain(cache: Tensor, batch: RowBatch, windows: Sequence[int | None]) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = cache[0, layer], cache[1, layer]
        write_kv(*pages, k.contiguous(), v.contiguous(), batch)
        return paged_attention(q.contiguous(), *pages, batch, scale=SCALE, window=windows[layer])

    return attend


def run_fused(
    fused: FusedDecoder,
    make: Make,
    x: Tensor,
    rows: DeviceRows,
    cache: Tensor,
    windows: Sequence[int | None],
    masks: Sequence[Mask],
    taps: Sequence[int] = (),
    value_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Hidden rows and taps of one pass."""
    attention = make(rows, fused.heads, fused.kv_heads, fused.head_dim, PAGE, x.dtype)
    attention.plan(rows)
    mixed = torch.full((len(x), fused.heads * fused.head_dim), torch.nan, device=x.device)
    taps_out = torch.full((len(x), len(taps) * x.shape[1]), torch.nan, device=x.device)

    def pages(layer: int) -> tuple[Tensor, Tensor]:
        return cache[0, layer], cache[1, layer]

    def attend(layer: int, q: Tensor) -> Tensor:
        return attention(q, *pages(layer), rows, SCALE, windows[layer], masks[layer], mixed)

    out = torch.full_like(x, torch.nan)
    hidden = fused.forward(x, rows, attend, pages, taps, taps_out, value_scale, out)
    assert hidden is out
    return hidden, taps_out


def embedded(ids: Tensor, table: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """Rows past the ids hold an id that does not exist."""
    padded = torch.full((rows,), -7, dtype=torch.int32, device=table.device)
    padded[: len(ids)] = ids
    out = torch.full((rows, table.shape[1]), torch.nan, device=table.device)
    embed(padded, table, out, scale)
    return out


def equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-5, atol=1e-5)


def same_cache(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("make", [TritonAttention, TorchAttention])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_target(kind: Kind, make: Make, tmp_path: Path, device: torch.device) -> None:
    """A tree, a chain from nothing and one row, with a window in one layer; taps, also the last."""
    biased = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else None
    folder = make_target(tmp_path / "target", kind, config=biased)
    model = CausalLM.load(folder, torch.float32, device)
    c = model.config
    parents = [None, 0, 0, 1, 2, 2]
    bits: list[int] = []
    for i, parent in enumerate(parents):
        bits.append((0 if parent is None else bits[parent]) | 1 << i)
    chain = [(1 << i + 1) - 1 for i in range(5)]
    batch = RowBatch.build(
        [6, 5, 1], [17, 0, 30], [[5, 2, 9, 1, 7, 3], [0, 4], [8, 6, 10, 14, 12, 11, 13, 15]],
        positions=[17, 18, 18, 19, 19, 19, 0, 1, 2, 3, 4, 30],
        ancestors=pack_bits([*bits, *chain, 1], 64), device=device,
    )  # fmt: skip
    windows = [None, 9, None, None]
    ids = torch.arange(40, 52, device=device, dtype=torch.int32)
    taps = [3, 0, 2]
    cache = make_cache(c.num_layers, batch, device)
    want_cache = cache.clone()
    want = model.forward(ids, batch.positions, plain(want_cache, batch, windows), taps)

    rows = device_rows(batch, device)
    fused = FusedDecoder(model.layers, model.norm, model.rope, 64, rows.capacity + 2)
    x = embedded(ids, model.vocabulary.embedding, rows.capacity)
    hidden, taps_out = run_fused(fused, make, x, rows, cache, windows, [Mask.TREE] * 4, taps)
    assert want.taps is not None
    equal(hidden[:12], want.hidden)
    equal(taps_out[:12], want.taps)
    assert hidden.isfinite().all()  # padding included
    same_cache(cache, want_cache)
    logits = torch.full((rows.capacity, c.vocab_size), torch.nan, device=device)
    head(hidden, model.vocabulary.head.plain, logits)
    equal(logits[:12], model.logits(want.hidden))


@pytest.mark.parametrize("head_kind", ["dflash", "jetspec"])
def test_draft(head_kind: str, tmp_path: Path, device: torch.device) -> None:
    """Context of two requests, then a block for each, with scaled embeddings and values."""
    section = {
        "causal_head": head_kind == "jetspec",
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "attention_value_scale": 0.7,
        "input_embedding_scale": 1.5,
        "use_swa": True,
        "swa_window_size": 11,
    }
    pair = make_pair(
        tmp_path, "qwen3", "dflash" if head_kind == "dflash" else "jetspec",
        draft_config={"dflash_config": section, "attention_bias": True},
    )  # fmt: skip
    draft = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    c = draft.config
    pages = [[3, 1, 6, 0, 8, 9, 10], [2, 5, 4, 7]]
    context = RowBatch.build([19, 6], [0, 2], pages, device=device)
    features = torch.randn(25, c.hidden_size, generator=torch.Generator().manual_seed(3))
    features = features.to(device)
    rows = device_rows(context, device)
    cache = make_cache(c.num_layers, context, device, seed=5)
    want_cache = cache.clone()
    k, v = draft.context_kv(features, context.positions)
    for layer in range(c.num_layers):
        write_kv(
            want_cache[0, layer], want_cache[1, layer], k[layer].contiguous(),
            v[layer].contiguous(), context,
        )  # fmt: skip
    projected = FusedLinear(draft.context)
    both = torch.full((rows.capacity, projected.weight.shape[1]), torch.nan, device=device)
    projected(features, both[:25])
    table = rope_table(draft.rope, 64)
    norm = draft.context_norm
    rope_context(both, norm.weight, norm.eps, table, rows, cache[0], cache[1], c.value_scale)
    same_cache(cache, want_cache)

    block = RowBatch.build([8, 5], [19, 8], pages, bidirectional=not c.all_causal, device=device)
    ids = torch.tensor([60, *[3] * 7, 61, *[3] * 4], dtype=torch.int32, device=device)
    want = draft.block(ids, block.positions, plain(want_cache, block, c.windows))
    rows = device_rows(block, device)
    fused = FusedDecoder(draft.layers, draft.norm, draft.rope, 64, rows.capacity)
    x = embedded(ids, draft.vocabulary.embedding, rows.capacity, c.embedding_scale)
    masks = [Mask.CHAIN if causal else Mask.FULL for causal in c.causal]
    hidden, _ = run_fused(
        fused, TritonAttention, x, rows, cache, c.windows, masks, value_scale=c.value_scale
    )
    equal(hidden[:13], want)
    same_cache(cache, want_cache)


@pytest.mark.parametrize(
    ("inputs", "outputs", "parts"),
    [
        (4096, 4096, 4), (12288, 4096, 4), (6144, 2048, 4), (2048, 2048, 2), (28672, 8192, 2),
        (1536, 576, 1), (9 * 1024, 4096, 4), (3 * 1024, 1024, 2), (4096, 24576, 1),
    ],
)  # fmt: skip
def test_parts_fill_the_card(inputs: int, outputs: int, parts: int) -> None:
    assert choose_parts(inputs, outputs, 132) == parts
    assert choose_parts(inputs, outputs, 0) == 1


def test_products_in_parts(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They add up to the whole ones, as long as the rows are few; others are not cut."""
    monkeypatch.setattr(fused_module, "PART_INPUTS", 8)
    monkeypatch.setattr(fused_module, "PARTS_ROWS", 10)
    model = CausalLM.load(make_target(tmp_path / "target", "qwen3"), torch.float32, device)
    model.layers = model.layers[:1]
    whole, cut = (
        FusedDecoder(model.layers, model.norm, model.rope, 64, 32, multiprocessors)
        for multiprocessors in (0, 8)
    )
    assert {layer.down.parts for layer in whole._layers} == {1}
    assert all(layer.o.parts > 1 and layer.down.parts > 1 for layer in cut._layers)
    calls: list[int] = []
    in_parts = FusedLinear.in_parts

    def counted(linear: FusedLinear, x: Tensor, out: Tensor) -> Tensor:
        calls.append(len(x))
        return in_parts(linear, x, out)

    monkeypatch.setattr(FusedLinear, "in_parts", counted)
    for counts in ([4, 3], [6, 5]):
        batch = RowBatch.build(counts, [3, 2], [[1, 2, 3], [4, 5, 0]], device=device)
        rows = device_rows(batch, device)
        ids = torch.arange(7, 7 + sum(counts), device=device, dtype=torch.int32)
        found = []
        for fused in (whole, cut):
            cache = make_cache(model.config.num_layers, batch, device)
            x = embedded(ids, model.vocabulary.embedding, rows.capacity)
            windows, masks = [None], [Mask.CHAIN]
            hidden, taps = run_fused(
                fused, TritonAttention, x, rows, cache, windows, masks, taps=[0]
            )
            found.append((hidden[: sum(counts)].clone(), taps[: sum(counts)]))
        equal(found[1][0], found[0][0])
        equal(found[1][1], found[0][1])
    assert calls == [10] * 2  # of the first batch, padding included


def test_a_pass_leaves_nothing_for_the_next(tmp_path: Path, device: torch.device) -> None:
    """The buffers of a larger pass, full of NaN, do not show in a smaller one."""
    folder = make_target(tmp_path / "target", "qwen3")
    model = CausalLM.load(folder, torch.float32, device)
    model.layers = model.layers[:2]
    fused = FusedDecoder(model.layers, model.norm, model.rope, 64, 32)
    table = model.vocabulary.embedding
    results = []
    for counts in ([2], [5, 4], [2]):
        batch = RowBatch.build(
            counts, [3] * len(counts), [[1, 2, 3], [4, 5, 0]][: len(counts)], device=device
        )
        rows = device_rows(batch, device)
        cache = make_cache(model.config.num_layers, batch, device)
        x = embedded(torch.arange(sum(counts), device=device), table, rows.capacity)
        if len(counts) == 2:
            x.fill_(torch.nan)
        windows, masks = [None] * 2, [Mask.CHAIN] * 2
        hidden, _ = run_fused(fused, TritonAttention, x, rows, cache, windows, masks)
        results.append(hidden[:2].clone())
    assert results[1].isnan().all()
    assert torch.equal(results[0], results[2])
