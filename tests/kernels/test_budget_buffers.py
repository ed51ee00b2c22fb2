"""What the servers set aside for buffers is enough for those that they allocate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.draft.device_step import DraftStep, StepSizes
from services.draft.runner import DraftSpec
from slipstream.models import load_config, load_draft_config
from slipstream.models.budget import CONTEXT, DRAFT_GRAPHS, draft_reserve

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"


@pytest.mark.parametrize("slots", [1, 16, 64, 256])
def test_the_draft_sets_enough_aside(slots: int) -> None:
    config = load_config(CONFIGS / "qwen3-8b")
    head = load_draft_config(CONFIGS / "qwen3-8b-dflash-b16")
    spec = DraftSpec(
        model="head", block_size=16, mask_token_id=0, causal=False, vocab_size=config.vocab_size,
        feature_width=config.hidden_size, feature_dtype="bfloat16", slots=slots, pages=0,
        page_size=16,
    )  # fmt: skip
    buffers = DraftStep.bytes_needed(
        head, spec, max_len=40_960, dtype=torch.bfloat16, sizes=StepSizes.of(spec)
    )
    assert buffers <= draft_reserve(config, head, 2, slots) - CONTEXT - DRAFT_GRAPHS
