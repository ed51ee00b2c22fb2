"""What the engine of the target refuses of a gateway, and that the rest goes on. No gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.target.commands import (
    Attach,
    Detach,
    Detached,
    Outcome,
    PlanEntry,
    Release,
    StepKind,
)
from slipstream.errors import PeerLost
from slipstream.handoff.base import ContextMessage
from slipstream.params import SamplingParams
from slipstream.v1 import common_pb2 as pb
from tests.fakes.target import FakeTargetRunner
from tests.fakes.target_driver import Driver, FakeEnd, entry


@pytest.fixture
def driver() -> Iterator[Driver[FakeTargetRunner]]:
    made = Driver(FakeTargetRunner(eos_ids=(2,)))
    yield made
    made.engine.stop()
    assert not made.failure


def test_attach_is_refused(driver: Driver[FakeTargetRunner]) -> None:
    number = driver.send(lambda n: Attach(n, 0, 1, "draft:1"))
    driver.rejected(number, pb.REJECT_CODE_SESSION)
    driver.plan(StepKind.DECODE)
    driver.done()
    number = driver.send(lambda n: Attach(n, 3, 1, "draft:1"))
    driver.rejected(number, pb.REJECT_CODE_STEP_ORDER)
    number = driver.send(lambda n: Attach(n, 3, 2, ""))
    driver.rejected(number, pb.REJECT_CODE_PEER)
    driver.connector.answer = lambda session: PeerLost("nobody at draft:1")
    number = driver.send(lambda n: Attach(n, 4, 2, "draft:1"))
    assert driver.rejected(number, pb.REJECT_CODE_PEER).reason == "nobody at draft:1"
    number = driver.send(lambda n: Detach(n, 99, ""))
    driver.rejected(number, pb.REJECT_CODE_SESSION)


def test_plan_may_name_a_session_only_once_attached(driver: Driver[FakeTargetRunner]) -> None:
    driver.connector.answer = lambda session: None
    driver.send(lambda n: Attach(n, 5, 1, "draft:1"))
    driver.admit(0, [1, 2, 3])
    entry_ = PlanEntry(0, 1, 3, first=0, count=3, last=True)
    number = driver.plan(StepKind.PREFILL, entry_, session=5)
    assert driver.rejected(number, pb.REJECT_CODE_SESSION).session == 5
    assert driver.done().entries[0].outcome is Outcome.DONE
    driver.send(lambda n: Detach(n, 5, "slow"))
    assert driver.next() == Detached(5, "slow")
    late = FakeEnd(5)
    driver.connector.pending[0](late)
    driver.decode(entry(0, 9))
    assert not late.alive


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"slot": 8}, pb.REJECT_CODE_SLOT_RANGE),
        ({"slot": 1}, pb.REJECT_CODE_SLOT_EMPTY),
        ({"epoch": 2}, pb.REJECT_CODE_STALE_EPOCH),
        ({"nodes": 0}, pb.REJECT_CODE_LENGTH),
        ({"nodes": 257}, pb.REJECT_CODE_LENGTH),
        ({"reserve": 3}, pb.REJECT_CODE_LENGTH),
        ({"reserve": 5000}, pb.REJECT_CODE_LENGTH),
    ],
)
def test_bad_decode_entries(
    driver: Driver[FakeTargetRunner], change: dict[str, int], code: int
) -> None:
    driver.admit(0, [1, 2, 3])
    driver.prefill(0, 0, 3)
    end = driver.attach()
    fields = {"slot": 0, "epoch": 1, "reserve": 20, "nodes": 1} | change
    number = driver.plan(StepKind.DECODE, PlanEntry(**fields), session=7)
    event = driver.rejected(number, code)
    assert event.step == driver.step
    done = driver.done()
    assert done.entries[0].outcome is Outcome.DROPPED
    assert end.messages == [ContextMessage(done.step)], "the step is finished all the same"
    good = driver.decode(entry(0, 20))
    assert good.entries[0].outcome is Outcome.DONE


@pytest.mark.parametrize(
    "fields",
    [
        {"first": 1, "count": 2, "last": True},
        {"first": 0, "count": 0, "last": False},
        {"first": 0, "count": 4, "last": True},
        {"first": 0, "count": 3, "last": False},
        {"first": 0, "count": 2, "last": True},
        {"first": 0, "count": 3, "last": True, "reserve": 2},
    ],
)
def test_bad_prefill_entries(driver: Driver[FakeTargetRunner], fields: dict[str, int]) -> None:
    driver.admit(0, [1, 2, 3])
    full = PlanEntry(**({"slot": 0, "epoch": 1, "reserve": 10} | fields))
    number = driver.plan(StepKind.PREFILL, full)
    driver.rejected(number, pb.REJECT_CODE_LENGTH)
    assert driver.done().entries[0].outcome is Outcome.DROPPED
    number = driver.plan(StepKind.DECODE, entry(0, 10))
    driver.rejected(number, pb.REJECT_CODE_LENGTH)
    driver.done()
    assert driver.prefill(0, 0, 3).entries[0].outcome is Outcome.DONE


def test_other_entries_go_on(driver: Driver[FakeTargetRunner]) -> None:
    for slot in (0, 1):
        driver.admit(slot, [1, 2, 3])
        driver.prefill(slot, 0, 3)
    number = driver.plan(StepKind.DECODE, entry(0, 9), entry(0, 9), entry(5, 9), entry(1, 9))
    driver.rejected(number, pb.REJECT_CODE_BAD_VALUE)
    driver.rejected(number, pb.REJECT_CODE_SLOT_EMPTY)
    outcomes = [e.outcome for e in driver.done().entries]
    assert outcomes == [Outcome.DONE, Outcome.DROPPED, Outcome.DROPPED, Outcome.DONE]


def test_kindless_plan_and_step_order(driver: Driver[FakeTargetRunner]) -> None:
    driver.admit(0, [1, 2, 3])
    number = driver.plan(StepKind.UNKNOWN, entry(0, 9))
    driver.rejected(number, pb.REJECT_CODE_BAD_VALUE)
    driver.done()
    driver.step += 1  # a gap
    number = driver.plan(StepKind.DECODE, entry(0, 9))
    driver.rejected(number, pb.REJECT_CODE_STEP_ORDER)
    assert driver.done().entries[0].outcome is Outcome.DROPPED
    driver.step = 1
    driver.prefill(0, 0, 3)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"slot": 9}, pb.REJECT_CODE_SLOT_RANGE),
        ({"prompt": []}, pb.REJECT_CODE_LENGTH),
        ({"limit": 3}, pb.REJECT_CODE_LENGTH),
        ({"limit": 513}, pb.REJECT_CODE_LENGTH),
        ({"prompt": [1, 1000, 2]}, pb.REJECT_CODE_BAD_VALUE),
        ({"output": (5000,)}, pb.REJECT_CODE_BAD_VALUE),
        ({"stop": (1000,)}, pb.REJECT_CODE_BAD_VALUE),
        ({"logprobs": 21}, pb.REJECT_CODE_BAD_VALUE),
        ({"sampling": SamplingParams(temperature=-1.0)}, pb.REJECT_CODE_BAD_VALUE),
    ],
)
def test_bad_admits(driver: Driver[FakeTargetRunner], change: dict[str, object], code: int) -> None:
    fields: dict[str, object] = {"slot": 0, "prompt": [1, 2, 3]} | change
    number = driver.admit(**fields)  # type: ignore[arg-type]
    driver.rejected(number, code)
    driver.admit(0, [1, 2, 3], epoch=2)
    assert driver.prefill(0, 0, 3, epoch=2).entries[0].outcome is Outcome.DONE


def test_occupied_and_stale_admits(driver: Driver[FakeTargetRunner]) -> None:
    driver.admit(0, [1, 2, 3], epoch=5)
    driver.rejected(driver.admit(0, [1, 2, 3], epoch=6), pb.REJECT_CODE_STALE_EPOCH)
    driver.rejected(driver.send(lambda n: Release(n, 0, 4)), pb.REJECT_CODE_STALE_EPOCH)
    driver.send(lambda n: Release(n, 0, 5))
    driver.rejected(driver.admit(0, [1, 2, 3], epoch=5), pb.REJECT_CODE_STALE_EPOCH)
    driver.rejected(driver.send(lambda n: Release(n, 0, 5)), pb.REJECT_CODE_SLOT_EMPTY)


def test_no_pages(driver: Driver[FakeTargetRunner]) -> None:
    small = Driver(FakeTargetRunner(pages=4, page_size=4))
    small.admit(0, [1, 2, 3, 4, 5])
    small.admit(1, [1, 2, 3, 4, 5])
    assert small.prefill(0, 0, 5, reserve=12).free_pages == 1
    number = small.plan(StepKind.PREFILL, PlanEntry(1, 1, 5, first=0, count=5, last=True))
    small.rejected(number, pb.REJECT_CODE_NO_PAGES)
    assert small.done().free_pages == 1
    small.send(lambda n: Release(n, 0, 1))
    assert small.prefill(1, 0, 5).free_pages == 2
    assert small.decode(entry(1, 7)).free_pages == 2, "the watermark rises in whole pages"
    small.close()
    small.open()
    small.admit(0, [1], epoch=1)
    assert small.prefill(0, 0, 1).free_pages == 3
    small.engine.stop()
