"""Random weights for a config.json alone: shapes without a download, for benchmarks and tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.layers.rope import Rope
from slipstream.models.checkpoint import SINGLE
from slipstream.models.config import load_config
from slipstream.models.decoder import DecoderLayer, Shape
from slipstream.models.draft_config import FC, HIDDEN_NORM, load_draft_config


class _Maker:
    """Stands in for a checkpoint: makes each tensor it is asked for, and keeps it."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.made: dict[str, Tensor] = {}
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = torch.randn(shape, generator=self._random) * shape[-1] ** -0.5
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        self.made[name] = tensor.to(self._dtype)
        return self.made[name]


def write_random_model(
    config: Path, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """Writes `folder`: a copy of `config` (a target's or draft's config.json) and weights for it.

    Raises ConfigError when the config is not usable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if config.resolve() != (folder / "config.json").resolve():
        shutil.copyfile(config, folder / "config.json")
    make = _Maker(dtype, seed)
    text = (folder / "config.json").read_text()
    if '"dflash_config"' in text or '"jetspec_config"' in text:
        _draft(folder, make)
    else:
        _target(folder, make)
    save_file(make.made, folder / SINGLE, {"format": "pt"})
    return folder


def _target(folder: Path, make: _Maker) -> None:
    config = load_config(folder)
    _layers(config, config.num_layers, "model.layers.", make, Rope(config.rope))
    make("model.norm.weight", config.hidden_size)
    make("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        make("lm_head.weight", config.vocab_size, config.hidden_size)


def _draft(folder: Path, make: _Maker) -> None:
    config = load_draft_config(folder)
    _layers(config, config.num_layers, "layers.", make, Rope(config.rope))
    make(FC, config.hidden_size, len(config.target_layer_ids) * config.target_hidden_size)
    make(HIDDEN_NORM, config.hidden_size)
    make("norm.weight", config.hidden_size)


def _layers(shape: Shape, count: int, prefix: str, make: _Maker, rope: Rope) -> None:
    """A layer asks for exactly the tensors that its checkpoint must hold."""
    for index in range(count):
        DecoderLayer(index, shape, make, f"{prefix}{index}.", rope)
