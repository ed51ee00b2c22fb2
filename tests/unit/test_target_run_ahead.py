"""The target's engine over a runner that starts steps before the ones before have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from gateway.board import Running
from services.target.commands import (
    Attach,
    Attached,
    Detach,
    Detached,
    Outcome,
    Plan,
    PlanEntry,
    Rejected,
    Release,
    Rewind,
    StepDone,
    StepKind,
)
from services.target.engine import MOST_ON_THEIR_WAY
from services.target.runner import Finish, Stamps
from slipstream.errors import PeerLost
from slipstream.grammar import Grammar, GrammarKind
from slipstream.v1 import common_pb2 as pb
from tests.fakes.run_ahead import MOST_COMMITS
from tests.fakes.target import expected_output
from tests.fakes.target_driver import WAIT_S, FakeEnd, entry
from tests.unit.run_ahead_rig import PROMPT, WANT, Rig, right, running, tokens


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running() as made:
        yield made


def test_plans_begin_before_the_ones_before_have_ended(rig: Rig) -> None:
    rig.admit(0, PROMPT)
    rig.plan_prefill()
    for ahead in range(1, 4):  # right after a last chunk that is on its way
        rig.plan(StepKind.DECODE, entry(0, 3 + ahead))
    rig.started(4)
    rig.quiet()
    done = [rig.land()[0] for _ in range(4)]
    assert [d.step for d in done] == [1, 2, 3, 4]
    assert [tokens(d) for d in done] == [[token] for token in WANT[:4]]


def test_one_answer_for_each_step_whoever_lets_it_end(rig: Rig) -> None:
    rig.live(limit=40)
    for ahead in range(1, 6):
        rig.plan(StepKind.DECODE, entry(0, 4 + ahead))
    rig.started(6)
    threads = [threading.Thread(target=rig.runner.land) for _ in range(5)]
    for thread in threads:
        thread.start()
    got = [rig.step_done() for _ in threads]
    assert [d.step for d in got] == [2, 3, 4, 5, 6]
    assert sum((tokens(d) for d in got), []) == WANT[1:6]
    rig.quiet()


def test_no_more_steps_than_there_is_room_for(rig: Rig) -> None:
    rig.live(limit=40)
    for ahead in range(1, 21):
        rig.plan(StepKind.DECODE, entry(0, 4 + ahead))
    rig.started(1 + MOST_ON_THEIR_WAY)
    time.sleep(0.05)
    assert len(rig.runner.started) == 1 + MOST_ON_THEIR_WAY
    got: list[int] = []
    for step in range(20):
        rig.started(min(21, step + 1 + MOST_ON_THEIR_WAY))
        got += tokens(rig.land()[0])
    assert got == WANT[1:21]


def test_a_step_of_nothing_waits_its_turn_and_blocks_nobody(rig: Rig) -> None:
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.plan(StepKind.DECODE)
    rig.admit(1, PROMPT)
    rig.plan_prefill(1)
    rig.started(3)
    rig.quiet()
    assert [d.step for d in (*rig.land(), rig.step_done())] == [2, 3]
    assert tokens(rig.land()[0]) == WANT[:1]
    rig.plan(StepKind.DECODE)
    assert rig.step_done().step == 5


def test_a_request_that_ended_is_padding_in_the_next_step(rig: Rig) -> None:
    rig.admit(0, PROMPT, limit=5)
    rig.plan_prefill()
    for _ in range(3):
        rig.plan(StepKind.DECODE, entry(0, 6))
    rig.started(4)
    first, last, *later = rig.land(4)
    assert tokens(first) == WANT[:1] and first.entries[0].result.finish is Finish.NONE
    assert tokens(last) == WANT[1:2] and last.entries[0].result.finish is Finish.LIMIT
    for done in later:
        assert done.entries[0].outcome is Outcome.PADDING
        assert not done.entries[0].result.tokens and done.entries[0].result.nodes == 0
    known = rig.decode(entry(0, 6))
    assert known.entries[0].outcome is Outcome.PADDING
    rig.check()


def test_a_slot_changes_hands_while_its_step_is_on_its_way(rig: Rig) -> None:
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.send(lambda n: Release(n, 0, 1))
    rig.admit(0, [9, 9], epoch=2)
    rig.plan(StepKind.PREFILL, PlanEntry(0, 2, 2, first=0, count=2, last=True))
    rig.plan(StepKind.DECODE, entry(0, 3, epoch=2), entry(0, 5))
    rejected = rig.next()
    assert isinstance(rejected, Rejected) and rejected.code == pb.REJECT_CODE_STALE_EPOCH
    rig.started(4)
    old, new, both = rig.land(3)
    assert (old.entries[0].epoch, tokens(old)) == (1, WANT[1:2])
    want = expected_output([9, 9], 10, 1000)
    assert (new.entries[0].epoch, tokens(new), tokens(both)) == (2, want[:1], want[1:2])
    assert [e.outcome for e in both.entries] == [Outcome.DONE, Outcome.DROPPED]
    rig.check()
    assert both.free_pages == 63


@pytest.mark.parametrize("nodes", [1, 4, 8, 16])
def test_bounds_are_those_of_the_gateway(rig: Rig, nodes: int) -> None:
    """What the gateway reserves is enough, and where steps may give a block each, needed."""
    limit = 30
    running = Running(None, 0, 1, limit, rows=3, tokens=3)  # type: ignore[arg-type]
    rig.admit(0, PROMPT, limit=limit)
    rig.plan_prefill()
    for _ in range(3):
        needed = running.positions(nodes, MOST_COMMITS)
        bound = min(3 + running.decodes * min(nodes, MOST_COMMITS), limit) + nodes
        assert bound <= needed and (nodes < MOST_COMMITS or bound == needed)
        number = rig.plan(StepKind.DECODE, entry(0, bound - 1, nodes=nodes))
        rig.rejected(number, pb.REJECT_CODE_LENGTH)
        rig.plan(StepKind.DECODE, entry(0, needed, nodes=nodes))
        running.decodes += 1
    rig.quiet()


def test_bounds_come_down_with_results(rig: Rig) -> None:
    rig.live(limit=60)
    for ahead in range(3):
        rig.plan(StepKind.DECODE, entry(0, 3 + MOST_COMMITS * ahead + 8, nodes=8))
    rig.started(4)
    assert [tokens(d) for d in rig.land(3)] == [[token] for token in WANT[1:4]]
    rig.plan(StepKind.DECODE, entry(0, 6 + 8, nodes=8))
    rig.started(5)
    assert tokens(rig.land()[0]) == WANT[4:5]


def test_a_misnumbered_plan_is_answered_in_its_turn(rig: Rig) -> None:
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.started(2)
    rig.send(lambda n: Plan(n, 9, 0, StepKind.DECODE, [entry(0, 5)]))
    rig.runner.land()
    first, refused, dropped = (rig.next() for _ in range(3))
    assert isinstance(first, StepDone) and first.step == 2
    assert isinstance(refused, Rejected) and refused.code == pb.REJECT_CODE_STEP_ORDER
    assert isinstance(dropped, StepDone) and dropped.entries[0].outcome is Outcome.DROPPED


def test_linked_steps_run_ahead_and_publish_on_the_device(rig: Rig) -> None:
    end = rig.attach_device()
    end.propose = lambda step: [right(0, {2: 1, 3: 5}[step], 4)]
    rig.admit(0, PROMPT)
    rig.plan_prefill(session=7)
    rig.plan(StepKind.DECODE, entry(0, 7, nodes=4), session=7)
    rig.plan(StepKind.DECODE, entry(0, 11, nodes=4), session=7)
    rig.plan(StepKind.DECODE, entry(0, 12), session=7)
    rig.started(4)
    operations = [("room", 1), ("proposal", 2), ("proposal", 3), ("room", 4)]
    assert end.operations == [both for o in operations for both in (o, ("publish", o[1]))]
    assert end.passed_steps == []
    done = rig.land(4)
    assert [tokens(d) for d in done] == [WANT[:1], WANT[1:5], WANT[5:9], WANT[9:10]]
    assert end.passed_steps == [1, 2, 3, 4]
    spans = [
        (r.first_row, r.count, r.anchor, r.caught_up) for s in (1, 2, 3, 4) for r in end.records[s]
    ]
    assert spans == [
        (0, 3, WANT[0], True), (3, 4, WANT[4], True), (7, 4, WANT[8], True), (11, 1, WANT[9], True)
    ]  # fmt: skip
    (slot,) = rig.engine._slots
    assert slot.cursor == rig.runner.cursors[0] == 12


def test_rewind_waits_for_the_cursor(rig: Rig) -> None:
    end = rig.attach_device()
    rig.live(session=7)
    rig.plan(StepKind.DECODE, entry(0, 5), session=7)
    rig.send(lambda n: Rewind(n, 0, 1, 1))
    number = rig.send(lambda n: Rewind(n, 0, 1, 2))
    rig.started(2)
    assert tokens(rig.land()[0]) == WANT[1:2]
    rig.rejected(number, pb.REJECT_CODE_LENGTH)
    rig.plan(StepKind.DECODE, entry(0, 6, replay=9), session=7)
    rig.started(3)
    rig.land()
    assert [(r.first_row, r.count) for r in end.records[3]] == [(1, 4)]


def test_attach_while_steps_are_on_their_way(rig: Rig) -> None:
    old = rig.attach_device(7)
    rig.live(session=7)
    rig.plan(StepKind.DECODE, entry(0, 5), session=7)
    rig.plan(StepKind.DECODE, entry(0, 6))
    rig.started(3)
    rig.send_attach(8)
    assert rig.next() == Detached(7, "session 8 takes its place")
    assert old.ended == ["session 8 takes its place"]
    rig.land(2)
    assert rig.next() == Attached(8, "cuda_ipc")
    assert old.passed_steps == [1, 2]
    (slot,) = rig.engine._slots
    assert slot.cursor == rig.runner.cursors[0] == 0
    rig.plan(StepKind.DECODE, entry(0, 7, replay=99), session=8)
    rig.started(4)
    rig.land()
    new = rig.device_ends[-1]
    assert [(r.first_row, r.count, r.caught_up) for r in new.records[4]] == [(0, 6, True)]


def test_an_attach_that_fails_leaves_the_steps_alone(rig: Rig) -> None:
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.connector.answer = lambda session: PeerLost("nobody there")
    number = rig.send(lambda n: Attach(n, 3, 9, "draft:1"))
    rig.rejected(number, pb.REJECT_CODE_PEER)
    assert tokens(rig.land()[0]) == WANT[1:2]


@pytest.mark.parametrize("how", ["dies", "detached"])
def test_a_session_that_ends_leaves_empty_steps(rig: Rig, how: str) -> None:
    end = rig.attach_device()
    end.propose = lambda step: [right(0, step, 4)]
    rig.live(session=7)
    for ahead in range(2):
        rig.plan(StepKind.DECODE, entry(0, 3 + 8 * ahead + 4, nodes=4), session=7)
    rig.started(3)
    if how == "dies":
        end.die("watchdog")
    else:
        rig.send(lambda n: Detach(n, 7, "watchdog"))
    assert rig.next() == Detached(7, "watchdog")
    assert end.ended == ["watchdog"]
    rig.plan(StepKind.DECODE, entry(0, 3 + 16 + 4, nodes=4), session=7)  # was on its way too
    rig.started(4)
    assert [tokens(d) for d in rig.land(3)] == [WANT[1:2], WANT[2:3], WANT[3:4]]
    assert end.passed_steps == [1, 2, 3]
    assert len(end.ended) == 1
    assert [step for _, step in end.operations] == [1, 1, 2, 2, 3, 3]
    rig.attach_device(8)


def test_a_gateway_that_goes_with_steps_on_their_way(rig: Rig) -> None:
    end = rig.attach_device()
    rig.live(session=7)
    for ahead in range(3):
        rig.plan(StepKind.DECODE, entry(0, 4 + ahead), session=7)
    rig.started(4)
    gone = threading.Event()
    rig.engine.close(gone.set)
    assert not gone.wait(0.05)
    rig.runner.land_all()
    assert gone.wait(WAIT_S)
    assert [rig.step_done().step for _ in range(3)] == [2, 3, 4]
    assert end.passed_steps == [1, 2, 3, 4] and end.ended == ["the gateway went"]
    rig.open()
    assert rig.step == 4
    rig.live()  # epochs begin anew


def test_a_drain_says_every_step_first(rig: Rig) -> None:
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    drained = threading.Event()
    rig.engine.drain(drained.set)
    rig.rejected(rig.admit(1, PROMPT), pb.REJECT_CODE_DRAINING)
    rig.send(lambda n: Release(n, 0, 1))
    assert not drained.wait(0.05)
    assert tokens(rig.land()[0]) == WANT[1:2]
    assert drained.wait(WAIT_S)


def test_a_flight_that_raises_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.plan(StepKind.DECODE, entry(0, 6))
    rig.started(3)
    rig.runner.land(1, RuntimeError("illegal address"))
    rig.engine._thread.join(WAIT_S)
    assert [str(error) for error in rig.failure] == ["illegal address"]
    assert rig.events.empty() and "the engine failed" in caplog.text
    rig.runner.land_all()


def test_a_flight_that_raises_while_it_is_waited_for() -> None:
    rig = Rig()
    rig.live()
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.plan(StepKind.DECODE, entry(0, 6))
    rig.send(lambda n: Rewind(n, 0, 1, 0))
    rig.started(3)
    rig.runner.land(2, RuntimeError("illegal address"))
    rig.engine._thread.join(WAIT_S)
    assert [str(error) for error in rig.failure] == ["illegal address"]
    assert rig.step_done().step == 2 and rig.events.empty()


def test_a_step_with_a_grammar_begins_when_the_others_have_ended(rig: Rig) -> None:
    rig.live(0)
    rig.admit(1, PROMPT, grammar=Grammar(GrammarKind.REGEX, "a+"))
    rig.plan(StepKind.DECODE, entry(0, 5))
    rig.plan_prefill(1)
    rig.plan(StepKind.DECODE, entry(0, 6))
    rig.plan(StepKind.DECODE, entry(0, 7), entry(1, 4))
    rig.started(2)
    assert len(rig.runner.started) == 2
    rig.land()
    rig.started(4)
    time.sleep(0.02)
    assert len(rig.runner.started) == 4, "a step without one may begin beside it"
    assert [d.step for d in rig.land(2)] == [3, 4]
    rig.started(5)
    assert tokens(rig.land()[0], 1) == WANT[1:2]


def test_a_session_through_the_host_runs_alone(rig: Rig) -> None:
    end = rig.attach()
    assert isinstance(end, FakeEnd)
    rig.live(session=7)
    rig.plan(StepKind.DECODE, entry(0, 5), session=7)
    rig.plan(StepKind.DECODE, entry(0, 6), session=7)
    rig.started(2)
    time.sleep(0.02)
    assert len(rig.runner.started) == 2
    rig.land()
    rig.started(3)
    rig.land()
    assert [m.step for m in end.messages] == [1, 2, 3]
    assert [(r.first_row, r.count) for m in end.messages for r in m.records] == [
        (0, 3), (3, 1), (4, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("again", [False, True])
def test_a_release_before_the_host_could_publish(rig: Rig, again: bool) -> None:
    """Nothing is read of a slot that nobody, or another request, holds."""
    end = rig.attach()
    rig.live(session=7)
    rig.live(1, session=7)
    rig.plan(StepKind.DECODE, entry(0, 5), entry(1, 5), session=7)
    rig.send(lambda n: Release(n, 0, 1))
    if again:
        rig.admit(0, PROMPT, epoch=2)
    assert [tokens(d) for d in rig.land()] == [WANT[1:2]]
    assert [(r.slot, r.count) for r in end.messages[-1].records] == [(1, 1)]


def test_more_entries_than_slots(rig: Rig) -> None:
    """What a link does not say moves no cursor."""
    rig.attach_device()
    rig.live(session=7)
    rig.plan(StepKind.DECODE, *[entry(8 + n, 5) for n in range(8)], entry(0, 5), session=7)
    for _ in range(8):
        assert isinstance(rig.next(), Rejected)
    rig.started(2)
    assert tokens(rig.land()[0], 8) == WANT[1:2]
    (slot,) = rig.engine._slots
    assert slot.cursor == 3


def test_a_pause_of_the_gateway_is_no_wait_for_the_draft(rig: Rig) -> None:
    rig.runner.stamp = lambda: Stamps(began=time.monotonic_ns(), ended=time.monotonic_ns())
    rig.attach_device()
    rig.live(session=7)
    waited: list[int] = []
    for reserve, nodes in ((7, 4), (5, 1)):
        time.sleep(0.3)
        rig.plan(StepKind.DECODE, entry(0, reserve, nodes=nodes), session=7)
        rig.started(len(waited) + 2)
        time.sleep(0.05)
        waited.append(rig.land()[0].times.waited)
    assert 0.04e9 < waited[0] < 0.3e9 and waited[1] == 0
