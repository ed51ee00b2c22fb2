"""What a pair holds on a GPU: the arithmetic against real tensors, and one card divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.draft.context_cache import ContextCache
from services.target.kv_cache import KVCache
from slipstream.errors import ConfigError
from slipstream.models import load_config, load_draft_config
from slipstream.models.budget import (
    SPARE,
    USABLE,
    Load,
    draft_reserve,
    draft_token_bytes,
    draft_weight_bytes,
    pages_within,
    plan_shares,
    target_reserve,
    target_token_bytes,
    target_weight_bytes,
    vocabulary_bytes,
)
from slipstream.models.random_weights import tensor_shapes
from tests.tiny import make_pair

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"
TARGET, DRAFT = CONFIGS / "qwen3-8b", CONFIGS / "qwen3-8b-dflash-b16"
CONFIG, HEAD = load_config(TARGET), load_draft_config(DRAFT)
H200 = 143_771 << 20
GIB = 1 << 30


def elements(folder: Path, *without: str) -> int:
    shapes = tensor_shapes(folder)
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if name not in without)


def close(found: int, wanted: int) -> None:
    """Norms that are kept for every head are counted, and are next to nothing."""
    assert wanted <= found <= wanted * 1.0002


def test_weights_are_those_of_the_checkpoints() -> None:
    close(target_weight_bytes(CONFIG, None, 2), 2 * elements(TARGET))
    projector = 5 * 4096 * 4096 + 4096
    assert target_weight_bytes(CONFIG, HEAD, 2) - target_weight_bytes(CONFIG, None, 2) == (
        2 * projector
    )
    layers = elements(DRAFT, "fc.weight", "hidden_norm.weight")
    again = 5 * 2 * 1024 * 4096  # K and V projections of all layers, as one matrix
    close(draft_weight_bytes(CONFIG, HEAD, 2), 2 * (layers + again) + vocabulary_bytes(CONFIG, 2))
    assert vocabulary_bytes(replace(CONFIG, tie_word_embeddings=True), 2) == 2 * 151_936 * 4096


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_family_is_counted(tmp_path: Path, kind: str) -> None:
    given = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    pair = make_pair(tmp_path, kind, target_config=given)  # type: ignore[arg-type]
    config = load_config(pair.target)
    extra = 4 * (6 * 16 - 2 * 16) if config.qk_norm else 0  # norms for every head
    assert target_weight_bytes(config, None, 1) == elements(pair.target) + extra


def test_tokens_are_those_of_the_pages() -> None:
    page = KVCache.page_bytes(36, 8, 128, 16, torch.bfloat16, 4096, torch.bfloat16)
    assert 16 * target_token_bytes(CONFIG, HEAD, 2) == page
    assert target_token_bytes(CONFIG, None, 2) == 147_456
    assert draft_token_bytes(HEAD, 2) == 20_480
    page = ContextCache.page_bytes(5, 16, 8, 128, torch.float32)
    assert 16 * draft_token_bytes(HEAD, 4) == page


def test_one_card_is_divided() -> None:
    load = Load(item=2, max_len=40_960)
    shares = plan_shares(H200, CONFIG, HEAD, load)
    assert shares.target + shares.draft == pytest.approx(USABLE)
    assert 0.1 < shares.draft < 0.16
    assert 550_000 < shares.tokens < load.most_tokens

    def pages(share: float, weights: int, token: int, reserve: int) -> int:
        return pages_within(share, H200, weights, 16 * token, reserve)

    # What each server then takes by itself: the draft has a page for every page of the target.
    target = pages(
        shares.target,
        target_weight_bytes(CONFIG, HEAD, 2),
        target_token_bytes(CONFIG, HEAD, 2),
        target_reserve(CONFIG, HEAD, 2, load.slots),
    )
    draft = pages(
        shares.draft,
        draft_weight_bytes(CONFIG, HEAD, 2),
        draft_token_bytes(HEAD, 2),
        draft_reserve(CONFIG, HEAD, 2, load.draft_slots),
    )
    assert abs(target - shares.tokens // 16) < 100
    assert draft >= target + load.draft_slots
    unplanned = pages(
        shares.draft,
        draft_weight_bytes(CONFIG, HEAD, 2) + SPARE,
        draft_token_bytes(HEAD, 2),
        draft_reserve(CONFIG, HEAD, 2, load.draft_slots),
    )
    assert unplanned >= target


def test_no_more_than_all_slots_full() -> None:
    load = Load(item=2, max_len=4096, slots=4)
    shares = plan_shares(H200, CONFIG, HEAD, load)
    assert shares.tokens == load.most_tokens == 4 * 272 * 16
    assert shares.draft < 0.08


def test_a_card_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match="92% of one GPU of 24.0 GiB .* target .* --draft-device"):
        plan_shares(24 * GIB, CONFIG, HEAD, Load(item=2, max_len=40_960))


def test_pages_within_a_share() -> None:
    assert pages_within(0.5, 1000, 100, 30, 99) == 10
    assert pages_within(0.5, 1000, 100, 301, 99) == 1
    with pytest.raises(ConfigError, match=r"--memory-share: 0.5 of .* leaves no page: weights"):
        pages_within(0.5, 1000, 100, 302, 99)
