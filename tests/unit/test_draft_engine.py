"""The draft's engine against a target made by hand: order, context, pages."""

from __future__ import annotations

import time

import pytest

from services.draft.commands import Behind, Live, Release
from slipstream.handoff.base import ContextMessage
from slipstream.tree import resolve_spec
from tests.unit.draft_rig import WAIT_S, Request, Rig, live

CHAIN = resolve_spec("chain", block_size=16)


def chain_of(request: Request, count: int) -> list[int]:
    """The anchor and the `count` tokens that the target will draw after it."""
    ahead = Request(request.slot, request.epoch, request.tokens, request.vocab)
    ahead.draw(count)
    return ahead.tokens[-count - 1 :]


def test_a_request_from_prefill_to_drafts() -> None:
    with Rig() as rig:
        request = rig.admit(3, 11, tree=CHAIN)
        rig.prefill(request)
        step = rig.plan((request, 16), after=1)
        assert rig.event() == Live(7, 3, 11, 3)
        tree = rig.proposal(step)[3]
        assert (tree.epoch, tree.tokens) == (11, chain_of(request, 15))
        assert tree.parents == list(range(-1, 15))
        request.draw(16)
        rig.context(step, request.record())
        step = rig.plan((request, 5), after=step)
        assert rig.proposal(step)[3].tokens == chain_of(request, 4)
        rig.quiet()


def test_only_live_slots_with_nodes_get_trees() -> None:
    with Rig() as rig:
        one, two, late = rig.admit(0, 1), rig.admit(1, 2), rig.admit(2, 3)
        rig.prefill(one, two)
        step = rig.plan((one, 8), (two, 1), (late, 8), after=1)
        trees = rig.proposal(step)
        assert list(trees) == [0]
        assert 1 < len(trees[0].tokens) <= 8
        assert rig.runner.drafted == 1
        assert {rig.event(), rig.event()} == {Live(7, 0, 1, 3), Live(7, 1, 2, 3)}
        rig.quiet()


def test_drafts_wait_for_their_context_and_only_for_it() -> None:
    with Rig() as rig:
        mine, other = rig.admit(0, 1), rig.admit(1, 2)
        rig.prefill(mine, other)
        first = rig.plan((other, 1), after=1)
        second = rig.plan((mine, 4), after=1)  # the other group is still on the target
        assert rig.proposal(first) == {}
        assert list(rig.proposal(second)) == [0]
        mine.draw(2)
        other.draw(2)
        third = rig.plan((other, 4), after=first)
        time.sleep(0.02)
        assert rig.end.waiting.is_set() and rig.end.proposals.empty()
        rig.context(second, mine.record())  # comes early and waits
        rig.context(first, other.record())
        assert list(rig.proposal(third)) == [1]


def test_rows_that_are_there_are_skipped() -> None:
    with Rig() as rig:
        request = rig.admit(0, 1)
        rig.prefill(request)
        live(rig, request)
        step = rig.plan((request, 4), after=rig.step)
        assert list(rig.proposal(step)) == [0]
        request.draw(3)
        request.cursor = 1  # the target was told to go back
        rig.context(step, request.record())
        step = rig.plan((request, 4), after=step)
        assert rig.proposal(step)[0].tokens[0] == request.tokens[-1]
        assert rig.runner.rows_written == len(request.tokens) - 1
        rig.quiet()


def test_a_gap_is_said_once_and_healed_by_a_replay() -> None:
    with Rig() as rig:
        request = rig.admit(0, 1)
        rig.prefill(request)
        live(rig, request)
        for lost in (1, 0, 0):  # a row is lost; what was in flight is no new gap
            step = rig.plan((request, 4), after=rig.step)
            rig.proposal(step)
            request.draw(2)
            request.cursor += lost
            rig.context(step, request.record())
        step = rig.plan((request, 4), after=step)
        assert rig.proposal(step) == {}
        behind = rig.event()
        assert isinstance(behind, Behind)
        assert (behind.slot, behind.epoch, behind.rows) == (0, 1, 4) and "gap" in behind.reason
        rig.quiet()
        request.cursor = behind.rows  # Rewind, then a replay in two parts
        rig.context(step, request.record(2))
        step = rig.plan((request, 1), after=step)
        rig.proposal(step)
        rig.context(step, request.record())
        step = rig.plan((request, 4), after=step)
        assert rig.proposal(step)[0].tokens[0] == request.tokens[-1]
        assert rig.event() == Live(7, 0, 1, len(request.tokens) - 1)
        rig.quiet()


@pytest.mark.parametrize("changed", [{"anchor": 10**6}, {"anchor": -1}, {"count": 7}])
def test_a_bad_record_writes_nothing(changed: dict[str, int]) -> None:
    with Rig() as rig:
        request, other = rig.admit(0, 1), rig.admit(1, 2)
        step = rig.plan((request, 0), (other, 0), after=0, decode=False)
        request.draw()
        other.draw()
        rig.proposal(step)
        rig.context(step, request.record(**changed), other.record())
        step = rig.plan((request, 4), (other, 4), after=step)
        trees = rig.proposal(step)
        assert 0 not in trees
        behind = rig.event()
        assert isinstance(behind, Behind) and (behind.slot, behind.rows) == (0, 0)
        # A count that does not fit the bytes leaves no record of the message trusted.
        assert (1 in trees) == ("count" not in changed)


def test_rows_beyond_the_start_are_not_trusted() -> None:
    with Rig() as rig:
        request = rig.admit(0, 1)
        rig.prefill(request)
        live(rig, request)
        step = rig.plan((request, 1), after=rig.step)
        rig.proposal(step)
        short = Request(0, 1, request.tokens[:2], request.vocab)
        rig.context(step, short.record())
        step = rig.plan((request, 4), after=step)
        assert rig.proposal(step) == {}
        behind = rig.event()
        assert isinstance(behind, Behind) and behind.rows == 0


def test_records_of_an_old_epoch_are_dropped() -> None:
    with Rig() as rig:
        old = rig.admit(0, 1)
        rig.prefill(old)
        live(rig, old)
        step = rig.plan((old, 1), after=rig.step)
        rig.proposal(step)
        old.draw(2)
        rig.send(Release, 0, 1)
        new = rig.admit(0, 2, (9, 9, 9, 9))
        rig.context(step, old.record())
        rig.prefill(new)
        step = rig.plan((new, 4), after=rig.step)
        assert rig.proposal(step)[0].tokens[0] == new.tokens[-1]
        assert rig.event() == Live(7, 0, 2, 4)
        rig.quiet()


def test_no_pages_then_pages() -> None:
    with Rig(pages=4, page_size=8, block_size=8) as rig:
        one = rig.admit(0, 1, range(10, 20))
        two = rig.admit(1, 2, range(30, 42))
        rig.prefill(one, two)
        step = rig.plan((one, 4), (two, 4), after=1)
        assert list(rig.proposal(step)) == [0]
        assert rig.event() == Live(7, 0, 1, 10)
        behind = rig.event()
        assert isinstance(behind, Behind) and behind.rows == 0 and "pages" in behind.reason
        two.draw()
        two.cursor = 0  # what is replayed now is turned away in silence
        rig.context(step, two.record())
        rig.proposal(rig.plan((two, 1), after=step))
        rig.quiet()
        rig.send(Release, 0, 1)
        again = rig.event()
        assert isinstance(again, Behind) and (again.slot, again.rows) == (1, 0)
        two.cursor = 0
        rig.context(rig.step, two.record())
        step = rig.plan((two, 4), after=rig.step)
        assert list(rig.proposal(step)) == [1]
        assert rig.event() == Live(7, 1, 2, 13)


def test_a_wrong_row_ends_the_engine() -> None:
    rig = Rig()
    request = rig.admit(0, 1)
    rig.prefill(request)
    live(rig, request)
    step = rig.plan((request, 4), after=rig.step)
    rig.proposal(step)
    request.tokens.append(request.tokens[-1])  # not what the target draws
    request.draw()
    rig.context(step, request.record())
    rig.plan((request, 4), after=step)
    assert isinstance(rig.closed.get(timeout=WAIT_S), AssertionError)


def test_message_rows_may_be_a_memoryview() -> None:
    with Rig() as rig:
        request = rig.admit(0, 1)
        rig.proposal(rig.plan((request, 0), after=0, decode=False))
        request.draw()
        record, rows = request.record()
        rig.end.mailbox.put(ContextMessage(1, (record,), memoryview(bytearray(rows))))
        assert list(rig.proposal(rig.plan((request, 2), after=1))) == [0]
