"""What is not implemented, or does not fit, is refused by name and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ConfigError, PairError
from slipstream.models import (
    CausalLM,
    Checkpoint,
    ContextProjector,
    DraftHead,
    check_pair,
    default_dtype,
    fingerprints,
    load_config,
    load_draft_config,
    parse_dtype,
    read_acceptance,
)
from slipstream.models.draft_config import default_layer_ids
from tests.tiny import Pair, make_draft, make_pair, make_target


def edit(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes a key."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def edit_section(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    section = raw["dflash_config"] | changes
    edit(folder, dflash_config={k: v for k, v in section.items() if v is not None})


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral", None])
def test_other_families(tmp_path: Path, family: str | None) -> None:
    folder = make_target(tmp_path)
    edit(folder, model_type=family)
    with pytest.raises(ConfigError, match=f"model_type {family!r} is not supported"):
        load_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "48"}, "hidden_size must be an integer.*'48'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be .* got 0"),
        ({"vocab_size": None}, "vocab_size must be .* got None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor .* got 3"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping .* got 30.0"),
        ({"rope_theta": None}, "rope_theta must be a positive number.*got None"),
        ({"rope_theta": -1}, "rope_theta must be a positive number.*got -1"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "unknown rope_type 'spiral'"),
        ({"rope_scaling": {"mrope_section": [1]}}, "unknown RoPE key 'mrope_section'"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"eos_token_id": "x"}, "eos_token_id must be token ids, got 'x'"),
    ],
)
def test_target_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = make_target(tmp_path)
    (folder / "generation_config.json").unlink()
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_config(folder)


def test_incomplete_rope_scaling(tmp_path: Path) -> None:
    folder = make_target(tmp_path, config={"rope_scaling": {"rope_type": "linear"}})
    with pytest.raises(ConfigError, match="RoPE of type 'linear'"):
        CausalLM.load(folder, torch.float32)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        Checkpoint.open(tmp_path)


def test_target_tensors(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(64)}))
    with pytest.raises(ConfigError, match=f"unknown tensor '{name}'"):
        CausalLM.load(folder, torch.float32)
    edit_tensors(folder, lambda t: (t.pop(name), t.pop("model.norm.weight")))
    with pytest.raises(ConfigError, match=r"tensor 'model\.norm\.weight' is missing"):
        CausalLM.load(folder, torch.float32)
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(ConfigError, match=r"has shape \[47\], the config asks for \[48\]"):
        CausalLM.load(folder, torch.float32)


def test_head_and_vocabulary_must_fit(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    edit(folder, vocab_size=400)
    with pytest.raises(ConfigError, match="has 320 rows, fewer than vocab_size 400"):
        CausalLM.load(folder, torch.float32)
    edit(folder, vocab_size=320)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"no 'lm_head\.weight'"):
        CausalLM.load(folder, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 100}, "unknown key 'draft_vocab_size' = 100"),
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' is not supported"),
        ({"block_size": None}, "block_size must be an integer"),
        ({"block_size": 1}, "block_size must be an integer of at least 2, got 1"),
        (
            {"block_size": 1000},
            "block_size must be at most 256, .* got 1000",
        ),
        ({"head_dim": None}, "head_dim must be"),
        ({"rope_theta": None}, "rope_theta must be a positive number"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 2 of"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window must be an integer"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"jetspec_config": {}}, "one of dflash_config and jetspec_config is needed"),
        ({"dflash_config": None}, "one of dflash_config and jetspec_config is needed"),
        ({"is_causal": 1}, "is_causal must be true or false, got 1"),
    ],
)
def test_draft_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pair = make_pair(tmp_path)
    edit(pair.draft, **changes)
    with pytest.raises(ConfigError, match=message):
        load_draft_config(pair.draft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector_top_k": 16}, "selector_top_k = 16 is not implemented"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True is not implemented"),
        ({"attention_sink_bias": True}, "attention_sink_bias = True is not implemented"),
        ({"surprise": 1}, "unknown key 'surprise' = 1"),
        ({"mask_token_id": None}, r"mask_token_id is missing.*'<\|MASK\|>'"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0, got -1"),
        ({"target_layer_ids": []}, "target_layer_ids must be a list"),
        ({"target_layer_ids": [0, 0]}, "target_layer_ids must be free of repeats"),
        ({"target_layer_ids": [0, 4]}, "target_layer_ids must be below num_target_layers 4"),
    ],
)
def test_draft_sections(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pair = make_pair(tmp_path)
    edit_section(pair.draft, **changes)
    with pytest.raises(ConfigError, match=message):
        load_draft_config(pair.draft)


def test_block_size_in_the_section_wins(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    edit_section(pair.draft, block_size=12)
    assert load_draft_config(pair.draft).block_size == 12
    edit(pair.draft, block_size=None)
    assert load_draft_config(pair.draft).block_size == 12


def test_a_jetspec_section_means_a_causal_head(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    raw = json.loads((pair.draft / "config.json").read_text())
    section = {k: v for k, v in raw["dflash_config"].items() if k != "causal_head"}
    edit(pair.draft, dflash_config=None, jetspec_config=section)
    assert load_draft_config(pair.draft).causal == (True, True)


def test_default_layer_ids() -> None:
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(32, 5) == (1, 8, 15, 22, 29)
    assert default_layer_ids(60, 6) == (1, 12, 23, 35, 46, 57)
    assert default_layer_ids(30, 1) == (15,)


def test_mask_token_by_name(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    edit_section(pair.draft, mask_token_id=None, mask_token="<|mask|>")
    (pair.draft / "tokenizer.json").write_bytes((pair.target / "tokenizer.json").read_bytes())
    assert load_draft_config(pair.draft).mask_token_id == 3


def test_draft_tensors(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    edit_tensors(pair.draft, lambda t: t.update(d2t=torch.zeros(3)))
    with pytest.raises(ConfigError, match="unknown tensor 'd2t'"):
        DraftHead.load(pair.draft, pair.target, torch.float32)
    edit_tensors(pair.draft, lambda t: (t.pop("d2t"), t.pop("layers.1.self_attn.k_norm.weight")))
    with pytest.raises(ConfigError, match=r"'layers\.1\.self_attn\.k_norm\.weight' is missing"):
        DraftHead.load(pair.draft, pair.target, torch.float32)
    edit_section(pair.draft, target_layer_ids=[0, 1, 2])
    with pytest.raises(ConfigError, match=r"'fc\.weight' has shape \[48, 96\].*\[48, 144\]"):
        ContextProjector.load(pair.draft, torch.float32)


def pair_of(tmp_path: Path, **draft: Any) -> Pair:
    pair = make_pair(tmp_path)
    if draft:
        make_draft(pair.draft, pair.target, config=draft)
    return pair


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size 32 is not the target's 48"),
        ({"vocab_size": 500}, "vocab_size 500 is not the target's 320"),
        ({"num_target_layers": 6}, "a target of 6 layers, this one has 4"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pair = pair_of(tmp_path, **changes)
    with pytest.raises(PairError, match=message):
        DraftHead.load(pair.draft, pair.target, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 320}, "mask_token_id 320 is not a row .* vocab_size is 320"),
        ({"target_layer_ids": [0, 9]}, "taps layer 9, the target has 4 layers"),
        ({"target_hidden_size": 96}, "features of width 96, the target's hidden_size is 48"),
    ],
)
def test_sections_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pair = make_pair(tmp_path)
    edit(pair.draft, num_target_layers=None)
    edit_section(pair.draft, **changes)
    with pytest.raises(PairError, match=message):
        check_pair(load_config(pair.target), load_draft_config(pair.draft))


def test_fingerprints_name_what_both_must_share(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "one")
    prints = fingerprints(pair.target, pair.draft)
    assert set(prints) == {"fc", "hidden_norm", "embedding", "lm_head"}
    assert fingerprints(pair.target, None) == {k: prints[k] for k in ("embedding", "lm_head")}
    same = make_pair(tmp_path / "two", seed=0)
    assert fingerprints(same.target, same.draft) == prints
    other = make_pair(tmp_path / "three", seed=5)
    changed = fingerprints(other.target, other.draft)
    assert not set(changed.values()) & set(prints.values())
    tied = make_target(tmp_path / "tied", config={"tie_word_embeddings": True})
    assert len(set(fingerprints(tied, None).values())) == 1


def test_acceptance(tmp_path: Path) -> None:
    assert read_acceptance(tmp_path) is None
    (tmp_path / "acceptance.json").write_text('{"chain": [0.8, 0.7]}')
    assert read_acceptance(tmp_path) == [0.8, 0.7]
    (tmp_path / "acceptance.json").write_text('{"chain": [1.8]}')
    with pytest.raises(ConfigError, match=r"chain must be a list of probabilities, got \[1.8\]"):
        read_acceptance(tmp_path)


def test_dtypes() -> None:
    assert parse_dtype("float32", "cpu") == torch.float32
    assert parse_dtype("auto", "cpu") == default_dtype("cpu")
    assert default_dtype("cuda") == torch.bfloat16
    with pytest.raises(ConfigError, match="unknown dtype 'int4'"):
        parse_dtype("int4", "cpu")
