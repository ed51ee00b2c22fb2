"""Attention over paged keys: verify by our kernel, prefill by ours and by FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from benchmarks.gpu_timing import Call, Clock
from benchmarks.kernel_cases.bench import (
    BF16,
    FP32,
    PAGE,
    QWEN,
    SMOL,
    Bench,
    Case,
    Errors,
    Model,
    Probe,
    Ragged,
    differences,
    ragged,
    relative_limit,
)
from slipstream.kernels import attention
from slipstream.kernels.attention import TritonAttention
from slipstream.layers.attention_device import TorchAttention
from slipstream.layers.device_rows import Mask
from slipstream.layers.flashinfer_prefill import FlashInferPrefill

PREFILL_ROWS = 2048


class _Inputs:
    """Rows and as many caches as outgrow the L2; a forward pass has one for each layer."""

    def __init__(
        self,
        bench: Bench,
        model: Model,
        dtype: torch.dtype,
        rag: Ragged,
        *,
        mask: Mask,
    ) -> None:
        if bench.device.type == "cpu":
            dtype = FP32  # the interpreter multiplies the bits of bf16
        self.model, self.dtype, self.rag, self.mask = model, dtype, rag, mask
        total, entries = rag.rows.capacity, rag.rows.most_entries
        self.shape = (model.heads, model.kv, model.dim, PAGE, dtype)
        self.scale = model.dim**-0.5
        keys = entries * rag.context + total
        mixed = total * model.heads * model.dim
        self.bytes = dtype.itemsize * (2 * keys * model.kv * model.dim + 2 * mixed)
        self.sets = bench.sets(self.bytes)
        self.pages = bench.randn(
            self.sets, 2, rag.pages, PAGE, model.kv, model.dim, dtype=dtype
        )  # fmt: skip
        self.q = bench.randn(self.sets, total, model.heads, model.dim, dtype=dtype)
        self.out = bench.empty(self.sets, total, model.heads * model.dim, dtype=dtype)
        self.k, self.v = self.pages.unbind(1)

    def flops(self, own: float) -> float:
        """Of scores and of mixed values, for rows that see `own` rows of their entry on average."""
        m, rows = self.model, self.rag.rows.capacity
        return 4 * m.heads * m.dim * rows * (self.rag.context + own)

    def calls(self, backend: TritonAttention | TorchAttention) -> list[Call]:
        backend.plan(self.rag.rows)
        rest = (self.rag.rows, self.scale, None, self.mask)
        sets = zip(self.q, self.k, self.v, self.out, strict=True)
        return [partial(backend, q, k, v, *rest, out) for q, k, v, out in sets]

    def check(self, call: Call) -> Errors:
        """The first set's output against plain attention in fp32."""
        call()
        plain = TorchAttention(self.rag.rows, *self.shape)
        plain.plan(self.rag.rows)
        want = torch.empty_like(self.out[0], dtype=FP32)
        q, k, v = (x[0].float() for x in (self.q, self.k, self.v))
        plain(q, k, v, self.rag.rows, self.scale, None, self.mask, want)
        return differences(self.out[0], want)


def _verify(
    bench: Bench,
    model: Model,
    dtype: torch.dtype,
    entries: int,
    count: int,
    context: int,
    tree: bool,
) -> Probe:
    model = bench.model(model)
    entries, count, context = map(bench.size, (entries, count, context))
    rag = ragged(bench, entries, count, context, model.vocab, tree=tree)
    mask = Mask.TREE if tree else Mask.CHAIN
    given = _Inputs(bench, model, dtype, rag, mask=mask)
    kernel = TritonAttention(rag.rows, *given.shape)
    calls = given.calls(kernel)

    def details(clock: Clock, seconds: float) -> dict[str, Any]:
        if kernel.splits == 1:
            return {"splits": 1}
        with patch.object(attention, "_merge", MagicMock()):
            attend = clock.seconds(calls)
        return {
            "splits": kernel.splits,
            "attend_us": 1e6 * attend,
            "merge_us": 1e6 * (seconds - attend),
        }

    return Probe(
        calls,
        given.bytes,
        lambda: given.check(calls[0]),
        flops=given.flops((count + 1) / 2),
        dtype=given.dtype,
        limit=relative_limit(given.dtype),
        torch=given.calls(TorchAttention(rag.rows, *given.shape)),
        details=details,
    )


def _plan(bench: Bench, entries: int, count: int) -> Probe:
    """The map from tiles to rows, made once for all layers."""
    model = bench.model(QWEN)
    entries, count = bench.size(entries), bench.size(count)
    rag = ragged(bench, entries, count, 1, model.vocab, tree=False)
    kernel = TritonAttention(rag.rows, model.heads, model.kv, model.dim, PAGE, BF16)

    def check() -> Errors:
        kernel.scratch.tiles.fill_(-7)
        kernel.plan(rag.rows)
        tiles = [
            (entry, first) for entry in range(entries) for first in range(0, count, kernel.tile)
        ]
        got = [(entry, first) for entry, first in kernel.scratch.tiles.tolist() if entry >= 0]
        return {"wrong": float(got != tiles)}

    moved = 4 * (entries + 1) + 8 * kernel.tiles
    return Probe([partial(kernel.plan, rag.rows)], moved, check)


def _prefill(bench: Bench, backend: str, prefix: int) -> Probe:
    model = bench.model(QWEN)
    rows, prefix = bench.size(PREFILL_ROWS), bench.size(prefix)
    rag = ragged(bench, 1, rows, prefix, model.vocab, tree=False)
    given = _Inputs(bench, model, BF16, rag, mask=Mask.CHAIN)
    calls: Sequence[Call]
    if backend == "triton":
        calls = given.calls(TritonAttention(rag.rows, *given.shape))
    else:
        calls = _flashinfer(bench, given)
    return Probe(
        calls,
        given.bytes,
        lambda: given.check(calls[0]),
        flops=given.flops((rows + 1) / 2),
        limit=relative_limit(BF16),
        torch=given.calls(TorchAttention(rag.rows, *given.shape)),
        graph=backend == "triton",
        torch_graph=False,
    )


def _flashinfer(bench: Bench, given: _Inputs) -> Sequence[Call]:
    rag = given.rag
    kernel = FlashInferPrefill(
        *given.shape, given.scale, [None], device=bench.device, most_entries=1, most_pages=rag.pages
    )
    kernel.plan([rag.rows.capacity], [rag.context], rag.rows.tables.tolist())

    def call(i: int) -> Tensor:
        return kernel(given.q[i], given.k[i], given.v[i], None, given.out[i])

    return [partial(call, i) for i in range(given.sets)]


SHAPES = {
    "1x16@1k": (1, 16, 1024, False),
    "1x64 tree@1k": (1, 64, 1024, True),
    "8x16@1k": (8, 16, 1024, False),
    "32x16@1k": (32, 16, 1024, False),
    "32x16@4k": (32, 16, 4096, False),
    "32x1@1k": (32, 1, 1024, False),
    "1x128 tree@8k": (1, 128, 8192, True),
}
SMOL_SHAPES = ("1x16@1k", "1x64 tree@1k", "32x16@1k")


def _verify_case(model: Model, dtype: torch.dtype, shape: str) -> Case:
    kind = f"{model.name} {'fp32' if dtype == FP32 else 'bf16'}"
    entries, count, context, tree = SHAPES[shape]
    make = partial(
        _verify, model=model, dtype=dtype, entries=entries, count=count, context=context, tree=tree
    )
    return Case("attention", kind, shape, make)


CASES = [
    *(_verify_case(QWEN, dtype, shape) for dtype in (BF16, FP32) for shape in SHAPES),
    *(_verify_case(SMOL, dtype, shape) for dtype in (BF16, FP32) for shape in SMOL_SHAPES),
    Case("plan", "", "1x16", partial(_plan, entries=1, count=16)),
    Case("plan", "", "32x16", partial(_plan, entries=32, count=16)),
    *(
        Case("prefill", backend, label, partial(_prefill, backend=backend, prefix=prefix))
        for backend in ("triton", "flashinfer")
        for label, prefix in (("2048 rows@0", 0), ("2048 rows@2k", 2048))
    ),
]
