"""Tiny random fp32 target folders and matching draft heads, made in milliseconds for any test.

Nothing here imports torch: tests of the gateway use it too. A target is a Hugging Face folder
(config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json with
a chat template); a draft is a DFlash or JetSpec folder for it. The rows `FAVOURITES` of the
target's head are longer than the others, so that target and draft, which share the head and are
otherwise unrelated, agree now and then: trees are then partly accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Kind = Literal["llama", "qwen2", "qwen3"]
Head = Literal["dflash", "jetspec"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
ENDOFTEXT, IM_START, EOS, MASK = range(4)
MIN_TOKENIZER_VOCAB = 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAVOURITES = tuple(range(40, 48))


@dataclass(frozen=True, slots=True)
class Pair:
    """Folders of one target and one draft that fits it."""

    target: Path
    draft: Path


def make_pair(
    folder: Path,
    kind: Kind = "llama",
    head: Head = "dflash",
    vocab: int = 320,
    seed: int = 0,
    *,
    block_size: int = 8,
    target_config: Mapping[str, Any] | None = None,
    draft_config: Mapping[str, Any] | None = None,
) -> Pair:
    """Writes `folder`/target and `folder`/draft; the config mappings override config.json keys."""
    target = make_target(folder / "target", kind, vocab, seed, config=target_config)
    draft = make_draft(
        folder / "draft", target, head, seed + 1, block_size=block_size, config=draft_config
    )
    return Pair(target, draft)


def make_target(
    folder: Path,
    kind: Kind = "llama",
    vocab: int = 320,
    seed: int = 0,
    *,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a target; with `vocab` below MIN_TOKENIZER_VOCAB it has no tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    full = target_config(kind, vocab) | dict(config or {})
    save_file(target_tensors(full, seed), folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", full)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": IM_START, "eos_token_id": full["eos_token_id"]},
    )
    if vocab >= MIN_TOKENIZER_VOCAB:
        make_tokenizer(folder, vocab)
    return folder


def make_draft(
    folder: Path,
    target: Path,
    head: Head = "dflash",
    seed: int = 1,
    *,
    block_size: int = 8,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a draft head for the target in folder `target`."""
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((target / "config.json").read_text())
    full = draft_config(base, head, block_size) | dict(config or {})
    save_file(draft_tensors(full, seed), folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", full)
    return folder


def target_config(kind: Kind, vocab: int) -> dict[str, Any]:
    """config.json of a target: 4 layers, hidden 48, 4 query and 2 key heads of 16."""
    config: dict[str, Any] = {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[
                kind
            ]
        ],
        "model_type": kind,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "bos_token_id": IM_START,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    if kind == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    if kind == "qwen3":
        config |= {"attention_bias": False}
    if kind == "qwen2":
        config |= {"hidden_size": 64}  # Qwen2's head_dim is hidden / heads
    return config


def draft_config(target: Mapping[str, Any], head: Head, block_size: int) -> dict[str, Any]:
    """config.json of a head with 2 layers for the target's config."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block_size,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 80,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": target["vocab_size"],
        "dtype": "float32",
        "dflash_config": {
            "causal_head": head == "jetspec",
            "mask_token_id": MASK,
            "target_layer_ids": [0, 2],
        },
    }


def target_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face names, for the shapes and biases that `config` asks for."""
    rng = np.random.default_rng(seed)
    kind, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    out: dict[str, np.ndarray] = {}
    qkv_bias = kind == "qwen2" or bool(config.get("attention_bias"))
    o_bias = kind != "qwen2" and bool(config.get("attention_bias"))
    for layer in range(config["num_hidden_layers"]):
        _layer(
            out, f"model.layers.{layer}.", config, rng, qkv_bias=qkv_bias, o_bias=o_bias,
            qk_norm=kind == "qwen3", mlp_bias=bool(config.get("mlp_bias")),
        )  # fmt: skip
    out["model.norm.weight"] = _norm(rng, hidden)
    scale = np.ones((vocab, 1), np.float32)
    scale[[v for v in FAVOURITES if v < vocab]] = 2.5
    out["model.embed_tokens.weight"] = _normal(rng, (vocab, hidden), 1.0)
    if config["tie_word_embeddings"]:
        out["model.embed_tokens.weight"] *= scale / math.sqrt(hidden)
    else:
        out["lm_head.weight"] = _normal(rng, (vocab, hidden), 2.0 / math.sqrt(hidden)) * scale
    return out


def draft_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random tensors of a head under the published names (no embedding, no LM head)."""
    rng = np.random.default_rng(seed)
    hidden, bias = config["hidden_size"], bool(config.get("attention_bias"))
    section = config.get("dflash_config") or config["jetspec_config"]
    taps = len(section["target_layer_ids"])
    out: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        _layer(
            out, f"layers.{layer}.", config, rng, qkv_bias=bias, o_bias=bias, qk_norm=True,
            mlp_bias=False,
        )  # fmt: skip
    out["fc.weight"] = _linear(rng, hidden, taps * hidden)
    out["hidden_norm.weight"] = _norm(rng, hidden)
    out["norm.weight"] = _norm(rng, hidden)
    return out


def make_tokenizer(folder: Path, vocab: int = 320) -> Path:
    """Writes a byte-level BPE tokenizer of `vocab` ids: specials, 256 bytes, letter pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    merges: list[tuple[str, str]] = []
    letters = "etaoinshrdlu"
    pairs = ((a, b) for a in letters for b in letters)
    for first, second in [("Ġ", "t"), ("Ġ", "a"), *pairs]:
        if len(ids) == vocab:
            break
        merges.append((first, second))
        ids[first + second] = len(ids)
    if len(ids) != vocab:
        raise ValueError(f"a tokenizer of {vocab} ids cannot be made: {len(ids)} is the most")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def _layer(
    out: dict[str, np.ndarray],
    prefix: str,
    config: Mapping[str, Any],
    rng: np.random.Generator,
    *,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool,
    mlp_bias: bool,
) -> None:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    attention = prefix + "self_attn."
    for name, rows, columns, bias in (
        (f"{attention}q_proj", q, hidden, qkv_bias),
        (f"{attention}k_proj", kv, hidden, qkv_bias),
        (f"{attention}v_proj", kv, hidden, qkv_bias),
        (f"{attention}o_proj", hidden, q, o_bias),
        (f"{prefix}mlp.gate_proj", inner, hidden, mlp_bias),
        (f"{prefix}mlp.up_proj", inner, hidden, mlp_bias),
        (f"{prefix}mlp.down_proj", hidden, inner, mlp_bias),
    ):
        out[f"{name}.weight"] = _linear(rng, rows, columns)
        if bias:
            out[f"{name}.bias"] = _normal(rng, (rows,), 0.3)
    for name in ("input_layernorm", "post_attention_layernorm"):
        out[f"{prefix}{name}.weight"] = _norm(rng, hidden)
    if qk_norm:
        out[f"{attention}q_norm.weight"] = _norm(rng, dim)
        out[f"{attention}k_norm.weight"] = _norm(rng, dim)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> np.ndarray:
    return (rng.standard_normal(shape) * std).astype(np.float32)


def _linear(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return _normal(rng, (rows, columns), 1.0 / math.sqrt(columns))


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
