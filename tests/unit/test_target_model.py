"""The real runner behind the real engine on tiny models: trees change no token.

Expected tokens come from transformers (greedy) and from the runner's own plain decoding, which the
first test ties to it. Requests and their trees are in target_model_rig.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.target.commands import PlanEntry, Release
from services.target.model_runner import ModelRunner
from services.target.runner import Finish
from services.target.warmup import measure
from slipstream.errors import ConfigError, PairError
from slipstream.params import SamplingParams
from tests.fakes.target_driver import Driver
from tests.tiny import Pair, make_pair
from tests.unit.target_model_rig import (
    LENGTH,
    PROMPTS,
    VOCAB,
    Request,
    chain,
    fresh,
    generate,
    load,
    noise,
    oracle,
    plain,
    torn,
)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param, vocab=VOCAB)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("llama"), vocab=VOCAB)


@pytest.fixture
def driver(llama: Pair) -> Iterator[Driver[ModelRunner]]:
    made = Driver(load(llama))
    yield made
    made.check()
    made.engine.stop()
    assert not made.failure


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_greedy(folder: Path, prompt: list[int], count: int = LENGTH) -> list[int]:
    """Greedy tokens by transformers, past any end token."""
    model = hf_model(folder)
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_greedy_equals_transformers_and_trees_change_nothing(pair: Pair) -> None:
    driver = Driver(load(pair))
    want = plain(driver)
    for prompt in PROMPTS:
        assert want[id(prompt)] == hf_greedy(pair.target, prompt)
    for trees, least in ((chain(want), 20), (oracle(want), 20), (noise, 0), (torn, 0)):
        requests = fresh()
        assert generate(driver, requests, trees) == list(want.values())
        assert max(r.verified for r in requests) > 1
        assert sum(r.accepted for r in requests) >= least
    driver.check()
    driver.engine.stop()
    assert not driver.failure


def test_batches_that_join_and_leave(driver: Driver[ModelRunner]) -> None:
    want = plain(driver)
    for join_every in (1, 3, 50):
        for trees in (None, oracle(want)):
            got = generate(driver, fresh(), trees, join_every=join_every)
            assert got == list(want.values()), (join_every, trees)


def test_chunked_prefill_equals_whole(driver: Driver[ModelRunner]) -> None:
    want = list(plain(driver).values())
    for chunk in (1, 5, 16):
        assert generate(driver, fresh(), chunk=chunk) == want


SAMPLED = {
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=1234),
    "hot": SamplingParams(temperature=1.0, seed=5),
    "filtered": SamplingParams(temperature=0.9, top_k=12, min_p=0.05, seed=6, choice=1),
    "penalised": SamplingParams(
        temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, seed=7
    ),
    "greedy penalised": SamplingParams(frequency_penalty=1.0, repetition_penalty=1.1),
    "biased": SamplingParams(logit_bias={40: 3.0, 41: -3.0}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_requests_do_not_depend_on_trees_or_neighbours(
    driver: Driver[ModelRunner], name: str
) -> None:
    sampling = SAMPLED[name]
    want = plain(driver, sampling=sampling)
    alone = [generate(driver, [request], sampling=sampling)[0] for request in fresh()]
    assert alone == list(want.values())
    for trees in (chain(want), oracle(want)):
        requests = fresh()
        assert generate(driver, requests, trees, join_every=2, sampling=sampling) == alone
        assert sum(r.accepted for r in requests) > 10


def test_readmission_goes_on_where_it_was(driver: Driver[ModelRunner]) -> None:
    for sampling in (SamplingParams(), SAMPLED["penalised"]):
        want = plain(driver, sampling=sampling)
        for prompt in PROMPTS:
            output = want[id(prompt)][:9]
            epoch, known = driver.step + 1, len(prompt) + 9
            driver.admit(
                0, prompt, output=tuple(output), epoch=epoch, limit=len(prompt) + LENGTH,
                sampling=sampling,
            )  # fmt: skip
            done = driver.prefill(0, 0, known, epoch=epoch)
            got = output + list(done.entries[0].result.tokens)
            while len(got) < LENGTH:
                entry = PlanEntry(0, epoch, known + 20, nodes=1)
                got += driver.decode(entry).entries[0].result.tokens
            assert got == want[id(prompt)]
            driver.send(lambda n, e=epoch: Release(n, 0, e))  # type: ignore[misc]


def test_stop_ids_and_min_tokens_within_an_accepted_run(driver: Driver[ModelRunner]) -> None:
    want = plain(driver)
    prompt = PROMPTS[1]
    full = want[id(prompt)]
    index = next(i for i in range(4, LENGTH) if full[i] not in full[:i])
    for trees in (None, chain(want), oracle(want, misses=0.0)):
        request = Request(prompt)
        generate(driver, [request], trees, stop=(full[index],))
        assert request.got == full[: index + 1]
        assert request.finish is Finish.STOP
    banned = {}
    for trees in (None, oracle(want, misses=0.0)):
        request = Request(prompt)
        generate(driver, [request], trees, stop=(full[2], full[index]), min_tokens=index + 1)
        banned[trees is None] = request.got
        assert not {full[2], full[index]} & set(request.got[: index + 1])
    assert banned[True] == banned[False]


def test_near_the_window(llama: Pair) -> None:
    driver = Driver(load(llama, max_model_len=40))
    prompt = PROMPTS[1]
    want = {id(prompt): hf_greedy(llama.target, prompt, 3) + [1] * 8}
    for trees in (None, chain(want), noise):
        request = Request(prompt)
        generate(driver, [request], trees, count=3)
        assert request.got == want[id(prompt)][:3] and request.finish is Finish.LIMIT
    driver.check()
    driver.engine.stop()
    assert not driver.failure


def test_logprobs_are_the_target_s_own(driver: Driver[ModelRunner], llama: Pair) -> None:
    want = plain(driver)
    model = hf_model(llama.target)
    sampling = SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.5)
    for trees in (None, oracle(want)):
        for request in fresh():
            generate(driver, [request], trees, sampling=sampling, logprobs=3)
            ids = torch.tensor([request.prompt + request.got])
            with torch.inference_mode():
                rows = model(ids).logits[0, len(request.prompt) - 1 : -1].double().log_softmax(-1)
            assert len(request.logprobs) == len(request.got)
            for row, token, said in zip(rows, request.got, request.logprobs, strict=True):
                assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
                best = row.topk(3)
                assert [t for t, _ in said.top] == best.indices.tolist()
                assert [v for _, v in said.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_features_are_those_of_the_committed_tokens(pair: Pair) -> None:
    """After trees with rejected nodes every published row is the projected taps of its token."""
    driver = Driver(load(pair))
    want = plain(driver)
    request = Request(PROMPTS[1])
    generate(driver, [request], oracle(want), chunk=10)
    rows: dict[int, torch.Tensor] = {}
    for message in driver.ends[-1].messages:
        width = driver.runner.spec.feature_width
        values = torch.frombuffer(bytearray(message.rows) or bytearray(4), dtype=torch.float32)
        taken = 0
        for record in message.records:
            for i in range(record.count):
                rows[record.first_row + i] = values[taken * width : (taken + 1) * width]
                taken += 1
    ids = request.prompt + request.got
    assert sorted(rows) == list(range(len(ids) - 1))
    expected = reference_features(pair, ids)
    got = torch.stack([rows[i] for i in range(len(ids) - 1)])
    torch.testing.assert_close(got, expected[:-1], rtol=1e-4, atol=1e-4)
    driver.engine.stop()


def reference_features(pair: Pair, ids: list[int]) -> torch.Tensor:
    """hidden_norm(fc(outputs of layers 0 and 2)) by transformers and plain torch."""
    from safetensors.torch import load_file

    with torch.inference_mode():
        out = hf_model(pair.target)(torch.tensor([ids]), output_hidden_states=True)
    states = torch.cat([out.hidden_states[i + 1][0] for i in (0, 2)], -1)
    weights = load_file(pair.draft / "model.safetensors")
    projected = states @ weights["fc.weight"].T
    scale = projected.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    return projected * scale * weights["hidden_norm.weight"]


def test_without_a_head_nothing_is_kept_or_published(llama: Pair) -> None:
    runner = load(llama, draft="none")
    assert (runner.spec.feature_width, runner.spec.fingerprints) == (0, {})
    driver = Driver(runner)
    assert generate(driver, [Request(PROMPTS[0])])[0] == hf_greedy(llama.target, PROMPTS[0])
    driver.check()
    driver.engine.stop()


def test_spec_and_measured_costs(llama: Pair) -> None:
    runner = load(llama, pages=None, slots=3, max_model_len=None)
    spec = runner.spec
    assert (spec.vocab_size, spec.max_model_len, spec.slots) == (VOCAB, 512, 3)
    assert spec.pages == 3 * -(-(512 + 256) // 8)
    assert set(spec.fingerprints) == {"fc", "hidden_norm", "embedding", "lm_head"}
    assert spec.eos_ids == (2,) and spec.feature_dtype == spec.dtype == "float32"
    costs = {(c.slots, c.rows): c.ns for c in measure(runner, budget_s=1.0)}
    assert (1, 1) in costs
    assert all(ns > 0 for ns in costs.values())
    assert runner._slots == {}


def test_what_cannot_be_served_is_named(tmp_path: Path, llama: Pair) -> None:
    for fields, text in (
        ({"max_model_len": 513}, "--max-model-len: 513"),
        ({"draft": str(tmp_path)}, "config.json"),
        ({"model": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(llama, **fields)
    other = make_pair(tmp_path / "other", draft_config={"num_target_layers": 7})
    with pytest.raises(PairError, match="7 layers, this one has 4"):
        load(other)
