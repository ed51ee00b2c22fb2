"""The draft's engines over a target's memory in this process; the caller plays the target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from services.draft.commands import Admit, Detach, Detached, Live, Plan, PlanEntry, Release
from services.draft.device_runner import DeviceRunner
from services.draft.device_step import StepSizes
from slipstream.handoff.cuda_ipc import CudaDraftEnd, Export
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.times import Times
from slipstream.handoff.layout import RECORD_INTS, RELEASED, Flag, Layout, ring_entry
from slipstream.layers.graphs import Graphs
from slipstream.models import DraftHead
from tests.gpu.parked_target import PATIENT, until
from tests.gpu.watch import Watch
from tests.kernels.test_draft_device import MAX_LEN, SLOTS, WIDTH, B, pair_of, spec_of
from tests.kernels.test_draft_handoff import CHAIN, Driver

LAYOUT = Layout(SLOTS, pages=80, page_size=8, table_pages=10, width=WIDTH, dtype="float32")
USED = (0, 1, 2)
"""Slots of the requests that are drafted for; the others come and go."""

Trees = dict[int, list[list[int]]]


@dataclass
class Seat:
    """`slipstream.handoff.cuda_ipc.mapper.Seat` of a target in this process."""

    memory: Export
    lane: Lane
    times: Times = PATIENT

    def leave(self, broken: bool, may_close: bool) -> None:
        self.lane.store(Flag.DRAFT_BEAT, RELEASED)


class Through:
    """A target's side of a session that is through with its set."""

    drained = True

    def end(self, reason: str) -> None: ...


class Draft:
    """A runner of three sessions, and the memory of a target whose features are all there."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        pair = pair_of(folder, "dflash")
        head = DraftHead.load(pair.draft, pair.target, torch.float32, device)
        spec = spec_of(head, pages=100)
        graphs = Graphs(device)
        self.device = device
        self.runner = DeviceRunner(
            head, spec, max_len=MAX_LEN, graphs=graphs, sessions=3,
            attention="triton" if graphs.enabled else "torch",
            sizes=StepSizes.of(spec, rows=2 * B, write_rows=16), mapper="the mapper",
        )  # fmt: skip
        self.export = Export.create(LAYOUT, device, PATIENT)
        seed = torch.Generator().manual_seed(1)
        self.export.features.copy_(torch.randn(self.export.features.shape, generator=seed))
        pages = torch.arange(SLOTS * LAYOUT.table_pages, dtype=torch.int32)
        self.export.tables.copy_(pages.view(SLOTS, -1))
        cuda = device.type == "cuda"
        self.side = torch.cuda.Stream(device) if cuda else None
        self.records = torch.zeros(1 + SLOTS, RECORD_INTS, dtype=torch.int64, pin_memory=cuda)
        self.heads = torch.zeros(self.export.heads[0].shape, dtype=torch.int64, pin_memory=cuda)
        nodes = self.export.nodes[0].shape
        self.nodes = torch.zeros(nodes, dtype=torch.int32, pin_memory=cuda)
        if cuda:
            torch.cuda.synchronize()

    def copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        """On a stream that nothing else is on; it is through at the end."""
        with nullcontext() if self.side is None else torch.cuda.stream(self.side):
            place.copy_(source, non_blocking=True)
        if self.side is not None:
            self.side.synchronize()

    def engine(self, watch: Watch) -> Driver:
        made = Driver(self.runner)
        carry = watch.timed(made.engine._carry_out, lambda item: f"engine {type(item).__name__}")
        made.engine._carry_out = carry  # type: ignore[method-assign]
        return made

    def close(self) -> None:
        self.export.close()


class Play:
    """One session of one engine, and the target's part of it."""

    def __init__(self, draft: Draft, driver: Driver, session: int, first: int) -> None:
        lane = draft.export.pool.take()
        assert lane is not None
        draft.export.pool.live(lane, Through())  # it comes back when the draft has left it
        lane.reset(first - 1)
        self.draft, self.driver, self.lane = draft, driver, lane
        self.session, self.first, self.step = session, first, first - 1
        self.epochs: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.end = CudaDraftEnd(session, first, Seat(draft.export, lane), lambda reason: None)
        driver.connect(session, first, self.end)

    def admit(self, slot: int) -> None:
        self.epochs[slot] = self.epochs.get(slot, 0) + 1
        self.rows[slot] = 0
        self.driver.send(Admit, self.session, slot, self.epochs[slot], CHAIN, 0.0, 0, 0)

    def release(self, slot: int) -> None:
        self.driver.send(Release, slot, self.epochs[slot])

    def plan(self, slots: Sequence[int], after: int, prefill: bool = False) -> int:
        self.step += 1
        nodes, rows = (0, 20) if prefill else (B, B)
        entries = tuple(PlanEntry(slot, self.epochs[slot], nodes, rows) for slot in slots)
        self.driver.send(Plan, self.step, self.session, not prefill, entries, after)
        return self.step

    def publish(self, step: int, slots: Sequence[int], count: int) -> None:
        """So many more rows of each slot, and an anchor after them."""
        records = self.draft.records
        records[0, :2] = torch.tensor([step, len(slots)])
        for index, slot in enumerate(slots):
            end = self.rows[slot] + count
            words = [slot, self.epochs[slot], self.rows[slot], count, (7 * slot + end) % 300, 1]
            records[1 + index, :6] = torch.tensor(words)
            self.rows[slot] = end
        place = self.draft.export.records[ring_entry(self.lane.which, step)]
        self.draft.copy(place[: 1 + len(slots)], records[: 1 + len(slots)])
        self.lane.store(Flag.CONTEXT, step)

    def proposed(self, step: int) -> bool:
        return self.lane.load(Flag.PROPOSAL) >= step

    def trees(self, step: int) -> Trees:
        """The proposals of a step, by slot; waits for them."""
        assert until(lambda: self.proposed(step), 20)
        entry, draft = ring_entry(self.lane.which, step), self.draft
        draft.copy(draft.heads, draft.export.heads[entry])
        draft.copy(draft.nodes, draft.export.nodes[entry])
        step_said, count = draft.heads[0, :2].tolist()
        assert step_said == step
        found: Trees = {}
        for index, head in enumerate(draft.heads[1 : 1 + count].tolist()):
            assert head[1] == self.epochs[head[0]]
            found[head[0]] = draft.nodes[B * index : B * index + head[2]].tolist()
        return found

    def begin(self) -> tuple[int, Trees]:
        """Three requests, their prompts, and a step that drafts; the step, and its trees."""
        for slot in USED:
            self.admit(slot)
        first = self.plan(USED, self.first - 1, prefill=True)
        self.publish(first, USED, 6)
        step = self.plan(USED, first)
        return step, self.trees(step)

    def finish(self, step: int) -> list[Trees]:
        """Two steps that both wait for the context of `step`: their trees, before and after."""
        later = [self.plan(USED, step), self.plan(USED, step)]
        self.publish(step, USED, 1)
        return [self.trees(number) for number in later]

    def detach(self) -> None:
        self.driver.send(Detach, self.session, "enough")
        while not isinstance(event := self.driver.event(), Detached):
            assert isinstance(event, Live), event


def beside_a_parked_session(draft: Draft, watch: Watch) -> None:
    """One session waits for a context that does not come; everything else goes on.

    What it drafts at last is what a session that never waited drafts.
    """
    engine, other = draft.engine(watch), draft.engine(watch)
    before = Play(draft, other, 50, 100)
    step, first = before.begin()
    wanted = [first, *before.finish(step)]
    assert all(len(tree) == B for trees in wanted for tree in trees.values())
    before.detach()

    play = Play(draft, engine, 60, 1000)
    step, trees = play.begin()
    assert trees == wanted[0]
    watch.on = True
    parked = [play.plan(USED, step), play.plan(USED, step)]  # the context of `step` is not there
    for slot in range(SLOTS):
        if slot not in USED:
            play.admit(slot)
            play.release(slot)
            play.admit(slot)
    for session in range(70, 75 if draft.device.type == "cuda" else 71):
        with watch.call("attach of another session"):
            neighbour = Play(draft, other, session, 10 * session)
        with watch.call("two steps of another session"):
            step_there, first = neighbour.begin()
        with watch.call("two more steps of another session"):
            assert [first, *neighbour.finish(step_there)] == wanted
        with watch.call("detach of another session"):
            neighbour.detach()
    if draft.device.type == "cuda":  # on a CPU the engine itself waits
        assert until(lambda: engine.engine._inbox.empty())
    assert not play.proposed(parked[0])
    watch.on = False
    play.publish(step, USED, 1)
    assert [play.trees(number) for number in parked] == wanted[1:]
    play.detach()
    assert engine.stop() is None and other.stop() is None


def proof(draft: Draft) -> Watch:
    """Runs it; the watch."""
    watch = Watch()
    try:
        beside_a_parked_session(draft, watch)
    finally:
        for lane in draft.export.pool.lanes:  # whatever went wrong, nothing stays parked
            lane.store(Flag.CONTEXT, RELEASED)
    return watch
