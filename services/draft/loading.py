"""From the settings to a runner with its weights and its memory."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.draft.context_cache import ContextCache, page_dtype
from services.draft.model_runner import ModelRunner
from services.draft.runner import DraftRunner, DraftSpec
from services.draft.settings import DraftSettings
from slipstream import accelerator
from slipstream.accelerator import Place
from slipstream.errors import ConfigError
from slipstream.hardware import cores, memory
from slipstream.layers.graphs import Graphs
from slipstream.layers.memory import keep_heap
from slipstream.models import (
    Checkpoint,
    DraftConfig,
    DraftHead,
    ModelConfig,
    Opener,
    RandomTensors,
    fingerprints,
    load_config,
    read_acceptance,
    resolve_draft,
    resolve_model,
)
from slipstream.models.budget import draft_reserve, gib, pages_within
from slipstream.progress import progress

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc import Mapper

log = logging.getLogger(__name__)

MEMORY_SHARE = 8
"""On a CPU all sessions take at most one part in so many of its memory, without --pages."""


def load_runner(settings: DraftSettings) -> DraftRunner:
    """Loads the head, and embedding and LM head of its target, and takes all memory.

    Raises ConfigError naming the flag, the file or the pair that is not usable.
    """
    keep_heap()
    torch.set_num_threads(settings.threads or cores())
    place = accelerator.find_place(settings.device, settings.dtype, settings.memory_share)
    backend = accelerator.attention_backend(place, settings.attention_backend)
    if place.on_gpu:
        accelerator.prepare(place)
    with accelerator.memory_errors(place):
        runner = _load(settings, place, backend)
    gc.collect()
    gc.freeze()  # what lives now lives on: no collection looks at it again
    spec = runner.spec
    log.info(
        "%s in %s on %s: %d sessions of %d pages of %d positions, attention %s",
        spec.model, spec.feature_dtype, accelerator.where(place), settings.max_sessions, spec.pages,
        spec.page_size, backend,
    )  # fmt: skip
    return runner


def _load(settings: DraftSettings, place: Place, backend: str) -> DraftRunner:
    open_tensors: Opener = RandomTensors.open if settings.random_weights else Checkpoint.open
    target, folder = resolve_model(settings.model), resolve_draft(settings.draft)
    head = DraftHead.load(folder, target, place.dtype, place.device, open_tensors=open_tensors)
    config, served = head.config, load_config(target)
    spec = DraftSpec(
        model=_name(settings.draft),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        causal=config.all_causal,
        vocab_size=config.vocab_size,
        feature_width=config.hidden_size,
        feature_dtype=str(place.dtype).removeprefix("torch."),
        slots=settings.slots,
        pages=_pages(settings, place, served, config),
        page_size=settings.page_size,
        fingerprints=fingerprints(target, folder, open_tensors=open_tensors),
        acceptance=tuple(read_acceptance(folder) or ()),
    )
    if not place.on_gpu:
        return ModelRunner(head, spec, settings.max_sessions)
    from services.draft.device_runner import DeviceRunner  # triton is imported with it

    # The plain attention looks at what it computes, which cannot be recorded.
    recorded = settings.cuda_graphs and backend != "torch"
    return DeviceRunner(
        head,
        spec,
        max_len=served.max_position_embeddings,
        graphs=Graphs(torch.device(place.device), recorded),
        sessions=settings.max_sessions,
        attention=backend,
        mapper=_mapper(settings, torch.device(place.device)),
        progress=progress("draft steps"),
    )


def _mapper(settings: DraftSettings, device: torch.device) -> Mapper | None:
    """What maps the memory of targets on this node, if any may hand over through it."""
    if settings.handoff == "grpc":
        return None
    from slipstream.handoff.cuda_ipc import Mapper

    return Mapper(device)


def _name(draft: str) -> str:
    """What a head is called: a bundled name or hub id as given, a folder by its own name."""
    path = Path(draft)
    return path.resolve().name if path.is_dir() else draft


def _pages(settings: DraftSettings, place: Place, target: ModelConfig, config: DraftConfig) -> int:
    """Pages of a session: every slot at its longest, within what there is room for.

    On a CPU: a draft keeps fewer bytes per token than its target, so half of the target's own
    default share holds every token that the target can hold.
    """
    size = settings.page_size
    full = settings.slots * -(-(target.max_position_embeddings + config.block_size) // size)
    dtype = page_dtype(place.device, place.dtype)
    page = ContextCache.page_bytes(
        config.num_layers, size, config.num_kv_heads, config.head_dim, dtype
    )
    sessions = settings.max_sessions
    if not place.on_gpu:
        return settings.pages or max(1, min(full, memory() // MEMORY_SHARE // sessions // page))
    # Each session has buffers of its own.
    reserve = sessions * draft_reserve(target, config, place.dtype.itemsize, settings.slots)
    held = accelerator.used(place)
    fit = pages_within(place.share, place.total, held, page * sessions, reserve)
    if settings.pages is not None and settings.pages > fit:
        raise ConfigError(
            f"--pages: {settings.pages} for {sessions} sessions are "
            f"{gib(settings.pages * sessions * page)}, {fit} fit"
        )
    return settings.pages or min(full, fit)
