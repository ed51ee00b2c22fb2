"""Both runners in one process, events in place of flags: they draft, verify, and go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.split_summary import summary
from benchmarks.step_together import together
from services.draft.device_runner import DeviceRunner as DraftRunner
from services.draft.device_step import StepSizes
from services.target.device_loading import device_runner, share
from services.target.device_runner import DeviceRunner as TargetRunner
from services.target.kv_cache import KVCache
from services.target.runner import TargetSpec
from slipstream.layers.graphs import Graphs
from slipstream.models import CausalLM, ContextProjector, DraftHead
from slipstream.tree import resolve_spec
from tests.kernels.test_draft_device import B, spec_of
from tests.tiny import Pair, make_pair

SLOTS, MAX_LEN, CONTEXT = 3, 48, 11
STEPS = 12 if torch.cuda.is_available() else 2  # interpreted, one takes seconds


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen3", block_size=B)


@pytest.fixture(scope="module")
def target(pair: Pair, device: torch.device) -> Iterator[TargetRunner]:
    model = CausalLM.load(pair.target, torch.float32, device)
    projector = ContextProjector.load(pair.draft, torch.float32, device)
    config, width = model.config, projector.config.hidden_size
    spec = TargetSpec(
        model="tiny", vocab_size=config.vocab_size, max_model_len=MAX_LEN, slots=SLOTS,
        pages=SLOTS * 38, page_size=8, max_nodes=256, max_prefill_rows=8, feature_width=width,
        most_commits=B,
    )  # fmt: skip
    shared = share(spec, device)
    cache = KVCache(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        pages=spec.pages, page_size=8, dtype=torch.float32, feature_width=width,
        feature_dtype=torch.float32, device=device, features=shared.features,
    )  # fmt: skip
    backend = "triton" if device.type == "cuda" else "torch"
    yield device_runner(
        model, projector, spec, cache, device=device, decode_rows=64, attention=backend,
        prefill_attention=backend, shared=shared,
    )  # fmt: skip
    shared.close()


@pytest.fixture(scope="module")
def draft(pair: Pair, device: torch.device) -> DraftRunner:
    head = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    graphs = Graphs(device)
    spec = spec_of(head)
    return DraftRunner(
        head,
        spec,
        max_len=MAX_LEN,
        graphs=graphs,
        attention="triton" if graphs.enabled else "torch",
        sizes=StepSizes.of(spec, rows=2 * B, write_rows=8),
        mapper="nobody maps",
    )


@pytest.mark.parametrize(
    ("tree", "batch"),
    [
        pytest.param(resolve_spec("chain", block_size=B), 1, marks=pytest.mark.slow),
        pytest.param(resolve_spec("top2gap", 4, 12, block_size=B), 2, marks=pytest.mark.gpu),
    ],
)
def test_steps_go_on(target: TargetRunner, draft: DraftRunner, tree: object, batch: int) -> None:
    with together(target, draft, tree, batch, CONTEXT) as run:  # type: ignore[arg-type]
        steps = run.run(STEPS)
        assert all(slot.live for slot in run.session.slots.values())
    assert [step.number - steps[0].number for step in steps] == list(range(STEPS))
    assert all(step.nodes > batch for step in steps), "trees came"
    assert all(step.tokens >= batch for step in steps)
    if target._step.device.type == "cuda":
        found = summary(steps)
        assert found["round_trip"]["p50"] > 0
        assert found["drafted"]["p50"] > 0
