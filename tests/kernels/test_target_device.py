"""The device's target behind the real engine: the same tokens as the plain runner, tree or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.target.device_loading import device_runner
from services.target.device_readback import FeatureReadback
from services.target.device_runner import DeviceRunner
from services.target.kv_cache import KVCache
from services.target.runner import DecodeEntry, PrefillEntry, SlotAdmit, TargetSpec
from slipstream.models import CausalLM, ContextProjector
from slipstream.params import SamplingParams
from tests.fakes.target_driver import Driver
from tests.tiny import Pair, make_pair
from tests.unit.target_model_rig import (
    VOCAB,
    Trees,
    chain,
    fresh,
    generate,
    load,
    noise,
    oracle,
    plain,
    torn,
)

SAMPLED = SamplingParams(temperature=0.9, seed=7, top_p=0.95, presence_penalty=0.4)
SHORT = 24 if torch.cuda.is_available() else 4  # tokens of a request


def on_device(
    pair: Pair, device: torch.device, with_head: bool = True, **more: Any
) -> DeviceRunner:
    """The device's runner of a pair in fp32, as small as the tests need it."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    model = CausalLM.load(pair.target, torch.float32, device)
    head = ContextProjector.load(pair.draft, torch.float32, device)
    projector = head if with_head else None
    config, width = model.config, head.config.hidden_size if with_head else 0
    spec = TargetSpec(
        model="tiny", vocab_size=config.vocab_size, max_model_len=256, slots=6, pages=200,
        page_size=8, max_nodes=256, max_prefill_rows=64, feature_width=width,
    )  # fmt: skip
    cache = KVCache(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        pages=200, page_size=8, dtype=torch.float32, feature_width=width,
        feature_dtype=torch.float32, device=device,
    )  # fmt: skip
    fields = {"decode_rows": 64} | more
    return device_runner(model, projector, spec, cache, device=device, **fields)


def request(prompt: int) -> SlotAdmit:
    ids = list(range(20, 20 + prompt))
    return SlotAdmit(ids, (), 64, 0, frozenset(), SamplingParams(), None, True)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param, vocab=VOCAB)


@pytest.fixture(scope="module")
def runner(pair: Pair, device: torch.device) -> DeviceRunner:
    return on_device(pair, device)


@pytest.fixture
def driver(runner: DeviceRunner) -> Iterator[Driver[DeviceRunner]]:
    made = Driver(runner)
    yield made
    made.engine.stop()
    assert not made.failure


GPU = pytest.mark.gpu  # interpreted, a case takes half a minute


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param(kind, sampling, id=f"{kind}-{name}", marks=marks)
        for kind in ("plain", "oracle", "noise", "torn", "chain")
        for name, sampling in (("greedy", SamplingParams()), ("sampled", SAMPLED))
        for marks in (() if (kind, name) == ("oracle", "sampled") else (GPU,),)
    ],
)
def test_tokens_equal_the_plain_runner(
    driver: Driver[DeviceRunner], pair: Pair, kind: str, sampling: SamplingParams
) -> None:
    reference = Driver(load(pair))
    want = plain(reference, sampling=sampling, count=SHORT)
    reference.engine.stop()
    sources: dict[str, Trees] = {
        "oracle": oracle(want), "noise": noise, "torn": torn, "chain": chain(want)
    }  # fmt: skip
    requests = fresh()
    got = generate(
        driver, requests, sources.get(kind), join_every=1, chunk=16, sampling=sampling, count=SHORT
    )
    assert got == list(want.values())
    if kind in ("oracle", "chain"):
        assert sum(request.accepted for request in requests) > 0
        assert max(request.verified for request in requests) > 1


def test_without_a_head(tmp_path: Path, device: torch.device) -> None:
    """Nothing is tapped, projected or kept."""
    pair = make_pair(tmp_path, vocab=VOCAB)
    reference = Driver(load(pair, draft="none"))
    want = plain(reference, count=2)
    reference.engine.stop()
    driver = Driver(on_device(pair, device, with_head=False))
    assert generate(driver, fresh(), count=2) == list(want.values())
    driver.engine.stop()
    assert not driver.failure


def test_between_two_chunks(runner: DeviceRunner) -> None:
    """What is asserted of a slot whenever the engine is idle."""
    runner.admit(0, request(6))
    runner.prefill([PrefillEntry(0, 0, 4, False, range(1))])
    assert runner.lengths(0) == (4, 4)
    runner.prefill([PrefillEntry(0, 4, 2, True, range(1))])
    assert runner.lengths(0) == (6, 6)
    runner.release(0)


def test_features_in_more_parts_than_there_are_buffers(
    runner: DeviceRunner, device: torch.device
) -> None:
    cache = runner._cache
    cache.features.copy_(torch.arange(len(cache.features), device=device)[:, None])
    reader = FeatureReadback(cache, 3, device)
    index = list(range(40, 60))
    rows = torch.frombuffer(bytearray(reader.read(index)), dtype=torch.float32)
    assert rows.view(len(index), -1)[:, 0].tolist() == index


def test_more_slots_than_rows_of_a_step(pair: Pair, device: torch.device) -> None:
    """Six first tokens at once, where a decode step has four rows."""
    small = on_device(pair, device, decode_rows=4)
    assert len(small._step.draws.tokens) == len(small._step.walks.row_dest) == 6
    entries = [PrefillEntry(slot, 0, 3, True, [slot]) for slot in range(6)]
    for entry in entries:
        small.admit(entry.slot, request(3))
    assert [len(result.tokens) for result in small.prefill(entries)] == [1] * 6
    trees = [DecodeEntry(slot, 3, 5, 4, ([5, 6, 7], [-1, 0, 0]), [slot]) for slot in (0, 1)]
    assert all(result.tokens for result in small.decode(trees))
