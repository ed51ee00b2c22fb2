"""Which GPU each server of a cell gets, and which part of its memory: machines made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from slipstream.cli import up
from slipstream.cli.up_devices import Devices, Gpu, place, visible_gpus, with_mps, with_shares
from slipstream.cli.up_settings import UpSettings, check
from slipstream.errors import ConfigError
from slipstream.settings import parse

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"
TARGET, DRAFT = str(CONFIGS / "qwen3-8b"), str(CONFIGS / "qwen3-8b-dflash-b16")
H200 = Gpu(143_771 << 20, (9, 0))
T4 = Gpu(15_360 << 20, (7, 5))


def settings(*argv: str) -> UpSettings:
    pair = [f"--target={TARGET}", f"--draft={DRAFT}"]
    return check(parse(UpSettings, ["--port=0", "--grpc-port=0", *pair, *argv]))


def devices(gpus: tuple[Gpu, ...], *argv: str) -> tuple[str, str]:
    placed = place(settings(*argv), gpus)
    return placed.target, placed.draft


def cell(gpus: tuple[Gpu, ...], *argv: str, draft: str = DRAFT) -> Devices:
    given = settings(*argv)
    return with_shares(given, place(given, gpus), gpus, TARGET, draft)


def test_a_gpu_each_or_one_for_both() -> None:
    for chosen in ([], ["--device=cuda"]):
        assert devices((H200, H200, H200), *chosen) == ("cuda:0", "cuda:1")
        assert devices((H200,), *chosen) == ("cuda:0", "cuda:0")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--device=cpu"], ("cpu", "cpu")),
        (["--device=cuda:1"], ("cuda:1", "cuda:1")),
        (["--draft-device=cuda:0"], ("cuda:1", "cuda:0")),
        (["--target-device=cuda:1"], ("cuda:1", "cuda:0")),
        (["--draft-device=cpu"], ("cuda:0", "cpu")),
        (["--target-device=cuda:0", "--draft-device=cuda:0"], ("cuda:0", "cuda:0")),
        (["--draft=none"], ("cuda:0", "")),
    ],
)
def test_what_is_named_is_taken(argv: list[str], wanted: tuple[str, str]) -> None:
    assert devices((H200, H200), *argv) == wanted


def test_auto_leaves_old_cards_and_cpu_builds_of_torch() -> None:
    assert devices((T4,)) == ("auto", "auto")
    assert devices((T4, H200)) == ("cuda:1", "cuda:1")
    assert devices((T4,), "--device=cuda") == ("cuda:0", "cuda:0")
    placed = place(settings(), (H200,), torch_has_cuda=False)
    assert (placed.target, placed.draft) == ("auto", "auto")


def test_starts_in_turn_on_one_device() -> None:
    assert place(settings(), (H200,)).in_turn
    assert place(settings(), ()).in_turn
    assert place(settings("--device=cpu"), (H200,)).in_turn
    assert not place(settings(), (H200, H200)).in_turn
    assert not place(settings("--draft-device=cpu"), (H200,)).in_turn


def test_one_gpu_is_divided() -> None:
    one = cell((H200,))
    assert one.target_share is not None and one.draft_share is not None
    assert one.target_share + one.draft_share == pytest.approx(0.92)
    assert one.tokens is not None and one.tokens > 500_000
    assert "target on cuda:0 (78" in str(one) and f"pages for {one.tokens} tokens" in str(one)
    assert cell((H200,)) == one, "a restart must be given the same"
    short = cell((H200,), "--max-model-len=4096", "--slots=4")
    assert short.tokens == 4 * (4096 + 256)
    assert short.draft_share is not None and short.draft_share < one.draft_share
    exact = cell((H200,), "--dtype=float32")
    assert exact.tokens is not None and exact.tokens < one.tokens


def test_two_gpus_are_taken_whole() -> None:
    two = cell((H200, H200))
    assert (two.target_share, two.draft_share, two.tokens) == (0.92, 0.92, None)
    assert cell((H200, H200), "--memory-share=0.5").draft_share == 0.5
    own = cell((H200, H200), "--draft-memory-share=0.1")
    assert (own.target_share, own.draft_share) == (0.92, 0.1)
    alone = cell((H200,), "--draft=none", draft="none")
    assert (alone.target_share, alone.draft_share) == (0.92, None)


def test_shares_by_hand() -> None:
    assert cell((H200,), "--draft-memory-share=0.2").target_share == 0.72
    both = cell((), "--device=cuda:0", "--target-memory-share=0.6", "--draft-memory-share=0.2")
    assert (both.target_share, both.draft_share) == (0.6, 0.2)
    less = cell((H200,), "--memory-share=0.5")
    assert less.target_share is not None and less.draft_share is not None
    assert less.target_share + less.draft_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("gpus", "argv", "said"),
    [
        ((), ["--device=cuda:0"], "cuda:0 is for target and draft, but nvidia-smi names no GPU"),
        ((H200,), ["--device=cuda:5"], "cuda:5 is for target and draft, but 1 GPU is there"),
        (
            (H200,),
            ["--target-memory-share=0.9", "--draft-memory-share=0.9"],
            "--target-memory-share: 0.9 and the draft's 0.9 of one GPU are more than 0.98 of it",
        ),
        (
            (H200,),
            ["--draft=none", "--draft-memory-share=0.3"],
            "--draft-memory-share: 0.3 needs a GPU, the draft is not started",
        ),
        ((T4,), ["--device=cuda:0"], "92% of one GPU of 15.0 GiB is too small"),
        ((H200,), ["--memory-share=0.3", "--draft-memory-share=0.4"], "leaves nothing of 0.3"),
        ((), ["--memory-share=0.3"], "--memory-share: 0.3 needs a GPU, none was found"),
    ],
)
def test_what_cannot_be_divided(gpus: tuple[Gpu, ...], argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cell(gpus, *argv)


def test_shares_reach_the_processes() -> None:
    given = settings("--attention-backend=torch", "--no-cuda-graphs", "--random-weights")
    placed = with_shares(given, place(given, (H200,)), (H200,), TARGET, DRAFT)
    commands = up.commands(given, up.PROGRAMS, TARGET, DRAFT, placed)
    assert commands.draft is not None
    target = parse(TargetSettings, commands.target[4:])
    draft = parse(DraftSettings, commands.draft[4:])
    assert (target.device, target.memory_share) == ("cuda:0", placed.target_share)
    assert (draft.device, draft.memory_share) == ("cuda:0", placed.draft_share)
    for server in (target, draft):
        assert server.attention_backend == "torch"
        assert server.random_weights and not server.cuda_graphs
    assert target.prefill_attention_backend == "auto"


NAMED = (Gpu(H200.memory, (9, 0), "GPU-a"), Gpu(H200.memory, (9, 0), "GPU-b"))


def mps(gpus: tuple[Gpu, ...], *argv: str) -> Devices:
    given = settings(*argv)
    return with_mps(given, place(given, gpus), gpus)


@pytest.mark.parametrize("argv", [[], ["--handoff=cuda_ipc"], ["--device=cuda"]])
def test_one_gpu_for_both_is_under_mps(argv: list[str]) -> None:
    one = mps(NAMED[:1], *argv)
    assert (one.mps, one.gpu, one.target, one.draft) == (True, "GPU-a", "cuda:0", "cuda:0")


def test_under_mps_the_servers_see_one_gpu_only() -> None:
    second = mps(NAMED, "--device=cuda:1")
    assert (second.gpu, second.target, second.draft) == ("GPU-b", "cuda:0", "cuda:0")
    cell = up.commands(settings(), up.PROGRAMS, TARGET, DRAFT, second)
    assert cell.server_environment == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    unknown = mps((), "--device=cuda:1")
    assert (unknown.mps, unknown.gpu, unknown.target) == (True, "", "cuda:1")
    assert not up.commands(settings(), up.PROGRAMS, TARGET, DRAFT, unknown).server_environment


@pytest.mark.parametrize(
    ("gpus", "argv"),
    [
        (NAMED[:1], ["--mps=off"]),
        (NAMED[:1], ["--handoff=grpc"]),
        (NAMED[:1], ["--draft=none"]),
        (NAMED[:1], ["--draft-device=cpu"]),
        (NAMED, []),
        ((), []),
    ],
)
def test_no_mps_otherwise(gpus: tuple[Gpu, ...], argv: list[str]) -> None:
    given = settings(*argv)
    assert mps(gpus, *argv) == place(given, gpus)


@pytest.mark.parametrize("gpus", [(), (T4,)])
def test_cuda_ipc_needs_gpus(gpus: tuple[Gpu, ...]) -> None:
    with pytest.raises(ConfigError, match="--handoff: cuda_ipc needs target and draft on NVIDIA"):
        mps(gpus, "--handoff=cuda_ipc")


def test_the_handoff_reaches_the_target() -> None:
    given = settings("--handoff=cuda_ipc")
    commands = up.commands(given, up.PROGRAMS, TARGET, DRAFT, place(given, (H200,)))
    assert parse(TargetSettings, commands.target[4:]).handoff == "cuda_ipc"
    assert parse(TargetSettings, ["--model=m"]).handoff == "auto"


def test_a_bundled_head_is_known() -> None:
    given = settings()
    smollm = CONFIGS.parents[1] / "models" / "SmolLM2-135M-Instruct-JetSpec-b16"
    placed = place(given, (H200,))
    by_name = with_shares(given, placed, (H200,), TARGET, "jetspec")
    assert by_name == with_shares(given, placed, (H200,), TARGET, str(smollm))


SMI = """0, GPU-aaaa1111, 143771, 9.0
1, GPU-bbbb2222, 15360, 7.5
2, GPU-bbbc3333, 81559, 10.0
"""


@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (None, [143771, 15360, 81559]),
        ("1,0", [15360, 143771]),
        ("GPU-bbbc3333,GPU-aaaa", [81559, 143771]),
        ("0,7,1", [143771]),
        ("GPU-bbb", []),
        ("", []),
        ("MIG-1234", []),
    ],
)
def test_what_cuda_sees(visible: str | None, memories: list[int]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = visible_gpus(lambda: SMI, environ)
    assert [gpu.memory >> 20 for gpu in found] == memories


def test_what_nvidia_smi_may_say() -> None:
    assert visible_gpus(lambda: "", {}) == ()
    assert visible_gpus(lambda: "No devices were found\n", {}) == ()
    assert visible_gpus(lambda: "0, GPU-a, [N/A], 9.0\n", {}) == ()
    assert visible_gpus(lambda: SMI, {})[2] == Gpu(81559 << 20, (10, 0), "GPU-bbbc3333")
