"""After READY no kernel is compiled and none is loaded, whatever length a prompt has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from services.target.device_runner import DeviceRunner
from services.target.runner import FeatureSpan, PrefillEntry, SlotAdmit, TargetRunner
from slipstream.params import SamplingParams
from tests.gpu.rig import Both, make
from tests.tiny import Pair, make_pair

pytestmark = pytest.mark.gpu

CHUNK = 512
LAZY = ("lazy", "module load")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Wide enough heads for every backend."""
    wide = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64}
    return make_pair(
        tmp_path_factory.mktemp("pair"), "llama", target_config=wide, draft_config=wide
    )


@contextmanager
def loads() -> Iterator[list[str]]:
    """Collects what is compiled by Triton, or loaded by anybody, while it runs."""
    import triton

    found: list[str] = []

    def loading(*args: object, **kwargs: object) -> None:
        found.append(f"triton loads {args[2] if len(args) > 2 else args}")

    hooks = triton.knobs.runtime.kernel_load_start_hook
    hooks.add(loading)
    try:
        with torch.profiler.profile(acc_events=True) as profiler:
            yield found
            torch.cuda.synchronize()
        for event in profiler.events():
            if any(word in event.name.lower() for word in LAZY):
                found.append(event.name)
    finally:
        hooks.remove(loading)


def test_a_load_is_seen() -> None:
    """Otherwise the tests below would count nothing."""
    values = torch.rand(1000, device="cuda", dtype=torch.float64)
    with loads() as found:
        torch.special.bessel_j1(values)
    assert found


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float32, "triton"), (torch.bfloat16, "triton"), (torch.bfloat16, "flashinfer")],
)
def test_every_prompt_length(pair: Pair, dtype: torch.dtype, backend: str) -> None:
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    runner = make(pair, torch.device("cuda"), 4, CHUNK, dtype, backend)
    with loads() as found:
        for length in range(1, CHUNK + 1):
            serve(runner, length, length % 3)
    assert not found, f"{len(found)} loads, the first: {found[:5]}"


def serve(runner: TargetRunner, length: int, kind: int) -> None:
    """A request of each kind of sampling: its prompt, a tree, a chain, plain decode."""
    sampling = (
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=length, top_k=20),
        SamplingParams(temperature=1.0, seed=length, frequency_penalty=0.5, logit_bias={5: 2.0}),
    )[kind]
    assert isinstance(runner, DeviceRunner)
    both = Both(runner, runner)
    request = SlotAdmit(
        [(11 * i) % 300 for i in range(length)], (), length + 64, 1, frozenset((3,)), sampling,
        kind or None, True,
    )  # fmt: skip
    runner.admit(0, request)
    first = length // 2
    pages = both.pages(0)
    if first:
        runner.prefill([PrefillEntry(0, 0, first, False, pages)])
    result = runner.prefill([PrefillEntry(0, first, length - first, True, pages)])[0]
    runner.features([FeatureSpan(0, 0, length)])
    both.tokens[0] = [*request.prompt_ids, *result.tokens]
    for nodes, tree in ((9, True), (6, False), (1, False)):
        if len(both.tokens[0]) + 16 < length + 64:
            both.tokens[0] += runner.decode([both.entry(0, nodes, tree)])[0].tokens
    runner.release(0)
