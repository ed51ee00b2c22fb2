"""The target's engine under random commands: every plan has one StepDone, every page comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.target.pages import NoPages, PagePool
from tests.unit.target_machine import SEEN, Machine

ACTIONS = [
    *["admit"] * 4,
    *["prefill"] * 6,
    *["decode"] * 10,
    *["land"] * 12,
    *["attach", "rewind", "release"] * 2,
    *["bad_plan", "misnumbered_plan", "detach", "lose_gateway"],
]


def life(ahead: bool) -> None:
    @settings(
        max_examples=80,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        actions=st.lists(st.sampled_from(ACTIONS), min_size=30, max_size=160),
        seed=st.integers(0, 99),
    )
    def random_life(actions: list[str], seed: int) -> None:
        machine = Machine(seed, ahead)
        for action in actions:
            getattr(machine, action)()
            machine.books_agree()
        machine.lose_gateway()

    random_life()


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_random_commands(ahead: bool) -> None:
    SEEN.clear()
    life(ahead)
    assert min(SEEN["accepted"], SEEN["padding"], SEEN["finished"]) >= 10, SEEN
    if ahead:
        assert min(SEEN["ahead"], SEEN["late"], SEEN["published"]) >= 10, SEEN


def test_pages_are_neighbours_where_they_can_be() -> None:
    pool = PagePool(64, 16)
    first = pool.allocate(4)
    assert first == [0, 1, 2, 3]
    second = pool.allocate(4)
    assert second == [34, 35, 36, 37], "the middle of what is free"
    assert pool.allocate(3, after=3) == [4, 5, 6]
    assert pool.allocate(2, after=37) == [38, 39]
    pool.release(second)
    assert pool.free == 64 - 4 - 3 - 2
    with pytest.raises(NoPages):
        pool.allocate(56)
    rest = pool.allocate(55, after=6)
    assert len(set(rest)) == 55 and pool.free == 0


def test_shared_pages_are_freed_by_their_last_holder() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.check([pages, pages])
    pool.release(pages)
    assert pool.free == 2
    pool.check([pages])
    with pytest.raises(AssertionError, match="held"):
        pool.check([pages, pages])
    pool.release(pages)
    assert pool.free == 4
    with pytest.raises(ValueError, match="free already"):
        pool.release(pages)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(pages)
