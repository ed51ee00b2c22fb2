"""The draft's engine against a target made by hand: sessions, their ends, and refusals."""

from __future__ import annotations

import time

import pytest

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
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
from slipstream.v1 import common_pb2 as pb
from tests.unit.draft_rig import WAIT_S, FakeEnd, Rig, live


@pytest.mark.parametrize("late", [True, False])
def test_whoever_connects_when_the_engine_is_gone_is_ended(late: bool) -> None:
    with Rig() as rig:
        rig.send(Attach, 8, 5)
        assert rig.event() == Detached(7, "session 8 takes its place")
        end = FakeEnd(8)
        while 8 not in rig.peers.expected:
            time.sleep(0.001)
        if late:
            rig.engine.close("the gateway left")
            rig.engine.join(WAIT_S)
            rig.connect(8, end)
        else:
            rig.engine._carry_out = lambda item: rig.connect(8, end)  # type: ignore[method-assign]
            rig.send(Release, 0, 1)
            rig.engine.close("the gateway left")
            rig.engine.join(WAIT_S)
        assert end.mailbox.take(5) is None
        assert not end.alive and "gave the session up" in end.reason
        assert rig.peers.forgotten == [8]


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
