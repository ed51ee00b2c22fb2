"""Target and draft of one process on one GPU, run as the two servers run: the same kernels, graphs,
streams and shared memory, and events between the two streams in place of flags.

One thread puts the draft's part of step t on its stream, then the target's, then the draft's part
of t + 1, and reads results a step late. What a split step takes beyond this is the split's price.
"""

from __future__ import annotations

import queue
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch

from benchmarks.split import Step
from services.draft.commands import Admit, Attach, Plan, PlanEntry
from services.draft.runner import DraftRunner
from services.draft.session import DevicePart, Session
from services.target.runner import (
    DecodeEntry,
    Flight,
    Link,
    LinkEntry,
    PrefillEntry,
    RunAheadRunner,
    SlotAdmit,
)
from slipstream.handoff.layout import RING
from slipstream.params import SamplingParams
from slipstream.tree import TreeSpec

SESSION = 1
SETTLE_S = 5.0
DEPTH = 1


class Events:
    """The end of the last RING steps of one kind on one stream; on a CPU nothing to wait for.

    A wait is for what was recorded when it is enqueued: whoever waits must come later.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() for _ in range(RING)] if cuda else []  # type: ignore[no-untyped-call]

    def record(self, step: int) -> None:
        """The current stream is at the end of `step`."""
        if self._events:
            self._events[step % RING].record()

    def wait(self, step: int) -> None:
        """The current stream goes on when `step` has ended."""
        if self._events:
            self._events[step % RING].wait()


class _End:
    """What both ends have: alive until `end`."""

    transport: Literal["cuda_ipc"] = "cuda_ipc"
    session = SESSION
    which = 0
    one_gpu = True

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.reason = ""

    @property
    def alive(self) -> bool:
        return not self.reason

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason


class Meeting:
    """The two ends of one session within a process."""

    def __init__(self, memory: Any) -> None:
        device = memory.features.device
        context, proposal, consumed = (Events(device) for _ in range(3))
        self.target = TogetherTargetEnd(memory, context, proposal, consumed)
        self.draft = TogetherDraftEnd(memory, context, proposal, consumed)


class TogetherTargetEnd(_End):
    """`DeviceTargetEnd`."""

    def __init__(self, memory: Any, context: Events, proposal: Events, consumed: Events) -> None:
        super().__init__(memory)
        self._context, self._proposal, self._consumed = context, proposal, consumed

    def await_proposal(self, step: int) -> None:
        self._proposal.wait(step)

    def await_room(self, step: int) -> None:
        self._consumed.wait(step - RING)

    def publish(self, step: int) -> None:
        self._context.record(step)

    def passed(self, step: int, waited_ns: int) -> None:
        """Nobody watches."""


class TogetherDraftEnd(_End):
    """`services.draft.runner.DeviceEnd`."""

    def __init__(self, memory: Any, context: Events, proposal: Events, consumed: Events) -> None:
        super().__init__(memory)
        self._context, self._proposal, self._consumed = context, proposal, consumed

    def await_context(self, step: int) -> None:
        self._context.wait(step)

    def consumed(self, step: int) -> None:
        self._consumed.record(step)

    def publish(self, step: int) -> None:
        self._proposal.record(step)

    def planned(self, step: int) -> None:
        """Nobody watches."""

    def passed(self, step: int) -> None:
        """Nobody watches."""

    def close(self) -> None:
        """There is no set to give back."""


class Together:
    """Requests that run on both runners; made by `together`."""

    def __init__(
        self, target: RunAheadRunner, draft: DraftRunner, tree: TreeSpec, nodes: int, batch: int
    ) -> None:
        self._target, self._tree, self._nodes, self._batch = target, tree, nodes, batch
        self._ends = Meeting(target.shared)
        self._notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.session = Session(Attach(1, SESSION, 1), draft)
        assert draft.devices is not None
        self._device: DevicePart = draft.devices.connect(
            self.session, self._ends.draft, self._notices.put
        )
        self.session.device, self.session.end = self._device, self._ends.draft
        target.rewind_all()
        while not target.at_rest():
            pass
        spec = target.spec
        held = min(spec.pages // spec.slots, -(-spec.max_positions // spec.page_size))
        self._pages = [range(slot * held, (slot + 1) * held) for slot in range(batch)]
        self._starts = [0] * batch
        self._step = 0
        self._flights: deque[tuple[int, int, Flight]] = deque()
        self._ended = 0

    def fill(self, context: int) -> None:
        """Admits every request and takes its prompt in."""
        spec, draw = self._target.spec, random.Random(context)
        for slot in range(self._batch):
            ids = draw.choices(range(spec.vocab_size), k=context)
            request = SlotAdmit(
                ids, (), spec.max_model_len, 0, frozenset(), SamplingParams(), None, True
            )
            self._target.admit(slot, request)
            admit = Admit(0, SESSION, slot, slot + 1, self._tree, 0.0, 0, 0)
            self.session.admit(admit, self._tree)
        for slot in range(self._batch):
            for first in range(0, context, spec.max_prefill_rows):
                count = min(spec.max_prefill_rows, context - first)
                self._prefill(slot, first, count, first + count == context)
        self._starts = [context] * self._batch

    def run(self, count: int) -> list[Step]:
        """`count` decode steps, each put on the streams before the one before it was read."""
        steps: list[Step] = []
        for _ in range(count):
            began = time.monotonic_ns()
            self._decode()
            self._flights[-1] = (self._step, time.monotonic_ns() - began, self._flights[-1][2])
            while len(self._flights) > DEPTH:
                steps.append(self._read())
        while self._flights:
            steps.append(self._read())
        return steps

    def close(self) -> None:
        """Ends the session and frees the slots; waits for the device."""
        while self._flights:
            self._flights.popleft()[2].wait()
        self._ends.target.end("over")
        self.session.close("over")
        for slot in range(self._batch):
            self._target.release(slot)

    def _prefill(self, slot: int, first: int, count: int, last: bool) -> None:
        entry = LinkEntry(slot, slot + 1, count, 0, 0, last)
        link = self._plan(False, [PlanEntry(slot, slot + 1, 1, count)], [entry])
        chunk = PrefillEntry(slot, first, count, last, self._pages[slot])
        flight = self._target.start_prefill([chunk], link)
        flight.wait()
        flight.results()
        self._settle()

    def _decode(self) -> None:
        slots, nodes = range(self._batch), self._nodes
        asked = [PlanEntry(slot, slot + 1, nodes, nodes) for slot in slots]
        entries = [LinkEntry(s, s + 1, nodes, s * nodes, s, True) for s in slots]
        link = self._plan(True, asked, entries)
        branches = not self._tree.is_chain
        rows = [
            DecodeEntry(s, self._starts[s], 0, nodes, None, self._pages[s], True, branches)
            for s in slots
        ]
        self._flights.append((self._step, 0, self._target.start_decode(rows, link)))

    def _plan(self, decode: bool, asked: Sequence[PlanEntry], entries: Sequence[LinkEntry]) -> Link:
        """Puts the draft's half of the next step on its stream; the target's part of it."""
        self._step += 1
        plan = Plan(0, self._step, SESSION, decode, tuple(asked), self._step - 1)
        refused = self._device.enqueue(plan)
        if refused:
            raise RuntimeError(f"the draft refuses {refused}")
        return Link(self._ends.target, self._step, entries, decode)

    def _read(self) -> Step:
        """The oldest step's results."""
        number, enqueued, flight = self._flights.popleft()
        flight.wait()
        seen = time.monotonic_ns()
        results, stamps = flight.results(), flight.stamps()
        self._settle()
        for slot, result in enumerate(results):
            if not result.tokens or result.finish != "none":
                raise RuntimeError(f"slot {slot} at {self._starts[slot]} ended: {result}")
            self._starts[slot] += len(result.tokens)
        before, self._ended = self._ended, stamps.ended
        return Step(
            number, tuple(range(self._batch)), self._nodes,
            sum(result.nodes for result in results),
            sum(result.accepted for result in results),
            sum(len(result.tokens) for result in results),
            0, seen, 0,
            max(stamps.began - before, 0) if before else 0,
            stamps.ended - stamps.began, 0, stamps.draft_ended - stamps.draft_began,
            stamps.began or seen, enqueued,
            stamps.began - stamps.draft_ended if stamps.draft_ended else 0,
        )  # fmt: skip

    def _settle(self) -> None:
        """Takes note of what the draft's stream did so far."""
        while True:
            try:
                notice = self._notices.get_nowait()
            except queue.Empty:
                return
            self._device.settle(notice)

    def wait_live(self) -> None:
        """Until the draft has every prompt. Raises RuntimeError."""
        deadline = time.monotonic() + SETTLE_S
        while not all(slot.live for slot in self.session.slots.values()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not live: {self.session.slots}")
            time.sleep(0.01)
            self._settle()


@contextmanager
def together(
    target: Any, draft: DraftRunner, tree: TreeSpec, batch: int, context: int
) -> Iterator[Together]:
    """`batch` requests of `context` tokens on both runners, whose slots must be free.

    Raises RuntimeError when the runners have no memory that stays on the device.
    """
    if getattr(target, "shared", None) is None or draft.devices is None:
        raise RuntimeError("no memory is shared: is cuda.bindings there, and the handoff not grpc?")
    run = Together(cast(RunAheadRunner, target), draft, tree, tree.budget, batch)
    try:
        run.fill(context)
        # The last prompt's context is taken with the plan after it.
        run.run(DEPTH + 1)
        run.wait_live()
        yield run
    finally:
        run.close()
