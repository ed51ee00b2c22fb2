"""A GPU's clock, whose pace is not quite the host's."""

from __future__ import annotations

import random

import pytest

from services.target.device_clock import WINDOW_NS, DeviceClock
from services.target.runner import Stamps

MS = 1_000_000
ZERO = 7 * 10**12  # the host's time when the GPU's clock began


@pytest.mark.parametrize("drift", [-5e-5, 0.0, 2e-5, 5e-5])
def test_stamps_stay_near_for_hours(drift: float) -> None:
    """Results are seen 0.02 to 3 ms late, 5 ms apart, with pauses of 40 s."""
    clock, dice = DeviceClock(), random.Random(1)
    now, errors = 10**15, []
    for step in range(100_000):
        now += 5 * MS if step % 997 else 40_000 * MS
        ended = int((now - ZERO) * (1 + drift))
        errors.append(clock.monotonic(ended, ended, now + dice.randint(20_000, 3 * MS)) - now)
    slack = 2 * abs(drift) * WINDOW_NS
    assert min(errors) >= 20_000 - slack
    assert max(errors) <= 3 * MS + slack
    assert sorted(errors)[len(errors) // 2] < MS


def test_late_results_do_not_shift_it() -> None:
    clock = DeviceClock()
    for step in range(4_000):
        now = 10**15 + 5 * MS * step
        late = 100 * MS if step % 3 else MS
        stamp = now - ZERO
        assert clock.monotonic(stamp - 4 * MS, stamp, now + late) == now - 3 * MS


def test_idle_is_between_steps() -> None:
    clock = DeviceClock()
    assert clock.idle(Stamps(began=50, ended=70)) == 0
    assert clock.idle(Stamps(began=90, ended=120)) == 20
    assert clock.idle(Stamps(began=110, ended=130)) == 0
