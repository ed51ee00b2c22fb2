"""Tensors of a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CHUNK = 1 << 22


class TensorSource(Protocol):
    """Where a model's tensors come from; `folder` is named in errors."""

    @property
    def folder(self) -> Path: ...
    @property
    def names(self) -> frozenset[str]: ...

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A tensor on the device, in `dtype`. Raises ConfigError when there is none."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        ...

    def fingerprint(self, name: str) -> str:
        """Hex digits that two processes agree on exactly when their tensors are the same."""
        ...


Opener = Callable[[Path], TensorSource]
"""From a model's folder to its tensors. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder; tensors are read when asked for.

    Attributes:
        folder: where it lies.
        files: of each tensor's stored name, its file.
    """

    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises ConfigError when there is no readable safetensors file, or a shard is missing."""
        if (folder / SINGLE).exists():
            path = folder / SINGLE
            return cls(folder, dict.fromkeys(_names(path), path))
        if not (folder / INDEX).exists():
            raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}")
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise ConfigError(f"{folder / INDEX} has no weight_map")
        files = {name: folder / file for name, file in index.items()}
        for path in sorted(set(files.values())):
            stored = set(_names(path))
            missing = [n for n, p in files.items() if p == path and n not in stored]
            if missing:
                raise ConfigError(f"{path} lacks {missing[0]!r}, which {INDEX} places there")
        return cls(folder, files)

    @property
    def names(self) -> frozenset[str]:
        """Stored names of all tensors."""
        return frozenset(self.files)

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The tensor, in the stored type without `dtype`, read straight to the device.

        Raises ConfigError naming it when it is not there.
        """
        with safe_open(self._file(name), "pt", device=str(device)) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor if dtype is None else tensor.to(dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        with safe_open(self._file(name), "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def fingerprint(self, name: str) -> str:
        """SHA-256, in hex, of the tensor's stored bytes."""
        path = self._file(name)
        with path.open("rb") as file:
            header, data = _header(path)
            begin, end = header[name]["data_offsets"]
            file.seek(data + begin)
            digest = hashlib.sha256()
            for chunk in _chunks(end - begin):
                digest.update(file.read(chunk))
        return digest.hexdigest()

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise ConfigError(f"{self.folder}: tensor {name!r} is missing")
        return self.files[name]


class Weights:
    """Takes tensors out of a source, checks their shapes, and remembers what was taken."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases` maps the names asked for to stored ones that differ."""
        self._source, self._dtype, self._device = source, dtype, device
        self._aliases = aliases or {}
        self._taken: set[str] = set()

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Tensor `name` in the wanted type, on the device. Raises ConfigError on another shape."""
        stored = self._aliases.get(name, name)
        found = self._source.shape(stored)
        if found != shape:
            raise ConfigError(
                f"{self._source.folder}: tensor {stored!r} has shape {list(found)},"
                f" the config asks for {list(shape)}"
            )
        self._taken.add(stored)
        return self._source.tensor(stored, self._dtype, self._device)

    def skip(self, *names: str) -> None:
        """Counts tensors that another part reads as taken. Raises ConfigError if one is missing."""
        for name in names:
            stored = self._aliases.get(name, name)
            self._source.shape(stored)
            self._taken.add(stored)

    def check_all_taken(self, ignore: Sequence[str] = ()) -> None:
        """Raises ConfigError naming a tensor that nobody asked for: it would change the model."""
        left = sorted(n for n in self._source.names - self._taken if not n.endswith(tuple(ignore)))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(f"{self._source.folder}: unknown tensor {left[0]!r}{more}")


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The file's table of tensors, and where their data begins (safetensors format, version 1)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def _chunks(size: int) -> Iterator[int]:
    for begin in range(0, size, _CHUNK):
        yield min(_CHUNK, size - begin)
