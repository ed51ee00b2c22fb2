"""Weights made up for a config.json: the same in every process, as large as the real ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.models import (
    CausalLM,
    ContextProjector,
    DraftHead,
    RandomTensors,
    Vocabulary,
    fingerprints,
    load_config,
    load_draft_config,
)
from slipstream.models.pair import check_pair
from slipstream.models.random_weights import tensor_shapes
from tests.tiny import Pair, make_pair, make_target

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Folders that hold nothing but config.json."""
    pair = make_pair(tmp_path)
    for folder in (pair.target, pair.draft):
        for file in folder.iterdir():
            if file.name != "config.json":
                file.unlink()
    return pair


def test_two_loads_hold_the_same_weights(pair: Pair) -> None:
    def both() -> tuple[CausalLM, ContextProjector, DraftHead, Vocabulary]:
        source, dtype = RandomTensors.open, torch.float32
        return (
            CausalLM.load(pair.target, dtype, open_tensors=source),
            ContextProjector.load(pair.draft, dtype, open_tensors=source),
            DraftHead.load(pair.draft, pair.target, dtype, open_tensors=source),
            Vocabulary.load(pair.target, dtype, "cpu", open_tensors=source),
        )

    first, second = both(), both()
    x = torch.randn(3, 48)
    taps = torch.randn(3, 96)
    assert torch.equal(first[0].logits(x), second[0].logits(x))
    assert torch.equal(first[0].layers[2].down(x.new_ones(3, 80)), second[0].layers[2].down(
        x.new_ones(3, 80)
    ))  # fmt: skip
    assert torch.equal(first[1](taps), second[1](taps))
    assert torch.equal(first[2].logits(x), first[0].logits(x))
    assert torch.equal(first[3].embedding, first[0].vocabulary.embedding)
    keys = [head.context_kv(x, torch.arange(3))[0] for head in (first[2], second[2])]
    assert torch.equal(*keys)
    assert keys[0].isfinite().all()


def test_fingerprints_agree_and_tell_seeds_apart(pair: Pair) -> None:
    def prints(seed: int) -> dict[str, str]:
        def source(folder: Path) -> RandomTensors:
            return RandomTensors(folder, tensor_shapes(folder), seed)

        return fingerprints(pair.target, pair.draft, open_tensors=source)

    found = fingerprints(pair.target, pair.draft, open_tensors=RandomTensors.open)
    assert found == prints(0)
    assert set(found) == {"embedding", "lm_head", "fc", "hidden_norm"}
    assert len(set(found.values())) == 4 == len(set(found.values()) ^ set(prints(1).values())) // 2
    assert all(len(value) == 64 for value in found.values())


def test_values_are_as_large_as_trained_ones(pair: Pair) -> None:
    source = RandomTensors.open(pair.target)
    head = source.tensor("lm_head.weight", torch.float32)
    assert head.std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert torch.equal(source.tensor("model.norm.weight", torch.float32), torch.ones(48))
    assert source.tensor("lm_head.weight").dtype == torch.bfloat16
    assert not torch.equal(head, source.tensor("model.embed_tokens.weight", torch.float32))
    with pytest.raises(ConfigError, match=r"target.*no tensor 'fc\.weight'"):
        source.tensor("fc.weight")


def test_nothing_is_written(pair: Pair) -> None:
    CausalLM.load(pair.target, torch.float32, open_tensors=RandomTensors.open)
    assert [file.name for file in pair.target.iterdir()] == ["config.json"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_tied_target_of_every_family(tmp_path: Path, kind: str) -> None:
    config = {"tie_word_embeddings": True}
    folder = make_target(tmp_path, kind, config=config)  # type: ignore[arg-type]
    model = CausalLM.load(folder, torch.float32, open_tensors=RandomTensors.open)
    assert model.vocabulary.size == 320
    assert "lm_head.weight" not in tensor_shapes(folder)


def test_the_shapes_of_the_real_pair() -> None:
    target, draft = CONFIGS / "qwen3-8b", CONFIGS / "qwen3-8b-dflash-b16"
    check_pair(load_config(target), load_draft_config(draft))
    counts = [sum(map(math.prod, tensor_shapes(folder).values())) for folder in (target, draft)]
    assert counts == [8_190_735_360, 1_048_626_432]
    assert len(tensor_shapes(draft)) == 58
