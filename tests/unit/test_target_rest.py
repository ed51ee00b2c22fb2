"""When the target's engine lets its runner do what may wait for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from services.target.commands import Attached, StepKind
from services.target.engine import IDLE_S
from tests.fakes.child import until
from tests.fakes.target_driver import WAIT_S, entry
from tests.unit.run_ahead_rig import Rig, running


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running() as made:
        yield made


def settled(rig: Rig) -> int:
    """How many rests there were, once no more of them come."""
    deadline, count = time.monotonic() + WAIT_S, -1
    while count != rig.runner.rests:
        assert time.monotonic() < deadline
        count = rig.runner.rests
        time.sleep(3 * IDLE_S)
    return count


def test_once_in_a_pause(rig: Rig) -> None:
    before = settled(rig)
    assert before
    rig.quiet()  # a message
    assert settled(rig) == before + 1


def test_again_in_a_pause_until_that_was_all(rig: Rig) -> None:
    before = settled(rig)
    rig.runner.restless = 2
    rig.quiet()
    assert settled(rig) == before + 3


def test_a_message_between_does_not_wait(rig: Rig) -> None:
    rig.runner.restless = 1000
    for _ in range(3):
        rig.quiet()
    rig.runner.restless = 0


def test_a_watchdog_sees_a_pause_that_does_not_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(rig)
    assert rig.engine.at is None
    stuck, entered = threading.Event(), threading.Event()

    def at_rest() -> bool:
        entered.set()
        return stuck.wait(WAIT_S)

    monkeypatch.setattr(rig.runner, "at_rest", at_rest)
    rig.quiet()
    assert entered.wait(WAIT_S)
    said = rig.engine.at
    assert said is not None
    time.sleep(0.02)
    assert rig.engine.at == said
    stuck.set()
    until(lambda: rig.engine.at is None, "out of the pause")


def test_what_fails_in_a_pause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def at_rest() -> bool:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(rig.runner, "at_rest", at_rest)
    until(lambda: rig.failure, "told")
    assert "the device is gone" in str(rig.failure[0])


def test_not_while_a_step_is_on_its_way(rig: Rig) -> None:
    rig.live(limit=40)
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.started(2)
    before = rig.runner.rests
    time.sleep(3 * IDLE_S)
    assert rig.runner.rests == before
    rig.land()
    assert settled(rig) == before + 1


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
    assert rig.runner.rests > before  # before it was said
