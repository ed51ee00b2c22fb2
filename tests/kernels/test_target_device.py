"""The device's target behind the real engine: the same tokens as the plain runner, tree or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.target.device_loading import device_runner, share
from services.target.device_readback import FeatureReadback, StepReadback
from services.target.device_runner import DeviceRunner
from services.target.grammar import Vocabulary
from services.target.kv_cache import KVCache
from services.target.runner import (
    DecodeEntry,
    Finish,
    PrefillEntry,
    SlotAdmit,
    TargetSpec,
)
from slipstream.grammar import Grammar, GrammarKind
from slipstream.handoff.layout import RING
from slipstream.kernels.walk import HEADER
from slipstream.models import CausalLM, ContextProjector
from slipstream.params import SamplingParams
from tests.fakes.target_driver import Driver
from tests.tiny import EOS, Pair, make_pair
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
FEW = slice(None) if torch.cuda.is_available() else slice(0, 4, 3)  # of the rig's prompts
SHORT = 24 if torch.cuda.is_available() else 4  # tokens of a request


def on_device(
    pair: Pair, device: torch.device, with_head: bool = True, shares: bool = False, **more: Any
) -> DeviceRunner:
    """The device's runner of a pair in fp32, as small as the tests need it.

    `shares`: a draft may map its features; whoever asks for that closes `shared`.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    model = CausalLM.load(pair.target, torch.float32, device)
    head = ContextProjector.load(pair.draft, torch.float32, device)
    projector = head if with_head else None
    vocabulary = Vocabulary.load(pair.target, VOCAB, model.config.eos_ids)
    config, width = model.config, head.config.hidden_size if with_head else 0
    spec = TargetSpec(
        model="tiny", vocab_size=config.vocab_size, max_model_len=256, slots=6, pages=200,
        page_size=8, max_nodes=256, max_prefill_rows=64, feature_width=width,
        grammars=True,
    )  # fmt: skip
    shared = share(spec, device) if shares else None
    cache = KVCache(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        pages=200, page_size=8, dtype=torch.float32, feature_width=width,
        feature_dtype=torch.float32, device=device,
        features=None if shared is None else shared.features,
    )  # fmt: skip
    fields = {"decode_rows": 64, "vocabulary": vocabulary, "shared": shared} | more
    return device_runner(model, projector, spec, cache, device=device, **fields)


def request(prompt: int) -> SlotAdmit:
    ids = list(range(20, 20 + prompt))
    return SlotAdmit(ids, (), 64, 0, frozenset(), SamplingParams(), None, True)


# Interpreted, one family is enough: the one with norms of queries and keys.
FAMILIES = ["llama", "qwen3"] if torch.cuda.is_available() else ["qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
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
    requests = fresh()[FEW]
    got = generate(
        driver, requests, sources.get(kind), join_every=1, chunk=16, sampling=sampling, count=SHORT
    )
    assert got == list(want.values())[FEW]
    if kind in ("oracle", "chain"):
        assert sum(request.accepted for request in requests) > 0
        assert max(request.verified for request in requests) > 1


SCHEMA = """{"type": "object", "properties": {"the": {"type": "array", "maxItems": 3,
 "items": {"enum": [true, 7]}}}, "required": ["the"], "additionalProperties": false,
 "x-guidance": {"whitespace_flexible": false}}"""
BOUND = [
    ("schema", Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), {}),
    ("short", Grammar(GrammarKind.REGEX, "(the)+|a+"), {}),
    ("nothing left", Grammar(GrammarKind.REGEX, "the|te"), {"min_tokens": 9}),
]


@pytest.mark.parametrize(
    ("kind", "name", "grammar", "more"),
    [
        pytest.param(kind, *case, id=f"{kind}-{case[0]}", marks=marks)
        for kind in ("plain", "oracle", "noise")
        for case in BOUND
        for marks in (() if (kind, case[0]) == ("oracle", "nothing left") else (GPU,),)
    ],
)
def test_grammars_and_prompts_equal_the_plain_runner(
    driver: Driver[DeviceRunner],
    pair: Pair,
    kind: str,
    name: str,
    grammar: Grammar,
    more: dict[str, Any],
) -> None:
    sampling = SamplingParams(
        temperature=0.9, seed=8, top_k=40, presence_penalty=0.4, banned_ids=frozenset({41, 70})
    )
    fields = {"sampling": sampling, "grammar": grammar, "stop": (EOS,), "count": 40} | more
    reference, wanted = Driver(load(pair)), fresh()[FEW]
    want = {
        id(request.prompt): output
        for request, output in zip(
            wanted, generate(reference, wanted, prompt_logprobs=3, **fields), strict=True
        )
    }
    reference.engine.stop()
    sources: dict[str, Trees] = {"oracle": oracle(want, misses=0.1), "noise": noise}
    requests = fresh()[FEW]
    got = generate(
        driver, requests, sources.get(kind), join_every=1, chunk=16, prompt_logprobs=3, **fields
    )
    assert got == list(want.values())
    assert [request.finish for request in requests] == [request.finish for request in wanted]
    if more:
        assert {request.finish for request in requests} == {Finish.ERROR}
    for request, other in zip(requests, wanted, strict=True):
        assert len(request.prompt_logprobs) == len(request.prompt) - 1
        for mine, its in zip(request.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in its.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in its.top], abs=1e-4)


@pytest.mark.gpu
def test_scoring_alone(driver: Driver[DeviceRunner], pair: Pair) -> None:
    requests = fresh()
    assert generate(driver, requests, count=0, prompt_logprobs=0, chunk=16) == [[]] * len(requests)
    assert {request.finish for request in requests} == {Finish.LIMIT}


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_more_results_than_there_are_buffers(runner: DeviceRunner) -> None:
    """Those of steps of many parts, none of them read before the last has started."""
    step = runner._step
    reader = StepReadback(step.walks, step.draws, step.device)
    copies = []
    for part in range(2 * RING + 3):
        step.walks.result[0, : HEADER + 1] = torch.tensor([1, 0, 0, 1, part], dtype=torch.int32)
        copies.append(reader.start([1], [None]))
    assert [list(copy.read()[0].tokens) for copy in copies] == [[part] for part in range(19)]
