"""What config.json says of rotary embeddings. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
