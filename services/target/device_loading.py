"""From a loaded model to a runner on its device, every piece of work recorded."""

from __future__ import annotations

import torch

from services.target.device_runner import DeviceRunner
from services.target.device_slots import DeviceSlots
from services.target.device_step import DeviceStep, Progress, Sizes
from services.target.grammar import Vocabulary
from services.target.kv_cache import KVCache
from services.target.prefill import FlashInferAttention, PlainAttention, PrefillAttention
from services.target.runner import TargetSpec
from services.target.slots import MAX_LOGPROBS
from slipstream.handoff.cuda_ipc import Export
from slipstream.handoff.layout import Layout
from slipstream.layers.graphs import Graphs
from slipstream.models import CausalLM, ContextProjector

RECORDED_PREFILL_ROWS = 256
"""With another backend for prefill, steps of up to so many rows still use the step's own kernels:
launched piece by piece they would take longer than they compute."""


def device_runner(
    model: CausalLM,
    projector: ContextProjector | None,
    spec: TargetSpec,
    cache: KVCache,
    *,
    device: torch.device,
    decode_rows: int,
    attention: str = "triton",
    prefill_attention: str = "triton",
    graphs: bool = True,
    vocabulary: Vocabulary | None = None,
    progress: Progress = lambda done, total: None,
    shared: Export | None = None,
) -> DeviceRunner:
    """Takes all memory, compiles and loads every kernel.

    Args:
        model, projector: on `device`.
        decode_rows: rows of one decode graph at most.
        attention: triton, or torch, which cannot be recorded.
        prefill_attention: triton, torch or flashinfer.
        vocabulary: what grammars are matched with; `spec` says whether there is one.
        shared: the memory that a draft may map, with the features of `cache`.

    Raises ConfigError when FlashInfer is wanted and missing, or has no kernel for the type.
    """
    slots = DeviceSlots(spec.slots, spec.vocab_size, MAX_LOGPROBS, device)
    own = prefill_attention == attention == "triton"
    step = DeviceStep(
        model,
        projector,
        projector.config.target_layer_ids if projector is not None else (),
        slots,
        cache,
        max_pages=table_pages(spec),
        sizes=Sizes(
            decode_rows,
            spec.max_prefill_rows,
            spec.max_prefill_rows if own else RECORDED_PREFILL_ROWS,
        ),
        attention=attention,
        graphs=Graphs(device, graphs and attention != "torch"),
        grammars=vocabulary is not None,
        most_commits=spec.most_commits,
        shared=shared,
    )
    step.record(progress)
    own_prefill = _prefill(prefill_attention, model, step, cache)
    runner = DeviceRunner(spec, step, slots, cache, own_prefill, vocabulary, shared)
    if device.type == "cuda":
        runner.warm_up()
    return runner


def table_pages(spec: TargetSpec) -> int:
    """Pages of one slot at most."""
    return -(-spec.max_positions // spec.page_size)


def share(spec: TargetSpec, device: torch.device) -> Export:
    """Memory for features, block tables and rings that a draft may map.

    Raises ConfigError with the reason when that cannot be done here.
    """
    layout = Layout(
        spec.slots, spec.pages, spec.page_size, table_pages(spec), spec.feature_width,
        spec.feature_dtype,
    )  # fmt: skip
    return Export.create(layout, device)


def _prefill(
    backend: str, model: CausalLM, step: DeviceStep, cache: KVCache
) -> PrefillAttention | None:
    if backend == "flashinfer":
        # Every page may be held by the entries of one step.
        pages = cache.features.shape[0] // cache.page_size
        return FlashInferAttention(model.config, step, cache, pages)
    if backend == "torch":
        return PlainAttention(model.config, step, cache)
    return None
