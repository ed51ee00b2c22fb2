"""config.json of a DFlash or JetSpec head. What this code does not implement is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.layers.rope_config import RopeConfig, read_rope
from slipstream.models.config import Reader, read_json, read_layer_types
from slipstream.wire import MAX_NODES

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "JetSpecDraftModel")
DEFAULT_MASK_TOKEN = "<|MASK|>"

_READ = {
    "architectures", "model_type", "attention_bias", "block_size", "head_dim", "hidden_act",
    "hidden_size", "intermediate_size", "is_causal", "layer_types", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_target_layers",
    "original_max_position_embeddings", "partial_rotary_factor", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "vocab_size", "dflash_config", "jetspec_config",
}  # fmt: skip
# Keys that every exporter leaves behind and that do not touch the head's arithmetic.
_INERT = {
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "id2label", "initializer_range", "label2id", "max_window_layers", "output_attentions",
    "output_hidden_states", "pad_token_id", "return_dict", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
_SECTION_READ = {
    "attention_value_scale", "block_size", "causal", "causal_head", "final_logit_softcapping",
    "input_embedding_scale", "mask_token", "mask_token_id", "output_multiplier",
    "swa_window_size", "target_hidden_size", "target_layer_ids", "use_swa",
}  # fmt: skip
# Known variants of the algorithm that are not built here, with the values that mean "off".
_SECTION_OFF: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "conv_kernel_size": (None, 0),
    "conv_group_size": (None, 0),
    "selector_rank": (None, 0),
    "selector_top_k": (None, 0),
    "projector_type": (None,),
    "pure_draft_prefix_len": (None, 0),
    "gru_hidden_dim": (None, 0),
    "emb_dim": (None, 0),
}

FC, HIDDEN_NORM = "fc.weight", "hidden_norm.weight"
_VENDOR = {"encoder.fc.weight": FC, "encoder.output_norm_enc.weight": HIDDEN_NORM}


def stored_names(stored: Iterable[str]) -> dict[str, str]:
    """Our tensor names -> stored ones: a `model.` prefix and two vendor names are accepted."""
    plain = ((name.removeprefix("model."), name) for name in stored)
    return {_VENDOR.get(name, name): original for name, original in plain}


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shapes and switches of a draft head.

    Attributes:
        block_size: B: the anchor and B - 1 drafts.
        target_layer_ids: 0-based target layers whose outputs are the features, in this order.
        causal: of each layer, whether a block row sees only rows up to itself, or the whole block.
        windows: of each layer, its sliding window or None.
        embedding_scale, value_scale, output_multiplier: factors on embeddings, V and logits.
        softcap: logits become softcap * tanh(logits / softcap), after the multiplier; or None.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    attention_bias: bool
    rope: RopeConfig
    embedding_scale: float = 1.0
    value_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @property
    def all_causal(self) -> bool:
        """True for a JetSpec head: row i does not depend on later rows, so a block may be cut."""
        return all(self.causal)

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def qkv_bias(self) -> bool:
        """See `decoder.Shape`."""
        return self.attention_bias

    @property
    def o_bias(self) -> bool:
        """See `decoder.Shape`."""
        return self.attention_bias

    @property
    def mlp_bias(self) -> bool:
        """See `decoder.Shape`."""
        return False

    @property
    def qk_norm(self) -> bool:
        """See `decoder.Shape`."""
        return True


def load_draft_config(folder: Path) -> DraftConfig:
    """Reads `folder`/config.json.

    Raises ConfigError naming file, key and value: an unknown key, a variant that is not
    implemented, a missing theta, mask token or layer list, a number out of range.
    """
    raw = read_json(folder / "config.json")
    reader = Reader(raw, str(folder / "config.json"))
    for key in raw:
        if key not in _READ and key not in _INERT:
            raise ConfigError(
                f"{reader.where}: unknown key {key!r} = {raw[key]!r} may change the algorithm"
            )
    for name in raw.get("architectures") or ():
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"{reader.where}: architecture {name!r} is not supported; known:"
                f" {', '.join(ARCHITECTURES)}"
            )
    if raw.get("hidden_act", "silu") != "silu":
        raise reader.fail("hidden_act", "'silu'")
    section = _section(reader)
    heads, layers = reader.integer("num_attention_heads"), reader.integer("num_hidden_layers")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim, hidden = reader.integer("head_dim"), reader.integer("hidden_size")
    causal, windows = _visibility(reader, section, layers)
    blocks = section if section.values.get("block_size") is not None else reader
    target_layers = raw.get("num_target_layers") and reader.integer("num_target_layers")
    block_size = blocks.integer("block_size", least=2)
    if block_size > MAX_NODES:
        raise blocks.fail("block_size", f"at most {MAX_NODES}, the most nodes of a tree")
    return DraftConfig(
        block_size=block_size,
        mask_token_id=_mask_token(section, folder),
        target_layer_ids=_layer_ids(section, target_layers, layers),
        num_target_layers=target_layers,
        causal=causal,
        windows=windows,
        hidden_size=hidden,
        target_hidden_size=section.integer("target_hidden_size", hidden),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps"),
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        attention_bias=reader.flag("attention_bias"),
        rope=read_rope(raw, head_dim, reader.where),
        embedding_scale=section.number("input_embedding_scale", 1.0),
        value_scale=section.number("attention_value_scale", 1.0),
        output_multiplier=section.number("output_multiplier", 1.0),
        softcap=section.values.get("final_logit_softcapping")
        and section.number("final_logit_softcapping"),
    )


def _section(reader: Reader) -> Reader:
    """`dflash_config` or `jetspec_config` (the same keys; the latter means a causal head)."""
    present = [k for k in ("dflash_config", "jetspec_config") if reader.values.get(k) is not None]
    if len(present) != 1:
        raise ConfigError(
            f"{reader.where}: one of dflash_config and jetspec_config is needed, got {present}"
        )
    values = reader.values[present[0]]
    if not isinstance(values, Mapping):
        raise reader.fail(present[0], "an object")
    section = Reader(values, f"{reader.where}: {present[0]}")
    for key, value in values.items():
        if key in _SECTION_OFF:
            if value not in _SECTION_OFF[key]:
                raise ConfigError(f"{section.where}: {key} = {value!r} is not implemented")
        elif key not in _SECTION_READ:
            raise ConfigError(
                f"{section.where}: unknown key {key!r} = {value!r} may change the algorithm"
            )
    if present[0] == "jetspec_config":
        return Reader({"causal_head": True, **values}, section.where)
    return section


def _visibility(
    reader: Reader, section: Reader, layers: int
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causality and window of each layer.

    A window comes from `use_swa` for all layers, or from `layer_types`. Causality: `causal_head`,
    then `is_causal`, then `causal`, each for all layers; else sliding layers are causal and full
    ones are not.
    """
    kinds = reader.values.get("layer_types")
    sliding = [False] * layers if kinds is None else read_layer_types(reader, kinds, layers)
    window: int | None = None
    if section.flag("use_swa"):
        sliding, window = [True] * layers, section.integer("swa_window_size")
    elif any(sliding):
        window = reader.integer("sliding_window")
    elif reader.flag("use_sliding_window"):
        raise reader.fail("use_sliding_window", "false when no layer of layer_types slides")
    causal = list(sliding)
    if section.flag("causal_head"):
        causal = [True] * layers
    elif reader.values.get("is_causal") is not None:
        causal = [reader.flag("is_causal")] * layers
    elif section.values.get("causal") is not None:
        causal = [section.flag("causal")] * layers
    return tuple(causal), tuple(window if slides else None for slides in sliding)


def _layer_ids(section: Reader, target_layers: int | None, layers: int) -> tuple[int, ...]:
    ids = section.values.get("target_layer_ids")
    if ids is None:
        if not target_layers:
            raise section.fail("target_layer_ids", "given when there is no num_target_layers")
        return default_layer_ids(target_layers, layers)
    if not isinstance(ids, list) or not ids or not all(_is_index(i) for i in ids):
        raise section.fail("target_layer_ids", "a list of layer indices")
    if len(set(ids)) != len(ids):
        raise section.fail("target_layer_ids", "free of repeats")
    if target_layers and max(ids) >= target_layers:
        raise section.fail("target_layer_ids", f"below num_target_layers {target_layers}")
    return tuple(ids)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def default_layer_ids(target_layers: int, layers: int) -> tuple[int, ...]:
    """Evenly spaced from 1 to N - 3, rounded as Python rounds; [N // 2] for a single layer."""
    if layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + i * step) for i in range(layers))


def _mask_token(section: Reader, folder: Path) -> int:
    if section.values.get("mask_token_id") is not None:
        return section.integer("mask_token_id", least=0)
    token = section.values.get("mask_token", DEFAULT_MASK_TOKEN)
    path = folder / "tokenizer.json"
    if path.exists():
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(path)).token_to_id(str(token))
        if found is not None:
            return int(found)
    raise ConfigError(
        f"{section.where}: mask_token_id is missing, and no tokenizer.json beside it has {token!r}"
    )
