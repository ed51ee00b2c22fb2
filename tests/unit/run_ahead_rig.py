"""A gateway that plans ahead of results, and lets the steps of a fake runner end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.target.commands import (
    Attach,
    Attached,
    PlanEntry,
    Release,
    StepDone,
    StepKind,
)
from slipstream.handoff.base import ProposedTree
from slipstream.v1 import common_pb2 as pb
from tests.fakes.run_ahead import FakeDeviceEnd, RunAheadFake
from tests.fakes.target import expected_output
from tests.fakes.target_driver import WAIT_S, Driver

PROMPT = [5, 6, 7]
WANT = expected_output(PROMPT, 64, 1000)


class Rig(Driver[RunAheadFake]):
    """A gateway that plans ahead of results; the test lets steps end."""

    def __init__(self) -> None:
        super().__init__(RunAheadFake(eos_ids=(2,), grammars=True, pages=64))
        self.device_ends: list[FakeDeviceEnd] = []

    def attach_device(self, session: int = 7) -> FakeDeviceEnd:
        self.send_attach(session)
        assert self.next() == Attached(session, "cuda_ipc")
        return self.device_ends[-1]

    def send_attach(self, session: int) -> None:
        def answer(number: int) -> FakeDeviceEnd:
            self.device_ends.append(FakeDeviceEnd(number))
            return self.device_ends[-1]

        self.connector.answer = answer
        first = self.step + 1
        self.send(lambda n: Attach(n, session, first, "draft:1"))

    def started(self, count: int) -> None:
        """Until so many steps were started in all."""
        deadline = time.monotonic() + WAIT_S
        while len(self.runner.started) < count:
            assert time.monotonic() < deadline, self.runner.started
            time.sleep(1e-3)

    def quiet(self) -> None:
        """Nothing is said of what was given so far."""
        number = self.send(lambda n: Release(n, 99, 1))
        self.rejected(number, pb.REJECT_CODE_SLOT_RANGE)

    def plan_prefill(self, slot: int = 0, session: int = 0, epoch: int = 1) -> None:
        given = PlanEntry(slot, epoch, 3, first=0, count=3, last=True)
        self.plan(StepKind.PREFILL, given, session=session)

    def land(self, count: int = 1) -> list[StepDone]:
        deadline = time.monotonic() + WAIT_S
        while self.runner.waiting < count:
            assert time.monotonic() < deadline, "the steps were not started"
            time.sleep(1e-3)
        self.runner.land(count)
        return [self.step_done() for _ in range(count)]

    def step_done(self) -> StepDone:
        event = self.next()
        assert isinstance(event, StepDone), event
        return event

    def live(self, slot: int = 0, session: int = 0, limit: int = 64) -> None:
        """A request whose prefill has ended."""
        self.admit(slot, PROMPT, limit=limit)
        before = len(self.runner.started)
        self.plan_prefill(slot, session)
        self.started(before + 1)
        assert list(self.land()[0].entries[0].result.tokens) == WANT[:1]


@contextmanager
def running() -> Iterator[Rig]:
    """A rig; at the end its engine has stopped, and nothing is left behind."""
    made = Rig()
    yield made
    made.runner.held = False
    made.runner.land_all()
    made.engine.stop()
    assert not made.failure
    assert made.engine._slots.pool.free == 64
    assert not made.runner.unread


def right(slot: int, given: int, nodes: int, epoch: int = 1) -> ProposedTree:
    """The chain that the fake model follows after `given` tokens of the output."""
    tokens = WANT[given - 1 : given - 1 + nodes]
    return ProposedTree(slot, epoch, tokens, list(range(-1, nodes - 1)))


def tokens(done: StepDone, index: int = 0) -> list[int]:
    return list(done.entries[index].result.tokens)
