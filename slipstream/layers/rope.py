"""Rotary position embedding (half-rotated layout) of every type that transformers knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ConfigError

TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_KEYS = {
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "rope_dim", "factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What config.json says of RoPE.

    Attributes:
        type: one of TYPES.
        theta: the base.
        dim: rotated width, the first `dim` of head_dim elements.
        max_position: the config's max_position_embeddings.
        parameters: the type's own keys, as `transformers` names them.
    """

    type: str
    theta: float
    dim: int
    max_position: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


def read_rope(config: Mapping[str, Any], head_dim: int, where: str) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, from a parsed config.json.

    Raises ConfigError, naming `where`, the key and the value: no theta anywhere (a default would be
    a guess that only costs quality), an unknown type or key, an impossible width.
    """
    merged: dict[str, Any] = {}
    for section in ("rope_scaling", "rope_parameters"):
        value = config.get(section)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {section} must be an object, got {value!r}")
        merged |= {k: v for k, v in (value or {}).items() if v is not None}
    unknown = sorted(set(merged) - _KEYS)
    if unknown:
        raise ConfigError(f"{where}: unknown RoPE key {unknown[0]!r} = {merged[unknown[0]]!r}")
    kind = merged.pop("rope_type", None) or merged.get("type") or "default"
    merged.pop("type", None)
    if kind not in TYPES:
        raise ConfigError(f"{where}: unknown rope_type {kind!r}; known: {', '.join(TYPES)}")
    theta = merged.pop("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or theta <= 0:
        raise ConfigError(
            f"{where}: rope_theta must be a positive number, at the top level or in"
            f" rope_parameters, got {theta!r}"
        )
    share = merged.pop("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    dim = merged.pop("rope_dim", None) or int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(f"{where}: RoPE width {dim} does not fit head_dim {head_dim}")
    original = config.get("original_max_position_embeddings")
    if original is not None and kind in ("llama3", "yarn", "longrope"):
        merged["original_max_position_embeddings"] = original
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{where}: max_position_embeddings must be positive, got {limit!r}")
    return RopeConfig(kind, float(theta), dim, limit, merged)


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
