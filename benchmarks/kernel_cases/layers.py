"""Products of the layers, norms, embedding, activation and RoPE, at the shapes of Qwen3-8B."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases.bench import (
    BF16,
    FP32,
    PAGE,
    QWEN,
    Bench,
    Case,
    Errors,
    Probe,
    differences,
    ragged,
    relative_limit,
    worst,
)
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
)
from slipstream.layers.rope import Rope
from slipstream.layers.rope_config import RopeConfig

EPS = 1e-6
LIMIT = relative_limit(BF16)
ROWS = (16, 64, 512)
DRAFT_LAYERS = 5
TAPS = 5


def _matrix(bench: Bench, name: str, rows: int) -> Probe:
    m = bench.model(QWEN)
    mixed = m.heads * m.dim
    width, out_width = {
        "qkv": (m.hidden, mixed + 2 * m.kv * m.dim),
        "o": (mixed, m.hidden),
        "gate_up": (m.hidden, 2 * m.inner),
        "down": (m.inner, m.hidden),
        "head": (m.hidden, m.vocab),
    }[name]
    rows = bench.size(rows)
    kind = FP32 if name == "head" else BF16
    moved = 2 * out_width * width + 2 * rows * width + kind.itemsize * rows * out_width
    sets = bench.sets(moved)
    weights = [bench.randn(out_width, width, scale=width**-0.5) for _ in range(sets)]
    xs = [bench.randn(rows, width) for _ in range(sets)]
    outs = [bench.empty(rows, out_width, dtype=kind) for _ in range(sets)]

    def call(x: Tensor, weight: Tensor, out: Tensor) -> None:
        if name == "head":
            head(x, weight, out)
        else:
            torch.mm(x, weight.t(), out=out)

    calls = [partial(call, *given) for given in zip(xs, weights, outs, strict=True)]

    def check() -> Errors:
        calls[0]()
        return differences(outs[0], xs[0].float() @ weights[0].float().t())

    return Probe(calls, moved, check, flops=2 * rows * width * out_width, limit=LIMIT)


def _rms_norm(bench: Bench, rows: int) -> Probe:
    rows, hidden = bench.size(rows), bench.model(QWEN).hidden
    moved = 2 * (2 * rows * hidden + hidden)
    sets = bench.sets(moved)
    xs, outs = bench.randn(sets, rows, hidden), bench.empty(sets, rows, hidden)
    weight = bench.randn(hidden)
    calls = [partial(rms_norm, x, weight, EPS, out) for x, out in zip(xs, outs, strict=True)]

    def check() -> Errors:
        calls[0]()
        return differences(outs[0], rms_norm_reference(xs[0].float(), weight.float(), EPS))

    plain = [partial(rms_norm_reference, x, weight, EPS) for x in xs]
    return Probe(calls, moved, check, limit=LIMIT, torch=plain)


def _add_rms_norm(bench: Bench, rows: int) -> Probe:
    rows, hidden = bench.size(rows), bench.model(QWEN).hidden
    moved = 2 * (5 * rows * hidden + hidden)
    sets = bench.sets(moved)
    # The sum stays where it was: small steps keep it from growing over all replays.
    xs, residuals = bench.randn(sets, rows, hidden, scale=0.01), bench.randn(sets, rows, hidden)
    taps, outs = bench.empty(sets, rows, TAPS * hidden), bench.empty(sets, rows, hidden)
    weight = bench.randn(hidden)
    calls = [
        partial(add_rms_norm, xs[i], residuals[i], weight, EPS, outs[i], taps[i, :, :hidden])
        for i in range(sets)
    ]

    def check() -> Errors:
        total, want = add_rms_norm_reference(xs[0], residuals[0], weight, EPS)
        calls[0]()
        pairs = ((outs[0], want), (residuals[0], total), (taps[0, :, :hidden], total))
        return worst(*(differences(got, wanted) for got, wanted in pairs))

    plain = [partial(add_rms_norm_reference, xs[i], residuals[i], weight, EPS) for i in range(sets)]
    return Probe(calls, moved, check, limit=LIMIT, torch=plain)


def _embed(bench: Bench, rows: int) -> Probe:
    m, rows = bench.model(QWEN), bench.size(rows)
    moved = 4 * rows * m.hidden
    sets = bench.sets(moved)
    table, outs = bench.randn(m.vocab, m.hidden), bench.empty(sets, rows, m.hidden)
    ids = torch.randint(m.vocab, (sets, rows), device=bench.device).int()
    calls = [partial(embed, ids[i], table, outs[i]) for i in range(sets)]

    def check() -> Errors:
        calls[0]()
        return differences(outs[0], embed_reference(ids[0], table))

    plain = [partial(embed_reference, ids[i], table) for i in range(sets)]
    return Probe(calls, moved, check, limit=LIMIT, torch=plain)


def _silu_mul(bench: Bench, rows: int) -> Probe:
    rows, inner = bench.size(rows), bench.model(QWEN).inner
    moved = 6 * rows * inner
    sets = bench.sets(moved)
    xs, outs = bench.randn(sets, rows, 2 * inner), bench.empty(sets, rows, inner)
    calls = [partial(silu_mul, x, out) for x, out in zip(xs, outs, strict=True)]

    def check() -> Errors:
        calls[0]()
        gate, up = xs[0].float().chunk(2, -1)
        return differences(outs[0], F.silu(gate) * up)

    plain = [partial(silu_mul_reference, x) for x in xs]
    return Probe(calls, moved, check, limit=LIMIT, torch=plain)


def _cos_sin(bench: Bench, dim: int, positions: int) -> Tensor:
    return rope_table(Rope(RopeConfig("default", 1e6, dim, 40_960), bench.device), positions)


def _rope_write(bench: Bench, entries: int, count: int, tree: bool) -> Probe:
    m, context = bench.model(QWEN), bench.size(1024)
    rag = ragged(bench, bench.size(entries), bench.size(count), context, m.vocab, tree=tree)
    rows, total = rag.rows, rag.rows.capacity
    width = (m.heads + 2 * m.kv) * m.dim
    moved = 4 * total * width
    sets = bench.sets(moved)
    qkv, q = bench.randn(sets, total, width), bench.empty(sets, total, m.heads, m.dim)
    pages = bench.empty(2, sets, rag.pages, PAGE, m.kv, m.dim)
    keys, values = pages.unbind()
    q_norm, k_norm = bench.randn(m.dim), bench.randn(m.dim)
    table = _cos_sin(bench, m.dim, context + total + 1)
    placed = PlacedRows.allocate(total, table).find(rows, table, PAGE)
    calls = [
        partial(rope_write, qkv[i], placed, q_norm, k_norm, EPS, q[i], keys[i], values[i])
        for i in range(sets)
    ]

    def plain(i: int) -> tuple[Tensor, Tensor, Tensor]:
        parts = qkv[i].view(total, -1, m.dim).tensor_split((m.heads, m.heads + m.kv), 1)
        turned = [
            rope_reference(x, norm, EPS, table, rows.positions)
            for x, norm in zip(parts[:2], (q_norm, k_norm), strict=True)
        ]
        return turned[0], turned[1], parts[2]

    def check() -> Errors:
        calls[0]()
        k, v = (x[0].flatten(0, 1)[rag.places] for x in (keys, values))
        return worst(*(differences(a, b) for a, b in zip((q[0], k, v), plain(0), strict=True)))

    return Probe(calls, moved, check, limit=LIMIT, torch=[partial(plain, i) for i in range(sets)])


def _rope_context(bench: Bench, rows: int) -> Probe:
    m, context = bench.model(QWEN), bench.size(1024)
    rag = ragged(bench, 1, bench.size(rows), context, m.vocab, tree=False)
    total, layers = rag.rows.capacity, DRAFT_LAYERS
    width = layers * 2 * m.kv * m.dim
    moved = 4 * total * width
    sets = bench.sets(moved)
    both = bench.randn(sets, total, width)
    cache = bench.empty(2, layers, rag.pages, PAGE, m.kv, m.dim)
    keys, values = cache.unbind()
    norm, table = bench.randn(layers * m.kv, m.dim), _cos_sin(bench, m.dim, context + total + 1)
    calls = [partial(rope_context, b, norm, EPS, table, rag.rows, keys, values) for b in both]

    def plain(i: int) -> tuple[Tensor, Tensor]:
        k, v = both[i].view(total, layers, 2, m.kv, m.dim).unbind(2)
        turned = rope_reference(k.flatten(1, 2), norm, EPS, table, rag.rows.positions)
        return turned.view(k.shape), v

    def check() -> Errors:
        calls[0]()
        k, v = (x.flatten(1, 2)[:, rag.places].transpose(0, 1) for x in cache)
        return worst(*(differences(a, b) for a, b in zip((k, v), plain(0), strict=True)))

    return Probe(calls, moved, check, limit=LIMIT, torch=[partial(plain, i) for i in range(sets)])


CASES = [
    *(
        Case("gemm", name, f"{rows}", partial(_matrix, name=name, rows=rows))
        for name in ("qkv", "o", "gate_up", "down", "head")
        for rows in (1, 16, 64, 512)
    ),
    *(
        Case(name, "", f"{rows}", partial(make, rows=rows))
        for name, make in (
            ("rms_norm", _rms_norm),
            ("add_rms_norm", _add_rms_norm),
            ("embed", _embed),
            ("silu_mul", _silu_mul),
            ("rope_context", _rope_context),
        )
        for rows in ROWS
    ),
    Case("rope_write", "", "16", partial(_rope_write, entries=1, count=16, tree=False)),
    Case("rope_write", "", "tree 64", partial(_rope_write, entries=1, count=64, tree=True)),
    Case("rope_write", "", "32x16", partial(_rope_write, entries=32, count=16, tree=False)),
]
