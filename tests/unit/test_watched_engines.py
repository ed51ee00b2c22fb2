"""What a watchdog sees of the engines of both servers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from services.target.commands import StepKind
from tests.fakes.target_driver import entry
from tests.unit import run_ahead_rig
from tests.unit.draft_rig import WAIT_S, Rig
from tests.waiting import until


def test_a_target_is_at_its_oldest_step() -> None:
    rig = run_ahead_rig.Rig()
    assert rig.engine.at is None
    rig.admit(0, run_ahead_rig.PROMPT)
    rig.plan_prefill()
    rig.plan(StepKind.DECODE, entry(0, 4))
    rig.started(2)
    rig.quiet()
    assert rig.engine.at == "step 1"
    rig.land()
    until(lambda: rig.engine.at == "step 2")
    rig.land()
    until(lambda: rig.engine.at is None)
    rig.engine.stop()


def test_a_draft_is_at_a_command_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with Rig() as rig:
        request = rig.admit(0, 1)
        prefilled = rig.prefill(request)
        until(lambda: rig.engine.at is None)
        context = rig.runner.contexts[0]
        draft = context.draft

        def slow(entries: Any) -> Any:
            assert go_on.wait(WAIT_S)
            return draft(entries)

        monkeypatch.setattr(context, "draft", slow)
        step = rig.plan((request, 4), after=prefilled)
        until(lambda: rig.engine.at is not None)
        at = rig.engine.at
        time.sleep(0.05)
        assert rig.engine.at == at and at is not None and at.startswith("command ")
        go_on.set()
        assert list(rig.proposal(step)) == [0]
        until(lambda: rig.engine.at is None)
        later = rig.plan((request, 4), after=step)
        assert rig.end.waiting.wait(WAIT_S)
        assert rig.engine.at is None  # the target may take its time
        request.draw()
        rig.context(step, request.record())
        assert list(rig.proposal(later)) == [0]
        rig.event()
