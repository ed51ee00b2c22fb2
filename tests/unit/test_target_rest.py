"""When the target's engine lets its runner do what may wait for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from services.target.commands import Attached, StepKind
from services.target.engine import IDLE_S
from tests.fakes.target_driver import WAIT_S, entry
from tests.unit.run_ahead_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.runner.held = False
    made.runner.land_all()
    made.engine.stop()
    assert not made.failure


def rests(rig: Rig, count: int) -> None:
    """Until there were so many."""
    deadline = time.monotonic() + WAIT_S
    while rig.runner.rests < count:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    assert rig.runner.rests == count


def test_once_in_a_pause(rig: Rig) -> None:
    rests(rig, 1)
    time.sleep(3 * IDLE_S)
    assert rig.runner.rests == 1
    rig.quiet()  # a message
    rests(rig, 2)


def test_again_in_a_pause_until_that_was_all(rig: Rig) -> None:
    rests(rig, 1)
    rig.runner.restless = 2
    rig.quiet()
    rests(rig, 4)
    time.sleep(3 * IDLE_S)
    assert rig.runner.rests == 4


def test_a_watchdog_sees_a_pause_that_does_not_end(rig: Rig, monkeypatch: Any) -> None:
    rests(rig, 1)
    assert rig.engine.at is None
    stuck = threading.Event()
    monkeypatch.setattr(rig.runner, "at_rest", lambda: stuck.wait(WAIT_S))
    rig.quiet()
    deadline = time.monotonic() + WAIT_S
    while rig.engine.at is None:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    said = rig.engine.at
    time.sleep(0.02)
    assert rig.engine.at == said
    stuck.set()
    rig.quiet()
    assert rig.engine.at is None


def test_not_while_a_step_is_on_its_way(rig: Rig) -> None:
    rig.live(limit=40)
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.started(2)
    before = rig.runner.rests
    time.sleep(3 * IDLE_S)
    assert rig.runner.rests == before
    rig.land()
    rests(rig, before + 1)


def test_when_a_session_begins_after_the_steps_without_it(rig: Rig) -> None:
    rig.live(limit=40)
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.started(2)
    before = rig.runner.rests
    rig.send_attach(7)
    time.sleep(0.02)
    assert rig.runner.rests == before
    rig.runner.land_all()
    rig.step_done()
    assert rig.next() == Attached(7, "cuda_ipc")
    assert rig.runner.rests == before + 1
