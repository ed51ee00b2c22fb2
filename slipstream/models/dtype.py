"""Element types by name, and what `auto` means."""

from __future__ import annotations

import torch

from slipstream.errors import ConfigError
from slipstream.hardware import has_bf16

_NAMES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def default_dtype(device: torch.device | str) -> torch.dtype:
    """bf16 on a GPU, and on a CPU that computes in it (AVX-512 BF16 or AMX); else fp32.

    Elsewhere a CPU emulates bf16, several times slower than fp32.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if has_bf16() else torch.float32


def parse_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """`auto`, `bfloat16` or `float32`. Raises ConfigError on another name."""
    if name == "auto":
        return default_dtype(device)
    if name not in _NAMES:
        raise ConfigError(f"unknown dtype {name!r}; known: auto, {', '.join(_NAMES)}")
    return _NAMES[name]
