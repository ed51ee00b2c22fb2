"""From the settings to a warm runner."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.target.kv_cache import KVCache
from services.target.model_runner import ModelRunner
from services.target.runner import TargetSpec
from services.target.settings import TargetSettings
from services.target.warmup import measure
from slipstream.errors import ConfigError
from slipstream.hardware import cores, memory
from slipstream.layers.memory import keep_heap
from slipstream.models import (
    CausalLM,
    ContextProjector,
    ModelConfig,
    check_pair,
    fingerprints,
    load_config,
    load_draft_config,
    parse_dtype,
    resolve_draft,
    resolve_model,
)
from slipstream.wire import MAX_NODES

log = logging.getLogger(__name__)

MEMORY_SHARE = 4
"""Without --pages the cache takes at most one part in so many of its memory."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The target's part of a draft head; nothing of it without a draft."""

    projector: ContextProjector | None = None
    taps: tuple[int, ...] = ()
    width: int = 0
    fingerprints: dict[str, str] | None = None

    @classmethod
    def load(cls, draft: str, folder: Path, config: ModelConfig, dtype: torch.dtype) -> _Head:
        """Raises ConfigError, PairError when it does not fit the target in `folder`."""
        if draft == "none":
            return cls()
        head = resolve_draft(draft)
        draft_config = load_draft_config(head)
        check_pair(config, draft_config)
        return cls(
            ContextProjector.load(head, dtype, "cpu"),
            tuple(draft_config.target_layer_ids),
            draft_config.hidden_size,
            fingerprints(folder, head),
        )


def load_runner(settings: TargetSettings) -> ModelRunner:
    """Loads model and head, takes all memory, runs every shape once. On the engine's thread.

    Raises ConfigError naming the flag, the file or the pair that is not usable.
    """
    keep_heap()
    torch.set_num_threads(settings.threads or cores())
    folder = resolve_model(settings.model)
    config = load_config(folder)
    max_len = _max_model_len(settings, config)
    dtype = parse_dtype(settings.dtype, "cpu")
    name = str(dtype).removeprefix("torch.")
    head = _Head.load(settings.draft, folder, config, dtype)
    model = CausalLM.load(folder, dtype, "cpu", max_len=max_len)
    pages = settings.pages or _pages(settings, config, dtype, head.width, max_len)
    spec = TargetSpec(
        model=settings.served_name or _served_name(settings.model),
        vocab_size=config.vocab_size,
        max_model_len=max_len,
        slots=settings.slots,
        pages=pages,
        page_size=settings.page_size,
        max_nodes=MAX_NODES,
        max_prefill_rows=settings.max_prefill_rows,
        feature_width=head.width,
        feature_dtype=name,
        fingerprints=head.fingerprints or {},
        eos_ids=config.eos_ids,
        dtype=name,
    )
    cache = KVCache(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        pages=pages,
        page_size=settings.page_size,
        dtype=dtype,
        feature_width=head.width,
        feature_dtype=dtype,
    )
    runner = ModelRunner(model, head.projector, head.taps, spec, cache)
    if settings.warmup:
        runner.spec = replace(spec, decode_costs=measure(runner))
    gc.collect()
    gc.freeze()  # what lives now lives on: no collection looks at it again
    log.info(
        "%s in %s on %d threads: %d pages of %d positions, %d slots",
        spec.model, name, torch.get_num_threads(), pages, spec.page_size, spec.slots,
    )  # fmt: skip
    return runner


def _served_name(model: str) -> str:
    """A folder's own name, otherwise the model as it was named."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def _max_model_len(settings: TargetSettings, config: ModelConfig) -> int:
    window = config.max_position_embeddings
    wanted = settings.max_model_len or window
    if wanted > window:
        raise ConfigError(f"--max-model-len: {wanted} is more than the model's window, {window}")
    return wanted


def _pages(
    settings: TargetSettings, config: ModelConfig, dtype: torch.dtype, width: int, max_len: int
) -> int:
    """Pages for every slot at its longest, within a share of its memory."""
    full = settings.slots * -(-(max_len + MAX_NODES) // settings.page_size)
    size = KVCache.page_bytes(
        config.num_layers, config.num_kv_heads, config.head_dim, settings.page_size, dtype,
        width, dtype,
    )  # fmt: skip
    return max(1, min(full, memory() // MEMORY_SHARE // size))
