"""What a GPU must offer, decided on facts that a test makes up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from services.draft.settings import DraftSettings
from services.target.loading import _Choices
from services.target.settings import TargetSettings
from slipstream import accelerator
from slipstream.accelerator import Card, Facts, Place, describe_gpu, find_place
from slipstream.errors import ConfigError
from slipstream.models.budget import CONTEXT, USABLE
from slipstream.settings import ProcessSettings, parse

GIB = 1 << 30
CARD = Card("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
FACTS = Facts("13.0", 2, CARD, "580.95.05", "3.6.0", "0.6.8.post1", "/usr/bin/gcc")


def seen(facts: Facts) -> accelerator.Look:
    return lambda index: facts if index < facts.count else replace(facts, card=None)


@pytest.mark.parametrize(
    ("facts", "device", "said"),
    [
        (replace(FACTS, cuda=None), "cuda", "--device: cuda: this torch .* without CUDA"),
        (replace(FACTS, count=0, card=None), "cuda", "no GPU can be used .driver 580.95.05, torch"),
        (Facts("13.0"), "cuda:0", "--device: cuda:0: no GPU can be used .no NVIDIA driver"),
        (FACTS, "cuda:2", "--device: cuda:2: there are 2 GPUs"),
        (
            replace(FACTS, card=replace(CARD, name="Tesla T4", capability=(7, 5))),
            "cuda",
            "Tesla T4 has compute capability 7.5, 8.0 is needed",
        ),
        (replace(FACTS, card=replace(CARD, bf16=False)), "cuda", "bfloat16; use --dtype float32"),
        (replace(FACTS, triton=None), "cuda", "triton is not installed, 3.6 or newer"),
        (replace(FACTS, compiler=None), "cuda", "triton needs a C compiler: install gcc"),
        (replace(FACTS, triton="3.5.1"), "cuda:1", "--device: cuda:1: triton 3.5.1 is too old"),
    ],
)
def test_what_a_card_lacks_is_named(facts: Facts, device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_place(device, look=seen(facts))


def test_a_card_that_has_everything() -> None:
    place = find_place("cuda:1", look=seen(FACTS))
    assert (place.device, place.dtype, place.total) == ("cuda:1", torch.bfloat16, 140 * GIB)
    assert place.share == pytest.approx(USABLE * 139 / 140)
    assert place.on_gpu
    exact = find_place("cuda", "float32", 0.25, look=seen(FACTS))
    assert (exact.device, exact.dtype, exact.share) == ("cuda:0", torch.float32, 0.25)
    fp32_only = replace(FACTS, card=replace(CARD, bf16=False), triton="3.10.0+git1")
    assert find_place("cuda", "float32", look=seen(fp32_only)).on_gpu


def test_auto_takes_a_gpu_that_can_be_used(caplog: pytest.LogCaptureFixture) -> None:
    assert find_place("auto", look=seen(FACTS)).device == "cuda:0"
    for facts in (Facts(), Facts("13.0")):
        assert find_place("auto", look=seen(facts)).device == "cpu"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        place = find_place("auto", look=seen(replace(FACTS, triton=None)))
    assert (place.device, place.share, place.total) == ("cpu", 0.0, 0)
    assert "computing on the CPU" in caplog.text and "triton is not installed" in caplog.text


def test_a_cpu_is_not_asked_about_gpus() -> None:
    def look(index: int) -> Facts:
        raise AssertionError(index)

    assert find_place("cpu", "float32", look=look) == Place("cpu", torch.float32)


def test_memory_of_a_cpu_is_not_shared() -> None:
    with pytest.raises(ConfigError, match="--memory-share: 0.5 needs a GPU, --device cpu"):
        find_place("cpu", share=0.5, look=seen(FACTS))
    with pytest.raises(ConfigError, match="--memory-share: 0.5 needs a GPU, --device auto"):
        find_place("auto", share=0.5, look=seen(Facts()))


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "PATIENCE_S", 0.0)


@pytest.mark.usefixtures("no_patience")
def test_memory_that_another_holds_is_told() -> None:
    facts = replace(FACTS, card=replace(CARD, free=60 * GIB))
    said = r"--memory-share: 0.8 of NVIDIA H200 \(cuda\) is 112.0 GiB, 60.0 GiB of 140.0 GiB"
    with pytest.raises(ConfigError, match=said):
        find_place("cuda", share=0.8, look=seen(facts))
    own = replace(FACTS, card=replace(CARD, free=112 * GIB - CONTEXT))
    assert find_place("cuda", share=0.8, look=seen(own)).share == 0.8


def test_memory_of_a_process_that_just_died_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator.time, "sleep", lambda seconds: None)
    free: Iterator[int] = iter([10 * GIB, 20 * GIB, 139 * GIB])
    place = find_place(
        "cuda", share=0.8, look=lambda index: replace(FACTS, card=replace(CARD, free=next(free)))
    )
    assert place.share == 0.8
    assert not list(free)


def test_running_out_of_memory_names_the_share() -> None:
    place = Place("cuda:0", torch.bfloat16, 140 * GIB, 0.25)
    said = r"--memory-share: 0.25 of 140.0 GiB on cuda:0 is not enough: CUDA out of memory"
    with pytest.raises(ConfigError, match=said), accelerator.memory_errors(place):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")


def test_describe_names_card_and_software() -> None:
    found = describe_gpu(look=seen(FACTS))
    assert found == {
        "name": "NVIDIA H200",
        "capability": "9.0",
        "memory_bytes": 140 * GIB,
        "count": 2,
        "driver": "580.95.05",
        "versions": {"cuda": "13.0", "triton": "3.6.0", "flashinfer": "0.6.8.post1"},
    }
    assert describe_gpu(2, look=seen(FACTS)) is None


def choices(*argv: str, facts: Facts = FACTS) -> _Choices:
    settings = parse(TargetSettings, ["--model=m", *argv])
    return _Choices.make(settings, seen(facts))


def test_backends_of_a_gpu() -> None:
    auto = choices("--device=cuda")
    assert (auto.decode, auto.prefill) == ("triton", "triton")
    asked = choices("--device=cuda", "--prefill-attention-backend=flashinfer")
    assert (asked.decode, asked.prefill) == ("triton", "flashinfer")
    plain = choices("--device=cuda", "--attention-backend=torch")
    assert (plain.decode, plain.prefill) == ("torch", "torch")
    mixed = choices("--device=cuda", "--prefill-attention-backend=torch")
    assert (mixed.decode, mixed.prefill) == ("triton", "torch")


def test_backends_of_a_cpu() -> None:
    auto = choices("--device=cpu")
    assert (auto.decode, auto.prefill, auto.place.on_gpu) == ("torch", "torch", False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--device=cuda", "--dtype=float32", "--prefill-attention-backend=flashinfer"],
            "--prefill-attention-backend: flashinfer has no float32",
        ),
        (
            [
                "--device=cuda",
                "--attention-backend=torch",
                "--prefill-attention-backend=triton",
            ],
            "--prefill-attention-backend: triton goes with --attention-backend triton",
        ),
        (["--device=cpu", "--attention-backend=triton"], "--attention-backend: triton needs a GPU"),
        (
            ["--device=cpu", "--prefill-attention-backend=flashinfer"],
            "--prefill-attention-backend: flashinfer needs a GPU",
        ),
    ],
)
def test_backends_that_cannot_be(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choices(*argv)


@pytest.mark.parametrize("version", [None, "0.5.3"])
def test_flashinfer_is_missed_when_asked_for(version: str | None) -> None:
    with pytest.raises(ConfigError, match="flashinfer: .*flashinfer-python 0.6 or newer"):
        choices(
            "--device=cuda",
            "--prefill-attention-backend=flashinfer",
            facts=replace(FACTS, flashinfer=version),
        )


def test_rows_of_a_step_by_device() -> None:
    cpu, gpu = choices("--device=cpu"), choices("--device=cuda", "--slots=4")
    assert (cpu.prefill_rows, gpu.prefill_rows, gpu.decode_rows) == (512, 2048, 1024)
    given = choices("--device=cuda", "--max-prefill-rows=77", "--max-decode-rows=300")
    assert (given.prefill_rows, given.decode_rows) == (77, 300)
    assert choices("--device=cuda").decode_rows == 2048


@pytest.mark.parametrize("cls", [TargetSettings, DraftSettings])
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--device=tpu", "--device: .*got 'tpu'"),
        ("--device=cuda:", "--device: .*got 'cuda:'"),
        ("--memory-share=0", "--memory-share: .*got '0'"),
        ("--memory-share=0.99", "--memory-share: .*got '0.99'"),
        ("--attention-backend=flash", "--attention-backend: .*got 'flash'"),
    ],
)
def test_bad_flags_are_named(cls: type[ProcessSettings], flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(cls, ["--model=m", "--draft=d", flag])


def test_a_decode_graph_holds_a_whole_tree() -> None:
    with pytest.raises(ConfigError, match="--max-decode-rows: .*got '255'"):
        parse(TargetSettings, ["--model=m", "--max-decode-rows=255"])


def test_graphs_can_be_switched_off() -> None:
    settings = parse(DraftSettings, ["--model=m", "--draft=d", "--no-cuda-graphs"])
    assert not settings.cuda_graphs
    assert parse(TargetSettings, ["--model=m"]).cuda_graphs
