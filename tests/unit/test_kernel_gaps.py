"""When the pace of a graph's kernels is changed, and when that is given up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from slipstream.layers.kernel_gaps import (
    DISTURBED,
    FASTER,
    IMPLAUSIBLE,
    LEARNT_FROM,
    MOST_PASSED,
    PATIENCE,
    PER_CALL,
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

    def calls(self, keeper: GapKeeper) -> bool:
        """Whether one call ends what there is to do; see `keeper.kept`."""
        return keeper.keep(self.look, self.change)

    def kept_by(self, keeper: GapKeeper) -> bool:
        """As many calls as it takes."""
        assert any(self.calls(keeper) for _ in range(TRIES))
        return keeper.kept


@pytest.fixture
def keeper() -> GapKeeper:
    """One that knows the slower pace, as every search does that found the faster."""
    made = GapKeeper()
    assert Gpu(*[SLOW] * 20, FAST).kept_by(made)
    return made


def test_the_slower_pace_is_what_most_changes_leave() -> None:
    keeper = GapKeeper()
    gpu = Gpu(FAST, SLOW, FAST, SLOW, 1.23, 1.17, FAST, 1.2, SLOW, 1.22, 1.2, SLOW, FAST, SLOW)
    assert gpu.kept_by(keeper)
    assert (keeper.slower, keeper.faster) == (SLOW, FAST)
    assert gpu.changes == 12


def test_the_faster_pace_is_left_alone(keeper: GapKeeper) -> None:
    gpu = Gpu(FAST, noise=(0.07,))
    for looks in range(1, 4):
        assert gpu.calls(keeper) and keeper.kept
        assert (gpu.looks, gpu.changes) == (looks, 0)


@pytest.mark.parametrize("before", [(), (BUSY - FAST,)])
def test_one_look_alone_changes_nothing(keeper: GapKeeper, before: tuple[float, ...]) -> None:
    gpu = Gpu(FAST, noise=(*before, SLOW - FAST))
    assert gpu.calls(keeper) and keeper.kept
    assert gpu.changes == 0


def test_a_search_goes_on_with_the_next_call(keeper: GapKeeper) -> None:
    gpu = Gpu(*[SLOW] * (TRIES - 1), FAST, SLOW)
    for call in range(1, TRIES // PER_CALL + 1):
        assert not gpu.calls(keeper)
        assert gpu.changes == call * PER_CALL
    assert gpu.calls(keeper) and keeper.kept
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
    assert gpu.calls(keeper) and keeper.kept
    assert gpu.changes == 1
    assert DISTURBED * SLOW < BUSY


def test_a_neighbour_that_stays_at_work_ends_the_search(keeper: GapKeeper) -> None:
    gpu = Gpu(SLOW, BUSY, SLOW, FAST)
    assert gpu.calls(keeper) and not keeper.kept
    assert (gpu.looks, gpu.changes) == (2 + PATIENCE, 1)
    gpu.paces = [*[SLOW] * 20, FAST]
    assert gpu.kept_by(keeper)  # the next call learns anew: clocks may have been lowered


def test_nothing_is_learnt_beside_a_neighbour_at_work() -> None:
    keeper = GapKeeper()
    gpu = Gpu(SLOW, noise=tuple((0.1, 0.5, 0.2, 0.4, 0.3)[i % 5] for i in range(LEARNT_FROM)))
    assert not gpu.calls(keeper)
    assert (gpu.changes, keeper.slower) == (PER_CALL, SLOW)
    gpu.paces = [SLOW, SLOW, FAST]
    assert gpu.kept_by(keeper)


def test_where_there_is_one_pace_it_is_tried_ever_more_rarely() -> None:
    keeper, gpu = GapKeeper(), Gpu(FAST)
    passed = 1
    while passed <= 2 * MOST_PASSED:
        assert not gpu.kept_by(keeper)
        assert gpu.changes == TRIES
        for _ in range(min(passed, MOST_PASSED)):
            assert gpu.calls(keeper) and not keeper.kept
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


class Likely:
    """Looks with 3 % of noise; one change in ten leads to the faster pace."""

    def __init__(self, seed: int, beside: Callable[[random.Random, int], float]) -> None:
        self.random, self.beside = random.Random(seed), beside
        self.pace, self.looks = SLOW, 0

    def look(self) -> float:
        self.looks += 1
        return self.pace * self.random.uniform(0.97, 1.03) * self.beside(self.random, self.looks)

    def change(self) -> None:
        self.pace = FAST if self.random.random() < 0.1 else SLOW


def now_and_then(draw: random.Random, number: int) -> float:
    return draw.uniform(1.4, 4) if draw.random() < 0.03 else 1.0


def at_first(draw: random.Random, number: int) -> float:
    return draw.uniform(1.1, 1.6) if number <= LEARNT_FROM else 1.0


@pytest.mark.parametrize(("beside", "most_wrong"), [(now_and_then, 0.0), (at_first, 0.02)])
def test_what_is_kept_is_the_faster_pace(
    beside: Callable[[random.Random, int], float], most_wrong: float
) -> None:
    """Beside a neighbour that works now and then, and one that loads meanwhile."""
    runs, wrong, kept = 300, 0, 0
    for seed in range(runs):
        gpu, keeper = Likely(seed, beside), GapKeeper()
        for call in range(40):
            if call % 10 == 9:
                gpu.pace = SLOW  # another process was loaded
            keeper.keep(gpu.look, gpu.change)
            kept += keeper.kept
            if keeper.kept and gpu.pace == SLOW:
                wrong += 1
                break
    assert wrong <= most_wrong * runs
    assert kept > 0.6 * 40 * runs
