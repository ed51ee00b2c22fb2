"""The slow, obviously right attention that every fast path is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.layers.rows import RowBatch


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: RowBatch,
    *,
    scale: float,
    window: int | None = None,
    bidirectional: bool | None = None,
) -> Tensor:
    """`slipstream.layers.attention.paged_attention`, row by row in fp64; returns (T, heads, hd)."""
    both = batch.bidirectional if bidirectional is None else bidirectional
    size, kv = k_pages.shape[1:3]
    groups = q.shape[1] // kv
    out = torch.empty(q.shape, dtype=torch.float64)
    for entry in range(len(batch)):
        start, count = batch.start_list[entry], batch.count(entry)
        slots = [batch.pages[entry][s // size] * size + s % size for s in range(start + count)]
        keys = k_pages.flatten(0, 1)[slots].double().repeat_interleave(groups, 1)
        values = v_pages.flatten(0, 1)[slots].double().repeat_interleave(groups, 1)
        own = batch.positions[batch.offsets[entry] : batch.offsets[entry + 1]].tolist()
        key_positions = [*range(start), *own]
        for i in range(count):
            row = batch.offsets[entry] + i
            seen = [
                s
                for s in range(start + count)
                if (s < start or _sees(batch, row, i, s - start, both))
                and (window is None or abs(own[i] - key_positions[s]) < window)
            ]
            scores = torch.einsum("hd,khd->hk", q[row].double(), keys[seen]) * scale
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
    return out


def _sees(batch: RowBatch, row: int, i: int, j: int, both: bool) -> bool:
    if both:
        return True
    if batch.ancestors is None:
        return j <= i
    return bool(int(batch.ancestors[row, j // 64]) >> (j % 64) & 1)
