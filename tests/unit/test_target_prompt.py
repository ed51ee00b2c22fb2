"""Log-probabilities of prompts: those of transformers, whatever the chunks; scoring alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.target.commands import Outcome, PlanEntry, Release
from services.target.model_runner import ModelRunner
from services.target.runner import Finish
from slipstream.v1 import common_pb2 as pb
from tests.fakes.target_driver import Driver
from tests.tiny import Pair, make_pair
from tests.unit.target_model_rig import PROMPTS, VOCAB, Request, fresh, generate, load, noise


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB)


@pytest.fixture
def driver(pair: Pair) -> Iterator[Driver[ModelRunner]]:
    made = Driver(load(pair))
    yield made
    made.check()
    made.engine.stop()
    assert not made.failure


@pytest.fixture(scope="module")
def reference(pair: Pair) -> list[torch.Tensor]:
    """Log-softmax rows of each prompt by transformers."""
    return [log_softmax(pair.target, prompt) for prompt in PROMPTS]


def log_softmax(folder: Path, prompt: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)


def check(request: Request, rows: torch.Tensor, top: int) -> None:
    assert len(request.prompt_logprobs) == len(request.prompt) - 1
    for row, token, said in zip(rows, request.prompt[1:], request.prompt_logprobs, strict=False):
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(top)
        assert [t for t, _ in said.top] == best.indices.tolist()
        assert [v for _, v in said.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert dict(said.top).get(token, said.logprob) == said.logprob


@pytest.mark.parametrize("chunk", [1, 5, 36, 64])
@pytest.mark.parametrize("drafted", [False, True])
def test_prompt_logprobs(
    driver: Driver[ModelRunner], reference: list[torch.Tensor], chunk: int, drafted: bool
) -> None:
    plain, requests = fresh(), fresh()
    want = generate(driver, plain)
    trees = noise if drafted else None
    assert generate(driver, requests, trees, chunk=chunk, prompt_logprobs=4) == want
    for request, rows in zip(requests, reference, strict=True):
        check(request, rows, 4)
    assert not any(request.prompt_logprobs for request in plain)


@pytest.mark.parametrize("chunk", [7, 64])
def test_scoring_alone_draws_nothing(
    driver: Driver[ModelRunner], reference: list[torch.Tensor], chunk: int
) -> None:
    requests = fresh()
    generate(driver, requests, chunk=chunk, prompt_logprobs=0, count=0)
    for request, rows in zip(requests, reference, strict=True):
        assert (request.got, request.finish) == ([], Finish.LIMIT)
        own = [said.logprob for said in request.prompt_logprobs]
        wanted = rows[:-1].gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0]
        assert own == pytest.approx(wanted.tolist(), abs=1e-4)
        assert all(said.top == [] for said in request.prompt_logprobs)


def test_a_scored_request_is_padding_until_it_is_released(driver: Driver[ModelRunner]) -> None:
    driver.admit(0, [5, 6, 7], limit=3, prompt_logprobs=1)
    done = driver.prefill(0, 0, 3).entries[0]
    assert done.result.finish is Finish.LIMIT and len(done.result.prompt_logprobs) == 2
    driver.check()
    again = driver.decode(PlanEntry(0, 1, 9, nodes=1)).entries[0]
    assert again.outcome is Outcome.PADDING
    driver.send(lambda n: Release(n, 0, 1))


def test_output_so_far_is_not_scored(driver: Driver[ModelRunner]) -> None:
    driver.admit(0, [5, 6, 7], output=(8, 9), limit=9, prompt_logprobs=1)
    first = driver.prefill(0, 0, 1, last=False).entries[0].result
    rest = driver.prefill(0, 1, 4).entries[0].result
    assert (len(first.prompt_logprobs), len(rest.prompt_logprobs)) == (1, 1)
    driver.send(lambda n: Release(n, 0, 1))


def test_what_may_be_wanted(driver: Driver[ModelRunner]) -> None:
    for epoch, fields in enumerate(
        ({"prompt_logprobs": 21}, {"limit": 3}, {"limit": 3, "output": (4,), "prompt_logprobs": 0})
    ):
        number = driver.admit(0, [1, 2, 3], epoch=epoch + 1, **fields)  # type: ignore[arg-type]
        code = pb.REJECT_CODE_BAD_VALUE if epoch == 0 else pb.REJECT_CODE_LENGTH
        driver.rejected(number, code)
