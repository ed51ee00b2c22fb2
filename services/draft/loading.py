"""From the settings to a runner with its weights and its memory."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch

from services.draft.context_cache import ContextCache, page_dtype
from services.draft.model_runner import ModelRunner
from services.draft.runner import DraftSpec
from services.draft.settings import DraftSettings
from slipstream.hardware import cores, memory
from slipstream.layers.memory import keep_heap
from slipstream.models import (
    DraftConfig,
    DraftHead,
    fingerprints,
    load_config,
    load_draft_config,
    parse_dtype,
    read_acceptance,
    resolve_draft,
    resolve_model,
)

log = logging.getLogger(__name__)

MEMORY_SHARE = 8
"""Without --pages all sessions take at most one part in so many of its memory."""


def load_runner(settings: DraftSettings) -> ModelRunner:
    """Loads the head, and embedding and LM head of its target, and takes all memory.

    Raises ConfigError naming the flag, the file or the pair that is not usable.
    """
    keep_heap()
    torch.set_num_threads(settings.threads or cores())
    target, folder = resolve_model(settings.model), resolve_draft(settings.draft)
    device = "cpu"
    dtype = parse_dtype(settings.dtype, device)
    head = DraftHead.load(folder, target, dtype, device)
    config, window = load_draft_config(folder), load_config(target).max_position_embeddings
    pages = settings.pages or _pages(settings, config, window, page_dtype(device, dtype))
    spec = DraftSpec(
        model=_name(settings.draft),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        causal=config.all_causal,
        vocab_size=config.vocab_size,
        feature_width=config.hidden_size,
        feature_dtype=str(dtype).removeprefix("torch."),
        slots=settings.slots,
        pages=pages,
        page_size=settings.page_size,
        fingerprints=fingerprints(target, folder),
        acceptance=tuple(read_acceptance(folder) or ()),
    )
    runner = ModelRunner(head, spec, settings.max_sessions)
    gc.collect()
    gc.freeze()  # what lives now lives on: no collection looks at it again
    log.info(
        "%s in %s on %d threads: %d sessions of %d pages of %d positions",
        spec.model,
        spec.feature_dtype,
        torch.get_num_threads(),
        settings.max_sessions,
        pages,
        spec.page_size,
    )
    return runner


def _name(draft: str) -> str:
    """What a head is called: a bundled name or hub id as given, a folder by its own name."""
    path = Path(draft)
    return path.resolve().name if path.is_dir() else draft


def _pages(settings: DraftSettings, config: DraftConfig, window: int, dtype: torch.dtype) -> int:
    """Pages of a session: every slot at its longest, within a share of its memory.

    A draft keeps fewer bytes per token than its target, so half of the target's own default share
    holds every token that the target can hold.
    """
    size = settings.page_size
    full = settings.slots * -(-(window + config.block_size) // size)
    page = ContextCache.page_bytes(
        config.num_layers, size, config.num_kv_heads, config.head_dim, dtype
    )
    return max(1, min(full, memory() // MEMORY_SHARE // settings.max_sessions // page))
