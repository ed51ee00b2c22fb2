"""Rotary position embedding (half-rotated layout) of every type that transformers knows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.layers.rope_config import RopeConfig


class Rotation(NamedTuple):
    """Cosines and sines of T rows, each (T, 1, dim) fp32; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor


class Rope:
    """Rotations for absolute positions.

    `dynamic` and `longrope` depend on the length that is served: they are set once, for `max_len`
    positions (default: the config's maximum), so that a token's key never depends on how long its
    request became later.
    """

    def __init__(
        self, config: RopeConfig, device: torch.device | str = "cpu", max_len: int | None = None
    ) -> None:
        self.dim = config.dim
        frequencies, self.factor = _frequencies(config, max_len or config.max_position)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> Rotation:
        """positions (T,) -> the rows' rotation."""
        angles = positions[:, None].float() * self.frequencies  # (T, dim / 2)
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return Rotation(torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None])

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x (T, heads, head_dim) -> the same shape, rotated, in fp32."""
        cos, sin = rotation
        x = x.float()
        if self.dim == x.shape[-1]:
            return torch.addcmul(x * cos, x.roll(self.dim // 2, -1), sin)
        part, rest = x[..., : self.dim], x[..., self.dim :]
        return torch.cat([torch.addcmul(part * cos, part.roll(self.dim // 2, -1), sin), rest], -1)


def _frequencies(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies (dim / 2,) fp32 and the factor on cosines and sines."""
    if config.type == "default":
        exponents = torch.arange(0, config.dim, 2, dtype=torch.float) / config.dim
        return 1.0 / (config.theta**exponents), 1.0
    # transformers takes a second to import, and only scaled types need it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        shim = LlamaConfig(
            hidden_size=config.dim,
            num_attention_heads=1,
            head_dim=config.dim,
            max_position_embeddings=config.max_position,
            rope_parameters={
                **config.parameters,
                "rope_type": config.type,
                "rope_theta": config.theta,
            },
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.type](shim, "cpu", seq_len=max_len)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"RoPE of type {config.type!r} with {dict(config.parameters)}: {error!r}"
        ) from error
    if frequencies.shape != (config.dim // 2,):
        raise ConfigError(
            f"RoPE of type {config.type!r} gives {len(frequencies)} frequencies,"
            f" {config.dim // 2} are needed"
        )
    return frequencies.float(), float(factor)
