"""From settings to runners, without weights on disk; on a GPU only the arithmetic is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.draft import loading as draft_loading
from services.draft.settings import DraftSettings
from services.target import loading as target_loading
from services.target.settings import TargetSettings
from slipstream import accelerator
from slipstream.accelerator import Place
from slipstream.errors import ConfigError
from slipstream.models import load_config, load_draft_config
from slipstream.models.budget import target_token_bytes
from slipstream.settings import parse
from tests.tiny import Pair, make_pair

GIB = 1 << 30
GPU = Place("cuda:0", torch.bfloat16, 16 * GIB, 0.5)


@pytest.fixture(autouse=True)
def same_threads() -> object:
    """Loading sets the number of threads for good."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Folders without weights."""
    pair = make_pair(tmp_path)
    for folder in (pair.target, pair.draft):
        (folder / "model.safetensors").unlink()
    return pair


def target_settings(pair: Pair, *argv: str) -> TargetSettings:
    given = [f"--model={pair.target}", f"--draft={pair.draft}", "--random-weights", *argv]
    return parse(TargetSettings, given)


def draft_settings(pair: Pair, *argv: str) -> DraftSettings:
    given = [f"--model={pair.target}", f"--draft={pair.draft}", "--random-weights", *argv]
    return parse(DraftSettings, given)


def test_made_up_weights_agree_in_both_servers(pair: Pair) -> None:
    flags = ["--device=cpu", "--dtype=float32", "--no-warmup", "--slots=2"]
    target = target_loading.load_runner(target_settings(pair, *flags)).spec
    draft = draft_loading.load_runner(draft_settings(pair, *flags)).spec
    assert target.fingerprints == dict(draft.fingerprints)
    assert set(target.fingerprints) == {"embedding", "lm_head", "fc", "hidden_norm"}
    assert target.feature_dtype == draft.feature_dtype == "float32"
    assert target.max_prefill_rows == 512
    assert target.pages == 2 * (512 + 256) // 16
    with pytest.raises(ConfigError, match=r"target has neither model\.safetensors"):
        target_loading.load_runner(parse(TargetSettings, [f"--model={pair.target}", *flags[:2]]))


def target_pages(pair: Pair, place: Place, *argv: str) -> int:
    settings = target_settings(pair, *argv)
    choices = target_loading._Choices(place, "triton", "triton", 2048, 2048)
    config, head = load_config(pair.target), load_draft_config(pair.draft)
    taken = target_loading._Head(head)
    return target_loading._pages(settings, choices, config, taken, 512)


def test_pages_of_a_gpu_are_what_its_share_leaves(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "used", lambda place: GIB)
    assert target_pages(pair, GPU) == 16 * (512 + 256) // 16, "no more than all slots full"
    many = "--slots=1024"
    fit = target_pages(pair, Place("cuda:0", torch.bfloat16, 16 * GIB, 0.3), many)
    full = target_pages(pair, GPU, many)
    assert 0 < fit <= full == 1024 * 48
    assert target_pages(pair, GPU, many, "--pages=100") == 100
    small = Place("cuda:0", torch.bfloat16, 16 * GIB, 0.1)
    with pytest.raises(ConfigError, match="--memory-share: 0.1 of 16.0 GiB leaves no page"):
        target_pages(pair, small)


def test_pages_by_hand_must_fit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "used", lambda place: 0)
    config, head = load_config(pair.target), load_draft_config(pair.draft)
    pages = 4 * GIB // (16 * target_token_bytes(config, head, 2))
    with pytest.raises(ConfigError, match=rf"--pages: {pages} are 4.0 GiB, \d+ fit"):
        target_pages(pair, Place("cuda:0", torch.bfloat16, 16 * GIB, 0.3), f"--pages={pages}")
    with pytest.raises(ConfigError, match=r"--pages: 90000000 for 2 sessions are .*, \d+ fit"):
        settings = draft_settings(pair, "--pages=90000000", "--max-sessions=2")
        draft_loading._pages(settings, GPU, config, head)
    sessions = draft_settings(pair, "--max-sessions=2")
    assert draft_loading._pages(sessions, GPU, config, head) == 64 * 33


def test_a_gpu_that_is_not_there_is_an_error(pair: Pair) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for load, settings in (
        (target_loading.load_runner, target_settings(pair, "--device=cuda")),
        (draft_loading.load_runner, draft_settings(pair, "--device=cuda")),
    ):
        with pytest.raises(ConfigError, match="--device: cuda: "):
            load(settings)  # type: ignore[operator]
