"""When the pace of a graph's kernels is changed, and when that is given up."""

from __future__ import annotations

import pytest

from slipstream.layers.kernel_gaps import (
    DISTURBED,
    FASTER,
    IMPLAUSIBLE,
    LEARNT_FROM,
    MOST_PASSED,
    PATIENCE,
    TRIES,
    GapKeeper,
)

FAST, SLOW, BUSY = 1.03, 1.21, 1.7


class Gpu:
    """Shows paces one after the other, the last one for ever; a change goes on to the next.

    Args:
        noise: added to looks, one after the other, until there is none left.
    """

    def __init__(self, *paces: float, noise: tuple[float, ...] = ()) -> None:
        self.paces, self.noise = list(paces), list(noise)
        self.looks = self.changes = 0

    def look(self) -> float:
        self.looks += 1
        return self.paces[0] + (self.noise.pop(0) if self.noise else 0.0)

    def change(self) -> None:
        self.changes += 1
        if len(self.paces) > 1:
            del self.paces[0]

    def kept_by(self, keeper: GapKeeper) -> bool:
        return keeper.keep(self.look, self.change)


@pytest.fixture
def keeper() -> GapKeeper:
    """One that knows the slower pace, as every search does that found the faster."""
    made = GapKeeper()
    assert Gpu(*[SLOW] * 20, FAST).kept_by(made)
    return made


def test_the_slower_pace_is_what_most_changes_leave() -> None:
    keeper = GapKeeper()
    gpu = Gpu(FAST, SLOW, FAST, SLOW, 1.25, 1.16, FAST, 1.2, SLOW, 1.22, FAST, SLOW)
    assert gpu.kept_by(keeper)
    assert (keeper.slower, keeper.faster) == (1.2, FAST)
    assert gpu.changes == 10


def test_the_faster_pace_is_left_alone(keeper: GapKeeper) -> None:
    gpu = Gpu(FAST, noise=(0.07,))
    for looks in range(1, 4):
        assert gpu.kept_by(keeper)
        assert (gpu.looks, gpu.changes) == (looks, 0)


def test_one_look_alone_changes_nothing(keeper: GapKeeper) -> None:
    gpu = Gpu(FAST, noise=(SLOW - FAST,))
    assert gpu.kept_by(keeper)
    assert (gpu.looks, gpu.changes) == (2, 0)


def test_the_slower_pace_is_changed_until_it_is_the_faster(keeper: GapKeeper) -> None:
    gpu = Gpu(*[SLOW] * (TRIES - 1), FAST, SLOW)
    assert gpu.kept_by(keeper)
    assert gpu.changes == TRIES - 1


@pytest.mark.parametrize("seen", [1.151, 1.42])
def test_looks_that_differ_are_not_yet_two_paces(seen: float) -> None:
    """Such were seen among several hundred at the slower pace."""
    keeper, noise = GapKeeper(), (*[0.0] * 50, seen - SLOW)
    gpu = Gpu(SLOW, noise=noise)
    assert not gpu.kept_by(keeper)
    assert gpu.changes == TRIES
    assert FASTER * SLOW < seen


def test_a_disturbed_look_changes_nothing(keeper: GapKeeper) -> None:
    gpu = Gpu(SLOW, FAST, noise=(0.0, 0.0, *[BUSY - FAST] * (PATIENCE - 1)))
    assert gpu.kept_by(keeper)
    assert gpu.changes == 1
    assert DISTURBED * SLOW < BUSY


def test_a_neighbour_that_stays_at_work_ends_the_search(keeper: GapKeeper) -> None:
    gpu = Gpu(SLOW, BUSY, SLOW, FAST)
    assert not gpu.kept_by(keeper)
    assert (gpu.looks, gpu.changes) == (2 + PATIENCE, 1)
    gpu.change()
    assert gpu.kept_by(keeper)  # the next call looks anew
    assert gpu.changes == 3


def test_where_there_is_one_pace_it_is_tried_ever_more_rarely() -> None:
    keeper, gpu = GapKeeper(), Gpu(FAST)
    passed = 1
    while passed <= 2 * MOST_PASSED:
        assert not gpu.kept_by(keeper)
        assert gpu.changes == TRIES
        for _ in range(min(passed, MOST_PASSED)):
            assert not gpu.kept_by(keeper)
        assert gpu.changes == TRIES
        gpu.changes = 0
        passed *= 2


def test_paces_that_became_slower_are_learnt_again(keeper: GapKeeper) -> None:
    """Another process on the GPU makes both slower."""
    assert not Gpu(1.15 * FAST).kept_by(keeper)
    gpu = Gpu(*[1.15 * SLOW] * 20, 1.15 * FAST)
    assert not gpu.kept_by(keeper)  # one call passes
    assert gpu.looks == 0
    assert gpu.kept_by(keeper)
    assert keeper.faster == 1.15 * FAST


def test_paces_that_became_faster_are_learnt_again(keeper: GapKeeper) -> None:
    """They were learnt beside a neighbour at work."""
    gpu = Gpu(*[0.65 * SLOW] * 12, 0.65 * FAST)
    assert gpu.kept_by(keeper)
    assert keeper.slower == pytest.approx(0.65 * SLOW)
    assert gpu.changes == 12
    assert 0.65 < IMPLAUSIBLE < FAST / SLOW < FASTER


def test_a_search_that_found_something_ends_the_rest() -> None:
    one_pace, two = Gpu(FAST), [*[SLOW] * LEARNT_FROM, FAST]
    keeper = GapKeeper()
    assert not one_pace.kept_by(keeper)  # one call passes from here on; the next time two would
    assert not Gpu(*two).kept_by(keeper)
    assert Gpu(*two).kept_by(keeper)
    assert not Gpu(SLOW).kept_by(keeper)
    assert not Gpu(*two).kept_by(keeper)
    assert Gpu(*two).kept_by(keeper)
