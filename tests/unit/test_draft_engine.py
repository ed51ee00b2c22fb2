"""The draft's engine against a target made by hand: order, context, sessions, refusals."""

from __future__ import annotations

import time

import pytest

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Behind,
    Detach,
    Detached,
    Live,
    Malformed,
    Plan,
    PlanEntry,
    Rejected,
    Release,
)
from slipstream.errors import PeerLost
from slipstream.handoff.base import ContextMessage
from slipstream.tree import resolve_spec
from slipstream.v1 import common_pb2 as pb
from tests.unit.draft_rig import WAIT_S, FakeEnd, Request, Rig

CHAIN = resolve_spec("chain", block_size=16)


def chain_of(request: Request, count: int) -> list[int]:
    """The anchor and the `count` tokens that the target will draw after it."""
    ahead = Request(request.slot, request.epoch, request.tokens, request.vocab)
    ahead.draw(count)
    return ahead.tokens[-count - 1 :]


def live(rig: Rig, request: Request) -> None:
    """Has the first decode plan run, with nothing drafted."""
    step = rig.plan((request, 1), after=rig.step)
    assert rig.event() == Live(rig.session, request.slot, request.epoch, len(request.tokens) - 1)
    assert rig.proposal(step) == {}
    request.draw()
    rig.context(step, request.record())


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


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (PlanEntry(64, 1, 4), pb.REJECT_CODE_SLOT_RANGE),
        (PlanEntry(5, 1, 4), pb.REJECT_CODE_SLOT_EMPTY),
        (PlanEntry(1, 9, 4), pb.REJECT_CODE_STALE_EPOCH),
        (PlanEntry(1, 2, 0), pb.REJECT_CODE_BAD_VALUE),
        (PlanEntry(1, 2, 257), pb.REJECT_CODE_BAD_VALUE),
        (PlanEntry(0, 1, 4), pb.REJECT_CODE_BAD_VALUE),  # twice
    ],
)
def test_a_refused_entry_leaves_the_others(entry: PlanEntry, code: int) -> None:
    with Rig() as rig:
        good = rig.admit(0, 1)
        rig.admit(1, 2)
        rig.prefill(good)
        step = rig.step + 1
        rig.step = step
        entries = (PlanEntry(0, 1, 4), entry)
        number = rig.send(Plan, step, rig.session, True, entries, 1)
        assert list(rig.proposal(step)) == [0]
        assert rig.event() == Live(7, 0, 1, 3)
        refused = rig.event()
        assert isinstance(refused, Rejected)
        assert (refused.command, refused.step, refused.code) == (number, step, code)
        assert (refused.slot, refused.epoch) == (entry.slot, entry.epoch)
        rig.quiet()


def test_nothing_is_said_of_slots_that_are_not_drafted_for() -> None:
    with Rig() as rig:
        rig.step = 1
        rig.send(Plan, 1, rig.session, True, (PlanEntry(5, 1, 1),), 0)
        assert rig.proposal(1) == {}
        rig.quiet()


def test_refused_commands() -> None:
    with Rig() as rig:
        rig.admit(0, 1)
        cases = [
            (rig.send(Admit, 7, 0, 2, None, 0.0, 0, 0), pb.REJECT_CODE_STALE_EPOCH),
            (rig.send(Admit, 7, 64, 2, None, 0.0, 0, 0), pb.REJECT_CODE_SLOT_RANGE),
            (rig.send(Admit, 8, 1, 2, None, 0.0, 0, 0), pb.REJECT_CODE_SESSION),
            (rig.send(Release, 0, 9), pb.REJECT_CODE_STALE_EPOCH),
            (rig.send(Release, 3, 9), pb.REJECT_CODE_SLOT_EMPTY),
            (rig.send(Attach, 0, 1), pb.REJECT_CODE_BAD_VALUE),
            (rig.send(Attach, 7, 1), pb.REJECT_CODE_BAD_VALUE),
            (rig.send(Malformed, 1, 2, "temperature"), pb.REJECT_CODE_BAD_VALUE),
            (rig.send(Plan, 1, 8, True, (), 0), pb.REJECT_CODE_SESSION),
        ]  # fmt: skip
        for number, code in cases[:6]:
            refused = rig.event()
            assert isinstance(refused, Rejected) and (refused.command, refused.code) == (
                number,
                code,
            )


def test_after_must_be_an_earlier_step() -> None:
    with Rig() as rig:
        rig.admit(0, 1)
        rig.step = 1
        number = rig.send(Plan, 1, rig.session, True, (PlanEntry(0, 1, 4),), 1)
        assert rig.proposal(1) == {}
        refused = rig.event()
        assert isinstance(refused, Rejected)
        assert (refused.command, refused.code) == (number, pb.REJECT_CODE_BAD_VALUE)


def test_steps_come_in_order() -> None:
    with Rig(first_step=5) as rig:
        rig.proposal(rig.plan(after=4))
        number = rig.send(Plan, 5, 7, True, (), 4)
        refused = rig.event()
        assert isinstance(refused, Rejected)
        assert (refused.command, refused.code) == (number, pb.REJECT_CODE_STEP_ORDER)
        rig.send(Plan, 8, 7, True, (), 4)
        refused = rig.event()
        assert isinstance(refused, Rejected) and refused.code == pb.REJECT_CODE_STEP_ORDER
        detached = rig.event()
        assert isinstance(detached, Detached) and "gap" in detached.reason
        assert not rig.end.alive


def test_plans_before_the_target_came_are_refused_but_requests_are_not() -> None:
    with Rig(attach=False) as rig:
        rig.send(Attach, 7, 1)
        request = rig.admit(0, 1)
        number = rig.send(Plan, 1, 7, True, (), 0)
        refused = rig.event()
        assert isinstance(refused, Rejected)
        assert (refused.command, refused.code) == (number, pb.REJECT_CODE_SESSION)
        rig.end = FakeEnd(7)
        rig.connect(7, rig.end)
        assert rig.event() == Attached(7, "grpc")
        rig.prefill(request)
        assert list(rig.proposal(rig.plan((request, 4), after=1))) == [0]


def test_a_target_that_does_not_come() -> None:
    with Rig(attach=False) as rig:
        number = rig.send(Attach, 7, 1)
        rig.connect(7, PeerLost("nobody came"))
        refused = rig.event()
        assert isinstance(refused, Rejected)
        assert (refused.command, refused.session) == (number, 7)
        assert (refused.code, refused.reason) == (pb.REJECT_CODE_PEER, "nobody came")
        rig.session = 8
        rig.end = rig.attach(8, 1)
        rig.proposal(rig.plan(after=0))


def test_detach_releases_a_parked_wait() -> None:
    with Rig() as rig:
        request = rig.admit(0, 1)
        rig.prefill(request)
        live(rig, request)
        rig.plan((request, 4), after=rig.step + 0)
        rig.proposal(rig.step)
        rig.plan((request, 4), after=rig.step)  # its context never comes
        assert rig.end.waiting.wait(WAIT_S)
        time.sleep(0.02)
        rig.plan((request, 4), after=rig.step)
        rig.send(Detach, 7, "enough")
        rig.send(Admit, 7, 1, 5, None, 0.0, 0, 0)  # of the old session: dropped in silence
        rig.send(Release, 0, 1)
        assert rig.event() == Detached(7, "enough")
        assert rig.end.proposals.empty()
        rig.session, rig.step = 8, 20
        rig.end = rig.attach(8, 21)
        again = rig.admit(0, 1)
        again.tokens = request.tokens
        step = rig.plan((again, 1), after=20)
        rig.proposal(step)
        rig.context(step, again.record())  # the replay
        assert list(rig.proposal(rig.plan((again, 4), after=step))) == [0]
        assert rig.event() == Live(8, 0, 1, len(again.tokens) - 1)
        rig.quiet()


def test_the_peer_ends_while_its_context_is_awaited() -> None:
    with Rig() as rig:
        rig.proposal(rig.plan(after=0))
        rig.plan(after=1)
        rig.plan(after=1)
        assert rig.end.waiting.wait(WAIT_S)
        rig.end.end("the stream from the target broke")
        assert rig.event() == Detached(7, "the stream from the target broke")
        assert rig.end.proposals.empty()


def test_an_idle_engine_notices_a_dead_session() -> None:
    with Rig() as rig:
        rig.admit(0, 1)
        rig.end.end("gone")
        assert rig.event() == Detached(7, "gone")
        assert rig.runner.contexts == []


def test_a_new_session_takes_the_place_of_the_old() -> None:
    with Rig() as rig:
        rig.admit(0, 1)
        rig.proposal(rig.plan(after=0))
        rig.plan(after=1)
        assert rig.end.waiting.wait(WAIT_S)
        rig.send(Attach, 9, 3)
        detached = rig.event()
        assert isinstance(detached, Detached) and detached.session == 7
        rig.send(Attach, 10, 3)  # before 9 was connected
        detached = rig.event()
        assert isinstance(detached, Detached) and detached.session == 9
        late = FakeEnd(9)
        rig.connect(9, late)
        end = FakeEnd(10)
        rig.connect(10, end)
        assert rig.event() == Attached(10, "grpc")
        assert not late.alive and end.alive
        assert rig.peers.forgotten == [9]


def test_close_finishes_the_steps_that_were_given() -> None:
    with Rig() as rig:
        request = rig.admit(0, 1)
        rig.prefill(request)
        step = rig.plan((request, 4), after=1)
        rig.engine.close("the gateway left")
        assert list(rig.proposal(step)) == [0]
        assert rig.event() == Live(7, 0, 1, 3)
        assert rig.event() == Detached(7, "the gateway left")
        assert not rig.end.alive


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
