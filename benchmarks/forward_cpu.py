"""How long does one forward pass of the embedded target take on this CPU, by number of rows?

    python benchmarks/forward_cpu.py [--dtype auto] [--context 300] [--threads 2] [--repeat 20]

Prints, for one entry of 1 .. 64 rows (a chain) and for 8 entries, the fastest pass in ms: whole,
attention alone, and LM head alone.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.memory import keep_heap
from slipstream.layers.rows import RowBatch
from slipstream.models import CausalLM, parse_dtype, resolve_model

SHAPES = ([1], [4], [8], [16], [32], [64], [1] * 8, [16] * 8)
PAGE = 16


def measure(model: CausalLM, counts: list[int], context: int, repeat: int) -> list[float]:
    """Fastest pass, and its shares in attention and head, in ms."""
    config = model.config
    pages = -(-(context + max(counts)) // PAGE)
    tables = [list(range(e * pages, (e + 1) * pages)) for e in range(len(counts))]
    shape = (config.num_layers, len(counts) * pages, PAGE, config.num_kv_heads, config.head_dim)
    k_pages = torch.zeros(shape, dtype=model.vocabulary.embedding.dtype)
    v_pages = torch.zeros_like(k_pages)
    ids = torch.arange(sum(counts))
    best = [float("inf")] * 3
    for _ in range(repeat):
        spent = 0.0
        batch = RowBatch.build(counts, [context] * len(counts), tables)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, batch: RowBatch = batch) -> Tensor:
            nonlocal spent
            begin = time.perf_counter()
            write_kv(k_pages[layer], v_pages[layer], k, v, batch)
            out = paged_attention(q, k_pages[layer], v_pages[layer], batch, scale=config.scale)
            spent += time.perf_counter() - begin
            return out

        begin = time.perf_counter()
        hidden = model.forward(ids, batch.positions, attend).hidden
        middle = time.perf_counter()
        model.logits(hidden)
        end = time.perf_counter()
        best = min(best, [1e3 * t for t in (end - begin, spent, end - middle)])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    keep_heap()
    torch.set_num_threads(options.threads)
    dtype = parse_dtype(options.dtype, "cpu")
    model = CausalLM.load(resolve_model("smollm2-135m-instruct"), dtype)
    print(
        f"{dtype}, {options.threads} threads, context {options.context}: whole / attention / head"
    )
    for counts in SHAPES:
        whole, attention, head = measure(model, counts, options.context, options.repeat)
        print(
            f"{len(counts)} x {counts[0]:3d} rows {whole:8.2f} {attention:8.2f} {head:8.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
