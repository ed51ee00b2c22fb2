"""A target's engine over its real runner, with a draft that the caller plays by the flags."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from services.target.commands import (
    Attach,
    Attached,
    Detach,
    Event,
    PlanEntry,
    Release,
    StepDone,
    StepKind,
)
from services.target.device_loading import device_runner, table_pages
from services.target.device_runner import DeviceRunner
from services.target.kv_cache import KVCache
from slipstream.handoff.cuda_ipc import CudaTargetEnd, Export
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.layout import Flag, Layout, ring_entry
from slipstream.models import CausalLM, ContextProjector
from slipstream.params import SamplingParams
from tests.fakes.target_driver import WAIT_S, Driver
from tests.gpu.rig import PAGE_SIZE, spec_of
from tests.gpu.watch import Watch
from tests.tiny import Pair

SLOTS = 8
NODES = 4
LONG = 1e6
PATIENT = Times(stale=LONG, first_beat=LONG, lease=LONG, unmeasured=LONG)
"""No watchdog fires: what is parked stays so until the test says otherwise."""

RUNNER_CALLS = (
    "admit", "release", "start_prefill", "start_decode", "rewind", "rewind_all", "at_rest",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a request asks for beside its prompt."""

    sampling: SamplingParams = SamplingParams()
    stop: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None


KINDS = (
    Kind(),
    Kind(SamplingParams(presence_penalty=0.5, repetition_penalty=1.2)),
    Kind(stop=(299, 298), min_tokens=3),
    Kind(SamplingParams(temperature=0.8, seed=11, top_p=0.9)),
    Kind(SamplingParams(logit_bias={5: 2.0, 7: -3.0}, frequency_penalty=0.4), logprobs=2),
    Kind(SamplingParams(temperature=1.0, seed=5, top_k=20), stop=(297,)),
    Kind(logprobs=1),
    Kind(SamplingParams(banned_ids=frozenset((4, 6)), min_p=0.05, temperature=0.7, seed=3)),
)


def prompt_of(slot: int) -> list[int]:
    return [(7 * slot + 13 * i) % 250 + 20 for i in range(6 + slot)]


@dataclass
class Target:
    """The engine, what it said, and the tokens of every slot so far.

    Attributes:
        end: of the session, once there is one.
    """

    pair: Pair
    device: torch.device
    watch: Watch = field(default_factory=Watch)
    got: dict[int, list[int]] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    dones: dict[int, StepDone] = field(default_factory=dict)
    end: CudaTargetEnd | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        self.runner, self.export = _runner(self.pair, self.device)
        self.watch.wrap(self.runner, *RUNNER_CALLS)
        self.driver = Driver(self.runner)
        engine = self.driver.engine
        handle = self.watch.timed(engine._handle, lambda item: f"engine {type(item).__name__}")
        engine._handle = handle  # type: ignore[method-assign]
        self.lane = self._lane()
        self.driver.connector.answer = self._answer
        cuda = self.device.type == "cuda"
        self.side = torch.cuda.Stream(self.device) if cuda else None
        heads, nodes = self.export.heads[0].shape, (NODES * SLOTS, 2)
        self._heads = torch.zeros(heads, dtype=torch.int64, pin_memory=cuda)
        self._nodes = torch.zeros(nodes, dtype=torch.int32, pin_memory=cuda)

    def _lane(self) -> Lane:
        lane = self.export.pool.take()
        assert lane is not None
        return lane

    def _answer(self, session: int) -> CudaTargetEnd:
        first = self.driver.connector.calls[-1][1]
        self.lane.reset(first - 1)
        self.end = CudaTargetEnd(session, first, self.export, self.lane, lambda reason: None)
        return self.end

    def attach(self, session: int) -> None:
        first = self.driver.step + 1
        self.driver.send(lambda n: Attach(n, session, first, "draft:1"))
        assert self.event() == Attached(session, "cuda_ipc")

    def detach(self, session: int) -> None:
        self.driver.send(lambda n: Detach(n, session, "enough"))

    def admit(self, slot: int) -> None:
        self.epoch += 1
        self.epochs[slot], self.got[slot], self.accepted[slot] = self.epoch, [], 0
        kind, prompt = KINDS[slot], prompt_of(slot)
        self.driver.admit(
            slot, prompt, epoch=self.epoch, limit=len(prompt) + 60, stop=kind.stop,
            min_tokens=kind.min_tokens, sampling=kind.sampling, logprobs=kind.logprobs,
        )  # fmt: skip

    def release(self, slot: int) -> None:
        epoch = self.epochs[slot]
        self.driver.send(lambda n: Release(n, slot, epoch))

    def prefill(self, slots: Sequence[int], session: int = 0) -> int:
        entries = [
            PlanEntry(s, self.epochs[s], len(prompt_of(s)), count=len(prompt_of(s)), last=True)
            for s in slots
        ]
        self.driver.plan(StepKind.PREFILL, *entries, session=session)
        return self.driver.step

    def decode(self, slots: Sequence[int], nodes: int = 1, session: int = 0) -> int:
        entries = [PlanEntry(s, self.epochs[s], len(prompt_of(s)) + 64, nodes=nodes) for s in slots]
        self.driver.plan(StepKind.DECODE, *entries, session=session)
        return self.driver.step

    def event(self) -> Event:
        return self.driver.events.get(timeout=WAIT_S)

    def done(self, step: int) -> StepDone:
        """Waits for a step's word, which must be the next that is said."""
        event = self.event()
        assert isinstance(event, StepDone) and event.step == step, event
        for entry in event.entries:
            self.got[entry.slot] += entry.result.tokens
            self.accepted[entry.slot] += entry.result.accepted
        return event

    def silent(self, seconds: float = 0.05) -> bool:
        """Whether nothing is said for so long."""
        try:
            self.driver.events.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def propose(self, step: int, slots: Sequence[int], wanted: dict[int, list[int]]) -> None:
        """A chain of the tokens that plain decoding will give, for a step whose slots are these."""
        entry, memory = ring_entry(self.lane.which, step), self.export
        heads, nodes = self._heads[: 1 + len(slots)], self._nodes[: NODES * len(slots)]
        heads[0, :2] = torch.tensor([step, len(slots)])
        for index, slot in enumerate(slots):
            at = len(self.got[slot]) - 1
            chain = wanted[slot][at : at + NODES]
            heads[1 + index, :3] = torch.tensor([slot, self.epochs[slot], len(chain)])
            rows = [[token, parent - 1] for parent, token in enumerate(chain)]
            nodes[NODES * index : NODES * index + len(chain)] = torch.tensor(rows)
        with self.on_side():
            memory.heads[entry, : len(heads)].copy_(heads, non_blocking=True)
            memory.nodes[entry, : len(nodes)].copy_(nodes, non_blocking=True)

    @contextmanager
    def on_side(self) -> Iterator[None]:
        """A stream that nothing of the target is on; it is through at the end."""
        if self.side is None:
            yield
            return
        with torch.cuda.stream(self.side):
            yield
        self.side.synchronize()

    def give(self, step: int) -> None:
        """Says, as the draft's stream would, that the proposal of `step` is there."""
        self.lane.store(Flag.CONSUMED, step - 1)
        self.lane.store(Flag.PLANNED, step)
        self.lane.store(Flag.PROPOSAL, step)

    @property
    def parked(self) -> bool:
        """Whether nothing is said, and the step stream has work that it cannot do yet.

        On a CPU nothing can be parked but the engine itself, so the answer is yes.
        """
        stream = self.runner._step.graphs.stream
        return stream is None or (self.silent() and not stream.query())

    def plain(self) -> dict[int, list[int]]:
        """Tokens of every request without a draft."""
        for slot in range(SLOTS):
            self.admit(slot)
        self.done(self.prefill(range(SLOTS)))
        for _ in range(2 * NODES):
            self.done(self.decode(range(SLOTS)))
        for slot in range(SLOTS):
            self.release(slot)
        return {slot: list(tokens) for slot, tokens in self.got.items()}

    def close(self) -> None:
        self.lane.store(Flag.PROPOSAL, 1 << 62)
        self.lane.store(Flag.CONSUMED, 1 << 62)
        self.driver.engine.stop()
        assert self.end is None or until(lambda: self.end is None or self.end.drained)
        self.export.close()
        assert not self.driver.failure, self.driver.failure


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether it is true within the time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _runner(pair: Pair, device: torch.device) -> tuple[DeviceRunner, Export]:
    """As `services.target.loading` makes it, with a patient export."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    model = CausalLM.load(pair.target, torch.float32, device)
    projector = ContextProjector.load(pair.draft, torch.float32, device)
    config, width = model.config, projector.config.hidden_size
    spec = spec_of(config.vocab_size, width, SLOTS, 128)
    layout = Layout(SLOTS, spec.pages, PAGE_SIZE, table_pages(spec), width, "float32")
    export = Export.create(layout, device, PATIENT)
    cache = KVCache(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        pages=spec.pages, page_size=PAGE_SIZE, dtype=torch.float32, feature_width=width,
        feature_dtype=torch.float32, device=device, features=export.features,
    )  # fmt: skip
    more: dict[str, Any] = {"attention": "triton"} if device.type == "cuda" else {}
    runner = device_runner(
        model, projector, spec, cache, device=device, decode_rows=64, shared=export, **more
    )
    return runner, export
