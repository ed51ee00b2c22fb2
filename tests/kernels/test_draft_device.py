"""The device runner drafts what the plain runner drafts, step after step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from services.draft import warmup
from services.draft.device_runner import DeviceContext, DeviceRunner
from services.draft.device_step import DraftStep, StepSizes
from services.draft.model_runner import ModelContext, ModelRunner
from services.draft.runner import ContextRows, DraftEntry, Drafting, DraftSpec, NoPages
from slipstream.layers.graphs import Graphs
from slipstream.models import DraftHead
from slipstream.tree import Tree, resolve_spec
from tests.tiny import MASK, Pair, make_pair

ROUNDING, TRIALS = 1e-5, 200

B = 5
SLOTS, PAGES, PAGE_SIZE, MAX_LEN = 5, 40, 4, 60
WIDTH = 48
CHAIN = Drafting(resolve_spec("chain", block_size=B))
TREES = {
    "top2gap": Drafting(resolve_spec("top2gap", 4, 24, block_size=B)),
    "accum_logp": Drafting(resolve_spec("accum_logp", 3, 16, block_size=B, spine=False)),
    "best_first": Drafting(resolve_spec("best_first", None, 40, block_size=B)),
    "wide": Drafting(resolve_spec("best_first", 70, 100, block_size=B, spine=False)),
    "noisy": Drafting(resolve_spec("top2gap", 4, 24, block_size=B), 0.8, 2**63 + 5, 1),
    "noisy_chain": Drafting(resolve_spec("chain", block_size=B), 1.0, 77),
}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "jetspec": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "scaled": {
        "input_embedding_scale": 1.5,
        "attention_value_scale": 0.7,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 2.0,
    }
}


def pair_of(folder: Path, kind: str) -> Pair:
    head = "jetspec" if kind == "jetspec" else "dflash"
    config = dict(KINDS.get(kind, {}))
    if kind in SECTIONS:
        config["dflash_config"] = {
            "causal_head": False,
            "mask_token_id": MASK,
            "target_layer_ids": [0, 2],
            **SECTIONS[kind],
        }
    return make_pair(folder, "llama", head, block_size=B, draft_config=config)


def spec_of(head: DraftHead, slots: int = SLOTS, pages: int = PAGES) -> DraftSpec:
    config = head.config
    return DraftSpec(
        model="tiny",
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        causal=config.all_causal,
        vocab_size=config.vocab_size,
        feature_width=config.hidden_size,
        feature_dtype="float32",
        slots=slots,
        pages=pages,
        page_size=PAGE_SIZE,
    )


def device_runner(
    pair: Pair, device: torch.device, attention: str = "triton", **more: Any
) -> DeviceRunner:
    """Passes hold two blocks and eight context rows: steps and messages are cut."""
    head = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    spec = spec_of(head, **more)
    return DeviceRunner(
        head,
        spec,
        max_len=MAX_LEN,
        graphs=Graphs(device, enabled=attention == "triton"),
        sessions=2,
        attention=attention,
        sizes=StepSizes.of(spec, rows=2 * B, write_rows=8),
    )


def plain_runner(pair: Pair) -> ModelRunner:
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    return ModelRunner(head, spec_of(head), 2)


@dataclass(slots=True)
class Twins:
    """The same calls to both contexts."""

    plain: ModelContext
    device: DeviceContext
    rng: random.Random
    rows: dict[int, int] = field(default_factory=dict)

    def admit(self, slot: int, drafting: Drafting, rows: int) -> None:
        for context in (self.plain, self.device):
            context.admit(slot, drafting)
        self.rows[slot] = 0
        self.write({slot: rows})

    def write(self, counts: dict[int, int]) -> None:
        parts = []
        for slot, count in counts.items():
            seed = self.rng.randrange(2**31)
            features = np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)
            raw = memoryview(features.tobytes())
            parts.append(ContextRows(slot, self.rows[slot], count, raw))
            self.rows[slot] += count
            for context in (self.plain, self.device):
                context.reserve(slot, self.rows[slot])
        for context in (self.plain, self.device):
            context.write(parts)

    def release(self, slot: int) -> None:
        del self.rows[slot]
        for context in (self.plain, self.device):
            context.release(slot)

    def check(self, nodes: dict[int, int]) -> list[Tree]:
        entries = [
            DraftEntry(slot, self.rows[slot], self.rng.randrange(4, 320), count)
            for slot, count in nodes.items()
        ]
        want = self.plain.draft(entries)
        poison(self.device)
        got = self.device.draft(entries)
        for entry, ours, plain in zip(entries, got, want, strict=True):
            assert ours == plain or self.is_near_tie(entry, ours), (entry, ours, plain)
        return want

    def is_near_tie(self, entry: DraftEntry, tree: Tree) -> bool:
        """Whether the plain runner drafts `tree` too once its logits are off by a rounding."""
        head, generator = self.plain._head, torch.Generator(self.plain._device).manual_seed(1)
        exact = head.logits

        def rounded(hidden: Tensor) -> Tensor:
            logits = exact(hidden)
            noise = torch.randn(logits.shape, generator=generator, device=logits.device)
            return logits + ROUNDING * noise

        with mock.patch.object(head, "logits", rounded):
            return any(self.plain.draft([entry]) == [tree] for _ in range(TRIALS))


def poison(context: DeviceContext) -> None:
    """Spoils all that a step leaves behind and may not be read by the next."""
    step = context._step
    scratch = step._scratch
    with step.graphs.on_stream():
        for buffer in (
            step._hidden, step._embedded, step._mixed, step._both, step._logits, step._logprobs,
            scratch.peaks, scratch.mass,
        ):  # fmt: skip
            buffer.fill_(torch.nan)
        for buffer in (step._tokens, step._found, step._ids, scratch.chunks, scratch.keys):
            buffer.fill_(-7)
        step.result.fill_(-7)


class Runners:
    """Runners of each kind of head, made once: recording is what takes time."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.made: dict[str, tuple[ModelRunner, DeviceRunner]] = {}

    def get(self, kind: str) -> tuple[ModelRunner, DeviceRunner]:
        if kind not in self.made:
            pair = pair_of(self.folder / kind, kind)
            # Interpreted attention is slow: the kernel has its own tests, and one here.
            torch_only = self.device.type == "cpu" and kind != "sliding"
            runner = device_runner(pair, self.device, "torch" if torch_only else "triton")
            for step in runner.steps:
                with step.graphs.on_stream():
                    for pages in (step._k, step._v):
                        pages.fill_(torch.nan)  # what was never written is never read
            self.made[kind] = (plain_runner(pair), runner)
        return self.made[kind]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Runners:
    return Runners(tmp_path_factory.mktemp("heads"), device)


@pytest.fixture
def steps(device: torch.device) -> int:
    """Of every life; interpreted, a step takes a second."""
    return 1 if device.type == "cpu" else 12


@pytest.fixture
def twins(runners: Runners) -> Iterator[Callable[..., Twins]]:
    opened: list[Twins] = []

    def make(kind: str, seed: int = 0) -> Twins:
        plain, runner = runners.get(kind)
        opened.append(Twins(plain.open_context(), runner.open_context(), random.Random(seed)))
        return opened[-1]

    yield make
    for both in opened:
        both.plain.close()
        both.device.close()
        assert both.device.free_pages == PAGES


def life(both: Twins, draftings: Sequence[Drafting], steps: int) -> None:
    """Slots are admitted one by one, decode together, and one of them is replaced midway."""
    for slot, drafting in enumerate(draftings):
        both.admit(slot, drafting, both.rng.randint(1, 5))
    for step in range(steps):
        if step and step == steps // 2:
            both.release(0)
            both.admit(0, draftings[-1], 9)
        both.check({slot: both.rng.choice([2, 3, B, 16, 24, 100]) for slot in both.rows})
        both.write({slot: both.rng.randint(1, 3) for slot in both.rows})


@pytest.mark.parametrize("kind", [*KINDS, *SECTIONS])
def test_chains(kind: str, twins: Callable[..., Twins], steps: int) -> None:
    both = twins(kind)
    life(both, [CHAIN, CHAIN], steps)
    tree = both.check({0: B, 1: 3})[0]
    assert len(tree) == B and tree.is_chain


@pytest.mark.parametrize("name", list(TREES))
def test_trees(name: str, twins: Callable[..., Twins], steps: int) -> None:
    life(twins("dflash"), [TREES[name]], steps)


@pytest.mark.slow
def test_all_kinds_of_requests_together(twins: Callable[..., Twins], steps: int) -> None:
    """Five blocks are three passes of a step here; the pages of a released slot are used again."""
    names = ["top2gap", "best_first", "noisy", "noisy_chain"]
    life(twins("jetspec"), [CHAIN, *(TREES[name] for name in names)], min(6, 2 * steps))


def test_sessions_do_not_touch_each_other(runners: Runners, twins: Callable[..., Twins]) -> None:
    pairs = [twins("dflash", 1), twins("dflash", 2)]
    with pytest.raises(RuntimeError, match="every draft context is open"):
        runners.get("dflash")[1].open_context()
    for both in pairs:
        both.admit(1, TREES["top2gap"], 9)
    for both in pairs:
        both.check({1: 16})


def test_pages_run_out(tmp_path: Path, device: torch.device) -> None:
    runner = device_runner(pair_of(tmp_path, "dflash"), device, "torch", pages=20)
    context = runner.open_context()
    context.admit(0, CHAIN)
    with pytest.raises(ValueError, match="slot 0 already holds 0 pages"):
        context.admit(0, CHAIN)
    with pytest.raises(NoPages, match="17 context pages at most"):
        context.reserve(0, MAX_LEN + PAGE_SIZE)
    context.reserve(0, MAX_LEN)
    context.admit(1, CHAIN)
    with pytest.raises(NoPages, match="4 context pages are needed, 3 are free"):
        context.reserve(1, 8)
    context.release(0)
    context.reserve(1, 8)


def test_warm_up_measures_and_leaves_no_trace(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "PREFIX", 3)
    pair = pair_of(tmp_path, "dflash")
    head = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    spec = spec_of(head, slots=1)
    seen: list[tuple[int, int]] = []
    runner = DeviceRunner(
        head,
        spec,
        max_len=MAX_LEN,
        graphs=Graphs(device, enabled=False),
        attention="torch",
        sizes=StepSizes.of(spec, write_rows=4),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))
    costs = runner.warm_up(TREES["top2gap"].tree)
    assert [(cost.slots, cost.rows) for cost in costs] == [(1, B)]
    assert runner.open_context().free_pages == PAGES


def test_bytes_needed_is_what_is_taken(tmp_path: Path, device: torch.device) -> None:
    pair = pair_of(tmp_path, "dflash")
    head = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    spec = spec_of(head, pages=100_000)
    sizes = StepSizes.of(spec, write_rows=8)
    shape: dict[str, Any] = {"max_len": MAX_LEN, "dtype": torch.float32}
    step = DraftStep(
        head, spec, sizes=sizes, attention="torch", graphs=Graphs(device, enabled=False), **shape
    )
    pages = 2 * step._k.nbytes
    stated = DraftStep.bytes_needed(head.config, spec, sizes=sizes, **shape)
    assert pages < stated < 1.1 * pages


def test_recorded_work_needs_triton(tmp_path: Path, device: torch.device) -> None:
    pair = pair_of(tmp_path, "dflash")
    head = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    graphs = Graphs(device)
    graphs.enabled = True
    with pytest.raises(ValueError, match="torch waits for the device"):
        DeviceRunner(head, spec_of(head), max_len=MAX_LEN, graphs=graphs, attention="torch")
    with pytest.raises(ValueError, match="must be torch or triton, got 'fast'"):
        DeviceRunner(head, spec_of(head), max_len=MAX_LEN, graphs=graphs, attention="fast")
