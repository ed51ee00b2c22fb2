"""Random weights for a config.json alone: shapes without a download, for benchmarks and tests."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.layers.rope import Rope
from slipstream.models.checkpoint import SINGLE
from slipstream.models.config import load_config, read_json
from slipstream.models.decoder import DecoderLayer, Shape, Take
from slipstream.models.draft_config import FC, HIDDEN_NORM, load_draft_config


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """A `TensorSource` that makes every tensor when it is asked for, where it is wanted.

    Matrices are normal with deviation (row length)^-1/2, norms are ones. A tensor depends on its
    name, shape and the seed, and on type and kind of device: two processes that load the same
    config on the same kind of device hold the same weights.

    Attributes:
        folder: holds config.json; anything else there is not looked at.
        shapes: of each tensor that the config asks for.
    """

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    seed: int = 0

    @classmethod
    def open(cls, folder: Path) -> RandomTensors:
        """Of a target's or a draft's folder. Raises ConfigError when the config is not usable."""
        return cls(folder, tensor_shapes(folder))

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.shapes)

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The tensor, made anew; `dtype` None is bf16. Raises ConfigError for an unknown name."""
        shape = self.shape(name)
        values = torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
        if name.endswith("norm.weight"):
            return values.fill_(1.0)
        generator = torch.Generator(device).manual_seed(int(self.fingerprint(name)[:15], 16))
        return values.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError for an unknown name."""
        if name not in self.shapes:
            raise ConfigError(f"{self.folder}: the config asks for no tensor {name!r}")
        return self.shapes[name]

    def fingerprint(self, name: str) -> str:
        """64 hex digits that stand for the tensor's bytes: of its name, its shape and the seed."""
        text = f"random weights {self.seed} {name} {self.shape(name)}"
        return hashlib.sha256(text.encode()).hexdigest()


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `folder`/config.json, a target's or a draft's, needs.

    Raises ConfigError when it is not usable.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def take(name: str, *shape: int) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    sections = {"dflash_config", "jetspec_config"} & set(read_json(folder / "config.json"))
    if sections:
        draft = load_draft_config(folder)
        _layers(draft, draft.num_layers, "layers.", take, Rope(draft.rope))
        take(FC, draft.hidden_size, len(draft.target_layer_ids) * draft.target_hidden_size)
        take(HIDDEN_NORM, draft.hidden_size)
        take("norm.weight", draft.hidden_size)
        return shapes
    config = load_config(folder)
    _layers(config, config.num_layers, "model.layers.", take, Rope(config.rope))
    take("model.norm.weight", config.hidden_size)
    take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        take("lm_head.weight", config.vocab_size, config.hidden_size)
    return shapes


def write_random_model(
    config: Path, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """Writes `folder`: a copy of `config` (a target's or draft's config.json) and weights for it.

    Raises ConfigError when the config is not usable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if config.resolve() != (folder / "config.json").resolve():
        shutil.copyfile(config, folder / "config.json")
    source = RandomTensors(folder, tensor_shapes(folder), seed)
    tensors = {name: source.tensor(name, dtype) for name in source.shapes}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


def _layers(shape: Shape, count: int, prefix: str, take: Take, rope: Rope) -> None:
    """A layer asks for exactly the tensors that its checkpoint must hold."""
    for index in range(count):
        DecoderLayer(index, shape, take, f"{prefix}{index}.", rope)
