"""The draft's engine over a target's memory does what it does over a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from services.draft.commands import (
    Admit,
    Behind,
    Detach,
    Detached,
    Live,
    Plan,
    PlanEntry,
    Rejected,
)
from services.draft.device_runner import DeviceRunner
from services.draft.device_step import StepSizes
from services.draft.model_runner import ModelRunner
from slipstream.handoff.base import ContextRecord
from slipstream.handoff.layout import ring_entry
from slipstream.layers.graphs import Graphs
from slipstream.models import DraftHead
from slipstream.v1 import common_pb2 as pb
from tests.fakes.device_end import FakeDeviceEnd, FakeMemory
from tests.kernels.draft_handoff_rig import (
    CHAIN,
    LAYOUT,
    PAGES,
    TREE,
    WAIT_S,
    WHICH,
    Driver,
    Twins,
)
from tests.kernels.test_draft_device import (
    MAX_LEN,
    SLOTS,
    B,
    pair_of,
    spec_of,
)


@pytest.fixture(scope="module")
def runners(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[ModelRunner, DeviceRunner]:
    """Passes of the device hold two blocks and 16 context rows."""
    pair = pair_of(tmp_path_factory.mktemp("pair"), "dflash")
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    on_device = DraftHead.load(pair.draft, pair.target, torch.float32, device)
    spec = spec_of(on_device, pages=PAGES)
    graphs = Graphs(device)
    runner = DeviceRunner(
        on_device,
        spec,
        max_len=MAX_LEN,
        graphs=graphs,
        sessions=3,
        attention="triton" if graphs.enabled else "torch",
        sizes=StepSizes.of(spec, rows=2 * B, write_rows=16),
        mapper="the mapper",
    )
    return ModelRunner(head, spec_of(head, pages=PAGES)), runner


@pytest.fixture
def twins(runners: tuple[ModelRunner, DeviceRunner], device: torch.device) -> Iterator[Twins]:
    plain, on_device = (Driver(runner) for runner in runners)
    both = Twins(plain, on_device, FakeMemory(LAYOUT, device), session=7, first_step=5)
    both.begin()
    yield both
    failed = [driver.stop() for driver in (plain, on_device)]
    assert failed == [None, None]
    assert on_device.peers.mappers[0] == "the mapper" and plain.peers.mappers[0] is None
    end = both.ends[1]
    assert end.closed == 1
    assert end.passed_steps == list(range(both.first_step, end.planned_to + 1))
    context = runners[1].open_context()
    assert context.free_pages == PAGES
    context.close()


def test_requests_from_prefill_to_drafts(twins: Twins) -> None:
    one, two = twins.admit(0, CHAIN), twins.admit(3, prompt=14)
    twins.prefill(one, two)
    trees = twins.decode({0: B, 3: 24})
    assert sorted(trees) == [0, 3]
    assert len(trees[0][1]) == B and len(trees[3][1]) > B
    assert twins.events(2) == [Live(7, 0, one.epoch, 4), Live(7, 3, two.epoch, 14)]
    three = twins.admit(2)
    twins.decode({3: 9, 0: 1})
    twins.prefill(three, chunk=3)
    assert sorted(twins.decode({0: 3, 3: 16, 2: 5})) == [0, 3]
    twins.requests[2].cursor = 3
    twins.decode({0: 3, 2: 1}, replay=9)
    assert sorted(twins.decode({0: 3, 3: 16, 2: 5})) == [0, 2, 3]
    assert [type(event) for event in twins.events(1)] == [Live]
    twins.quiet()


def test_random_lives(twins: Twins, device: torch.device) -> None:
    """Slots come and go, rows are lost and found again, records lie."""
    rng = twins.rng
    told = 0
    for _ in range(7 if device.type == "cpu" else 300):
        for slot in range(SLOTS):
            if slot not in twins.requests:
                if rng.random() < 0.4:
                    twins.prefill(twins.admit(slot, rng.choice([CHAIN, TREE]), rng.randint(1, 9)))
            elif rng.random() < 0.08 or twins.requests[slot].start + B >= MAX_LEN:
                twins.release(slot)
        for request in twins.requests.values():
            if rng.random() < 0.15:
                request.cursor = rng.randint(0, request.start)  # back, or a gap ahead
        wanted = [slot for slot in twins.requests if rng.random() < 0.8]
        nodes = {slot: rng.choice([1, 2, B, 24]) for slot in wanted}
        backlog = max([0, *(r.start - r.cursor for r in twins.requests.values())])
        step = twins.plan(nodes, replay=backlog)
        twins.check_trees(step)
        records = []
        for slot, count in nodes.items():
            request = twins.requests[slot]
            for _ in range(rng.randint(1, min(count, B))):
                if request.start + B < MAX_LEN:
                    request.tokens.append(rng.randrange(4, 300))
            record = twins.record(request, count + backlog)
            if rng.random() < 0.1:
                values = {name: getattr(record, name) for name in ContextRecord.__slots__}
                values |= rng.choice([{"epoch": 3}, {"anchor": 1 << 31}, {"caught_up": False}])
                record = ContextRecord(**values)
            records.append(record)
        twins.publish(step, records)
    twins.flush()
    while not twins.plain.events.empty():
        twins.events(1)
        told += 1
    assert told > 5
    twins.quiet()


def test_plans_run_ahead_and_steps_without_drafts_pile_up(twins: Twins) -> None:
    """Context of eleven steps is taken at once: more than the ring holds."""
    request = twins.admit(0)
    twins.prefill(request, chunk=2)
    held = twins.after
    for _ in range(10):
        twins.after = held
        step = twins.plan({0: 1}, replay=1)
        assert twins.check_trees(step) == {}
    twins.after = twins.step
    ahead = twins.plan({0: 4})
    end = twins.ends[1]
    for step in range(held + 1, ahead):
        request.tokens.append(9)
        if step > held + 8:
            # As the target's stream waits for room in its ring.
            with end._changed:
                assert end._changed.wait_for(lambda s=step: end.taken >= s - 8, WAIT_S)
        twins.publish(step, [twins.record(request, 2)])
    twins.check_trees(ahead)
    waits = [step for kind, step in end.log if kind == "await"]
    assert waits[-2:] == [held + 8, ahead - 1]
    twins.publish(ahead, [twins.record(request, 4)])
    twins.flush()
    assert [type(event) for event in twins.events(1)] == [Live]
    twins.quiet()


def test_no_pages_then_pages(twins: Twins) -> None:
    """One request leaves too few pages for another, until it is released."""
    hogs = []
    for pool in (twins.plain_pool, twins.device_pool):
        hogs.append(pool.take(pool.free - 9))  # a page holds four positions
    one, two = twins.admit(0, prompt=17), twins.admit(1, prompt=14)
    twins.prefill(one)
    twins.prefill(two)
    assert list(twins.decode({0: 2, 1: 2})) == [0]
    live, behind = twins.events(2)
    assert isinstance(live, Live) and isinstance(behind, Behind)
    assert (behind.slot, behind.rows) == (1, 0) and behind.reason.startswith("no pages")
    two.cursor = 0
    assert twins.decode({1: 1}, replay=30) == {}  # it is turned away in silence
    assert twins.decode({1: 1}) == {}
    twins.release(0)
    again = twins.events(1)[0]
    assert isinstance(again, Behind) and again.reason == "pages are free again"
    two.cursor = 0
    twins.decode({1: 1}, replay=30)
    assert list(twins.decode({1: 4})) == [1]
    gap, live = twins.events(2)  # the rows that were in flight at the Release are one
    assert isinstance(gap, Behind) and "gap" in gap.reason and isinstance(live, Live)
    for pool, hog in zip((twins.plain_pool, twins.device_pool), hogs, strict=True):
        pool.give(hog)


def test_refusals(twins: Twins) -> None:
    request = twins.admit(0)
    twins.prefill(request)
    twins.decode({0: 4})
    twins.events(1)
    twins.step += 1
    entries = (PlanEntry(5, 1, 4), PlanEntry(0, request.epoch, 4), PlanEntry(0, request.epoch, 4))
    twins.plans[twins.step] = Plan(0, twins.step, 7, True, entries, twins.after)
    twins.both(Plan, twins.step, 7, True, entries, twins.after)
    assert list(twins.check_trees(twins.step)) == [0]
    codes = [event.code for event in twins.events(2) if isinstance(event, Rejected)]
    assert codes == [pb.REJECT_CODE_SLOT_RANGE, pb.REJECT_CODE_BAD_VALUE]
    twins.publish(twins.step, [])
    late = (PlanEntry(0, request.epoch, 4),)
    twins.step += 1
    twins.both(Plan, twins.step, 7, True, late, twins.step)
    assert isinstance(twins.events(1)[0], Rejected)
    twins.ends[1].await_proposal(twins.step)
    assert twins.memory.read_trees(WHICH, twins.step, [4]) is None


def test_a_detach_releases_a_wait_and_the_memory(
    runners: tuple[ModelRunner, DeviceRunner], device: torch.device
) -> None:
    driver = Driver(runners[1])
    memory = FakeMemory(LAYOUT, device)
    first = FakeDeviceEnd(7, memory, 0, 1)
    driver.connect(7, 1, first)
    driver.send(Admit, 7, 0, 1, None, 0.0, 0, 0)
    driver.send(Plan, 1, 7, False, (PlanEntry(0, 1, 0, 4),), 0)
    driver.send(Plan, 2, 7, True, (PlanEntry(0, 1, 4, 4),), 1)  # its context never comes
    assert first.waiting.wait(WAIT_S)
    driver.send(Plan, 3, 7, True, (PlanEntry(0, 1, 4, 4),), 2)
    driver.send(Detach, 7, "enough")
    assert driver.event() == Detached(7, "enough")
    assert first.closed == 1 and first.reason == "enough"
    assert first.passed_steps == [1, 2][: len(first.passed_steps)]
    second = FakeDeviceEnd(8, memory, 1, 20)
    driver.connect(8, 20, second)
    # A slot of the old session is nobody's: its epoch counts for nothing in the new one.
    second.memory.write_records(1, 20, [ContextRecord(0, 1, 0, 1, 9, True)])
    driver.send(Plan, 20, 8, False, (PlanEntry(0, 1, 0, 4),), 19)
    second.publish_context(20, [ContextRecord(0, 1, 0, 1, 9, True)])
    driver.send(Plan, 21, 8, True, (PlanEntry(1, 1, 2, 4),), 20)
    assert isinstance(driver.event(), Rejected)
    second.await_proposal(21)
    second.end("the target is gone")
    assert driver.event() == Detached(8, "the target is gone")
    assert second.closed == 1
    assert driver.stop() is None


def test_a_plan_of_more_entries_than_the_target_has_slots_stays_in_its_ring_entry(
    runners: tuple[ModelRunner, DeviceRunner], device: torch.device
) -> None:
    driver = Driver(runners[1])
    memory = FakeMemory(replace(LAYOUT, slots=1), device)
    end = FakeDeviceEnd(9, memory, WHICH, 1)
    driver.connect(9, 1, end)
    for slot in range(2):
        driver.send(Admit, 9, slot, 1, None, 0.0, 0, 0)
    driver.send(Plan, 1, 9, False, (PlanEntry(0, 1, 0, 4),), 0)
    end.publish_context(1, [ContextRecord(0, 1, 0, 4, 9, True)])
    memory.heads.fill_(-7)
    driver.send(Plan, 2, 9, True, (PlanEntry(1, 1, 4, 4), PlanEntry(0, 1, 4, 4)), 1)
    end.await_proposal(2)
    assert isinstance(driver.event(), Live)
    others = [e for e in range(len(memory.heads)) if e != ring_entry(WHICH, 2)]
    assert bool((memory.heads[others] == -7).all())
    end.end("over")
    assert isinstance(driver.event(), Detached) and driver.stop() is None


def test_two_sessions_at_once(
    runners: tuple[ModelRunner, DeviceRunner], device: torch.device
) -> None:
    """One is held up by its target; the other goes on."""
    held, free = Driver(runners[1]), Driver(runners[1])
    ends: list[FakeDeviceEnd] = []
    for session, driver in ((7, held), (8, free)):
        memory = FakeMemory(LAYOUT, device)
        memory.features.copy_(torch.randn(memory.features.shape))
        ends.append(FakeDeviceEnd(session, memory, WHICH, 1))
        driver.connect(session, 1, ends[-1])
        driver.send(Admit, session, 0, 1, TREE, 0.0, 0, 0)
        driver.send(Plan, 1, session, False, (PlanEntry(0, 1, 0, 4),), 0)
        driver.send(Plan, 2, session, True, (PlanEntry(0, 1, 9, 9),), 1)
        assert ends[-1].waiting.wait(WAIT_S)  # interpreted kernels run on one thread at a time
    ends[1].publish_context(1, [ContextRecord(0, 1, 0, 4, 9, True)])
    assert free.event() == Live(8, 0, 1, 4)
    ends[1].await_proposal(2)
    trees = ends[1].memory.read_trees(WHICH, 2, [9])
    assert trees is not None and 1 < len(trees[0][1]) <= 9
    assert ends[0].waiting.is_set() and ends[0].proposal == 1
    assert free.stop() is None and held.stop() is None


def test_a_step_that_fails_ends_the_engine(
    runners: tuple[ModelRunner, DeviceRunner], device: torch.device
) -> None:
    driver = Driver(runners[1])
    end = FakeDeviceEnd(7, FakeMemory(LAYOUT, device), 0, 1)

    def broken(step: int) -> None:
        raise ValueError("the device is broken")

    end.passed = broken  # type: ignore[method-assign]
    driver.connect(7, 1, end)
    driver.send(Plan, 1, 7, False, (), 0)
    failure = driver.closed.get(timeout=WAIT_S)
    assert isinstance(failure, RuntimeError) and isinstance(failure.__cause__, ValueError)
