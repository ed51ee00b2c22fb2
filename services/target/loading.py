"""From the settings to a warm runner."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.target.grammar import Vocabulary
from services.target.kv_cache import KVCache
from services.target.model_runner import ModelRunner
from services.target.runner import TargetRunner, TargetSpec
from services.target.settings import TargetSettings
from services.target.warmup import measure
from slipstream import accelerator
from slipstream.accelerator import Place
from slipstream.errors import ConfigError
from slipstream.hardware import cores, memory
from slipstream.layers.memory import keep_heap
from slipstream.models import (
    CausalLM,
    Checkpoint,
    ContextProjector,
    DraftConfig,
    ModelConfig,
    Opener,
    RandomTensors,
    check_pair,
    fingerprints,
    load_config,
    load_draft_config,
    resolve_draft,
    resolve_model,
)
from slipstream.models.budget import DECODE_ROWS, PREFILL_ROWS, gib, pages_within, target_reserve
from slipstream.progress import progress
from slipstream.wire import MAX_NODES

if TYPE_CHECKING:
    from services.target.device_runner import DeviceRunner
    from slipstream.handoff.cuda_ipc import Export

log = logging.getLogger(__name__)

MEMORY_SHARE = 4
"""On a CPU the cache takes at most one part in so many of its memory, without --pages."""

CPU_PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Head:
    """The target's part of a draft head; nothing of it without a draft."""

    config: DraftConfig | None = None
    projector: ContextProjector | None = None
    fingerprints: dict[str, str] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids if self.config else ()

    @property
    def width(self) -> int:
        return self.config.hidden_size if self.config else 0

    @classmethod
    def load(
        cls, draft: str, folder: Path, config: ModelConfig, place: Place, open_tensors: Opener
    ) -> _Head:
        """Raises ConfigError, PairError when it does not fit the target in `folder`."""
        if draft == "none":
            return cls()
        head = resolve_draft(draft)
        draft_config = load_draft_config(head)
        check_pair(config, draft_config)
        return cls(
            draft_config,
            ContextProjector.load(head, place.dtype, place.device, open_tensors=open_tensors),
            fingerprints(folder, head, open_tensors=open_tensors),
        )


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the settings leave open, decided for this machine.

    Attributes:
        decode, prefill: backends of attention.
        prefill_rows, decode_rows: most rows of a step; `decode_rows` only counts on a GPU.
    """

    place: Place
    decode: str
    prefill: str
    prefill_rows: int
    decode_rows: int

    @classmethod
    def make(cls, settings: TargetSettings, look: accelerator.Look = accelerator.look) -> _Choices:
        """Raises ConfigError naming the flag that this machine cannot do."""
        place = accelerator.find_place(
            settings.device,
            settings.dtype,
            settings.memory_share,
            flashinfer=settings.prefill_attention_backend == "flashinfer",
            look=look,
        )
        most = min(settings.slots * MAX_NODES, DECODE_ROWS)
        decode = accelerator.attention_backend(place, settings.attention_backend)
        return cls(
            place,
            decode,
            accelerator.prefill_backend(place, settings.prefill_attention_backend, decode),
            settings.max_prefill_rows or (PREFILL_ROWS if place.on_gpu else CPU_PREFILL_ROWS),
            settings.max_decode_rows or most,
        )


def load_runner(settings: TargetSettings) -> TargetRunner:
    """Loads model and head, takes all memory, runs every shape once. On the engine's thread.

    Raises ConfigError naming the flag, the file or the pair that is not usable.
    """
    keep_heap()
    torch.set_num_threads(settings.threads or cores())
    choices = _Choices.make(settings)
    place = choices.place
    if place.on_gpu:
        accelerator.prepare(place)
    with accelerator.memory_errors(place):
        runner = _load(settings, choices)
    gc.collect()
    gc.freeze()  # what lives now lives on: no collection looks at it again
    spec = runner.spec
    log.info(
        "%s in %s on %s: %d pages of %d positions, %d slots, attention %s, %s in prefill",
        spec.model, spec.dtype, accelerator.where(place), spec.pages, spec.page_size, spec.slots,
        choices.decode, choices.prefill,
    )  # fmt: skip
    return runner


def _load(settings: TargetSettings, choices: _Choices) -> ModelRunner | DeviceRunner:
    place = choices.place
    open_tensors: Opener = RandomTensors.open if settings.random_weights else Checkpoint.open
    folder = resolve_model(settings.model)
    config = load_config(folder)
    max_len = _max_model_len(settings, config)
    head = _Head.load(settings.draft, folder, config, place, open_tensors)
    model = CausalLM.load(
        folder, place.dtype, place.device, max_len=max_len, open_tensors=open_tensors
    )
    vocabulary = Vocabulary.load(folder, config.vocab_size, config.eos_ids)
    spec = _spec(settings, choices, config, head, max_len)
    spec = replace(spec, grammars=vocabulary is not None)
    runner = _runner(settings, choices, model, head, spec, vocabulary)
    if settings.warmup:
        runner.spec = replace(spec, decode_costs=measure(runner))
    return runner


def _spec(
    settings: TargetSettings, choices: _Choices, config: ModelConfig, head: _Head, max_len: int
) -> TargetSpec:
    name = str(choices.place.dtype).removeprefix("torch.")
    return TargetSpec(
        model=settings.served_name or _served_name(settings.model),
        vocab_size=config.vocab_size,
        max_model_len=max_len,
        slots=settings.slots,
        pages=_pages(settings, choices, config, head, max_len),
        page_size=settings.page_size,
        max_nodes=MAX_NODES,
        max_prefill_rows=choices.prefill_rows,
        feature_width=head.width,
        feature_dtype=name,
        fingerprints=head.fingerprints or {},
        eos_ids=config.eos_ids,
        dtype=name,
        most_commits=head.config.block_size if head.config else 1,
    )


def _runner(
    settings: TargetSettings,
    choices: _Choices,
    model: CausalLM,
    head: _Head,
    spec: TargetSpec,
    vocabulary: Vocabulary | None,
) -> ModelRunner | DeviceRunner:
    config, place = model.config, choices.place
    device = torch.device(place.device)
    shared = _shared(settings, spec, place) if place.on_gpu and head.width else None
    cache = KVCache(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        pages=spec.pages,
        page_size=spec.page_size,
        dtype=place.dtype,
        feature_width=head.width,
        feature_dtype=place.dtype,
        device=place.device,
        features=None if shared is None else shared.features,
    )
    if not place.on_gpu:
        return ModelRunner(model, head.projector, head.taps, spec, cache, vocabulary)
    from services.target.device_loading import device_runner  # triton is imported with it

    return device_runner(
        model,
        head.projector,
        spec,
        cache,
        device=device,
        decode_rows=choices.decode_rows,
        attention=choices.decode,
        prefill_attention=choices.prefill,
        graphs=settings.cuda_graphs,
        vocabulary=vocabulary,
        progress=progress("target steps"),
        shared=shared,
    )


def _shared(settings: TargetSettings, spec: TargetSpec, place: Place) -> Export | None:
    """What a draft may map. Raises ConfigError when that is asked for and cannot be."""
    if settings.handoff == "grpc":
        return None
    from services.target.device_loading import share

    try:
        shared = share(spec, torch.device(place.device))
        accelerator.prepare(place, shared.layout.bytes)
        return shared
    except ConfigError as error:
        if settings.handoff == "cuda_ipc":
            raise ConfigError(f"--handoff: cuda_ipc: {error}") from error
        log.warning("handoff through the host only: %s", error)
        return None


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
    settings: TargetSettings, choices: _Choices, config: ModelConfig, head: _Head, max_len: int
) -> int:
    """Pages for every slot at its longest, within what there is room for."""
    place = choices.place
    size = KVCache.page_bytes(
        config.num_layers, config.num_kv_heads, config.head_dim, settings.page_size, place.dtype,
        head.width, place.dtype,
    )  # fmt: skip
    full = settings.slots * -(-(max_len + MAX_NODES) // settings.page_size)
    if not place.on_gpu:
        return settings.pages or max(1, min(full, memory() // MEMORY_SHARE // size))
    rows = max(choices.prefill_rows, choices.decode_rows)
    item = place.dtype.itemsize
    reserve = target_reserve(config, head.config, item, settings.slots, rows)
    fit = pages_within(place.share, place.total, accelerator.used(place), size, reserve)
    if settings.pages is not None and settings.pages > fit:
        raise ConfigError(f"--pages: {settings.pages} are {gib(settings.pages * size)}, {fit} fit")
    return settings.pages or min(full, fit)
