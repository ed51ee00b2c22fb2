"""config.json of a target: the Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.layers.rope_config import RopeConfig, read_rope

log = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3")

# Keys that would change the arithmetic, each with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_act": ("silu",),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "no_rope_layers": (None, []),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a target.

    Attributes:
        windows: of each layer, the sliding window (a key is visible when q_pos - k_pos < window),
            or None; whoever owns the attention applies it.
        eos_ids: tokens that end an answer: generation_config.json's, else config.json's.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return float(self.head_dim**-0.5)


class Reader:
    """A parsed JSON object whose refusals name the file, the key and the value."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, key: str, want: str) -> ConfigError:
        """The error to raise when `key` is not `want`."""
        return ConfigError(f"{self.where}: {key} must be {want}, got {self.values.get(key)!r}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; a missing or null key is `default`."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fail(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the path."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not an object")
    return value


def load_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json and generation_config.json.

    Raises ConfigError naming file, key and value: another family, a missing or impossible number, a
    switch that this code does not implement.
    """
    raw = read_json(folder / "config.json")
    reader = Reader(raw, str(folder / "config.json"))
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{reader.where}: model_type {family!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    for key, allowed in _NEUTRAL.items():
        if key in raw and raw[key] not in allowed:
            raise reader.fail(key, " or ".join(map(repr, allowed)))
    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = reader.integer("head_dim", 128 if family == "qwen3" else hidden // heads)
    layers = reader.integer("num_hidden_layers")
    bias = family != "qwen2" and reader.flag("attention_bias")
    return ModelConfig(
        model_type=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=family == "llama" and reader.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        rope=read_rope(raw, head_dim, reader.where),
        windows=_windows(reader, layers) if family != "llama" else (None,) * layers,
        bos_id=raw.get("bos_token_id"),
        eos_ids=_eos_ids(folder, raw),
    )


def _windows(reader: Reader, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: without layer_types, the layers from max_window_layers on slide."""
    if not reader.flag("use_sliding_window"):
        return (None,) * layers
    window = reader.integer("sliding_window", 4096)
    kinds = reader.values.get("layer_types")
    if kinds is None:
        first = reader.integer("max_window_layers", 28, least=0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return tuple(window if sliding else None for sliding in read_layer_types(reader, kinds, layers))


def read_layer_types(reader: Reader, kinds: object, layers: int) -> list[bool]:
    """Whether each layer slides. Raises ConfigError on another count or an unknown kind."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise reader.fail("layer_types", f"{layers} of {known}")
    return [kind == "sliding_attention" for kind in kinds]


def _eos_ids(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ConfigError(f"{folder}: eos_token_id must be token ids, got {value!r}")
    if not ids:
        log.warning("%s names no eos_token_id: answers end at their length limit only", folder)
    return tuple(ids)
