"""The target's engine with a fake runner: order, sessions, cursor, ends. No gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from services.target.commands import (
    Attach,
    Detach,
    Detached,
    Event,
    Outcome,
    PlanEntry,
    Release,
    Rewind,
    StepKind,
)
from services.target.runner import Finish
from slipstream.handoff.base import (
    ContextMessage,
    Proposal,
    ProposedTree,
)
from slipstream.v1 import common_pb2 as pb
from tests.fakes.encoding import decode_rows, next_token
from tests.fakes.target import FakeTargetRunner, expected_output
from tests.fakes.target_driver import WAIT_S, Driver, entry


@pytest.fixture
def driver() -> Iterator[Driver[FakeTargetRunner]]:
    made = Driver(FakeTargetRunner(eos_ids=(2,)))
    yield made
    made.engine.stop()
    assert not made.failure


def chain(slot: int, start: int, anchor: int, length: int, wrong_from: int = 99) -> ProposedTree:
    """The fake model's own continuation, wrong from a depth on."""
    tokens = [anchor]
    for depth in range(1, length):
        token = next_token(tokens[-1], start + depth, 1000)
        tokens.append(token if depth < wrong_from else (token + 1) % 1000)
    return ProposedTree(slot, 1, tokens, list(range(-1, length - 1)))


def test_plain_decode_gives_the_model_s_tokens(driver: Driver[FakeTargetRunner]) -> None:
    prompt = [5, 6, 7]
    want = expected_output(prompt, 20, 1000)
    driver.admit(0, prompt, limit=20)
    first = driver.prefill(0, 0, 3)
    got = list(first.entries[0].result.tokens)
    while True:
        done = driver.decode(entry(0, 21))
        result = done.entries[0].result
        got += result.tokens
        assert (result.nodes, result.accepted) == (1, 0)
        if result.finish is not Finish.NONE:
            break
    assert got == want
    assert result.finish is Finish.LIMIT
    assert done.times.computed > 0 and done.times.started > 0 and done.times.queued > 0


def test_chunked_prefill_equals_whole(driver: Driver[FakeTargetRunner]) -> None:
    prompt = list(range(10, 40))
    driver.admit(0, prompt)
    driver.admit(1, prompt)
    whole = driver.prefill(0, 0, 30).entries[0].result.tokens
    assert not driver.prefill(1, 0, 7, last=False).entries[0].result.tokens
    assert not driver.prefill(1, 7, 16, last=False).entries[0].result.tokens
    assert driver.prefill(1, 23, 7).entries[0].result.tokens == whole


def test_readmission_goes_on_where_it_was(driver: Driver[FakeTargetRunner]) -> None:
    prompt = [9, 8, 7]
    want = expected_output(prompt, 12, 1000)
    driver.admit(0, prompt, output=tuple(want[:4]), limit=12)
    got = list(driver.prefill(0, 0, 7).entries[0].result.tokens)
    while len(got) < 5:
        got += driver.decode(entry(0, 20)).entries[0].result.tokens
    assert got == want[4:9][: len(got)]


def test_stop_limit_and_padding(driver: Driver[FakeTargetRunner]) -> None:
    prompt = [5, 6, 7]
    want = expected_output(prompt, 40, 1000)
    stop = want[3]
    driver.admit(0, prompt, limit=40, stop=(stop,))
    driver.prefill(0, 0, 3)
    driver.attach()
    driver.ends[0].propose = lambda step: Proposal(step, (chain(0, 3, want[0], 8),), 11)
    done = driver.decode(entry(0, 11, nodes=8), session=7)
    result = done.entries[0].result
    assert list(result.tokens) == want[1:4]
    assert (result.finish, result.nodes, result.accepted) == (Finish.STOP, 8, 7)
    assert done.times.drafted == 11
    later = driver.decode(entry(0, 19, nodes=8), session=7)
    assert later.entries[0].outcome is Outcome.PADDING
    assert not later.entries[0].result.tokens
    assert driver.ends[0].messages[-1] == ContextMessage(later.step)
    assert len(driver.ends[0].awaited) == 1, "padding needs no proposal"
    driver.send(lambda n: Release(n, 0, 1))
    driver.admit(0, prompt, epoch=2)
    assert driver.prefill(0, 0, 3, epoch=2).free_pages == 255


def test_stop_wins_over_limit_and_min_tokens_bans(driver: Driver[FakeTargetRunner]) -> None:
    prompt = [5, 6, 7]
    want = expected_output(prompt, 40, 1000)
    driver.admit(0, prompt, limit=5, stop=(want[1],))
    driver.prefill(0, 0, 3)
    assert driver.decode(entry(0, 6)).entries[0].result.finish is Finish.STOP
    banned = expected_output(prompt, 10, 1000, stop_ids=(want[1],), min_tokens=4)
    driver.admit(1, prompt, limit=10, stop=(want[1],), min_tokens=4)
    got = list(driver.prefill(1, 0, 3).entries[0].result.tokens)
    for _ in range(6):
        got += driver.decode(entry(1, 11)).entries[0].result.tokens
    assert got == banned
    assert want[1] not in got[:4]


def test_tree_off_the_dense_path(driver: Driver[FakeTargetRunner]) -> None:
    prompt = [5, 6, 7]
    want = expected_output(prompt, 40, 1000)
    driver.admit(0, prompt, limit=40)
    driver.prefill(0, 0, 3)
    end = driver.attach()
    bad = (want[1] + 1) % 1000
    tree = ProposedTree(
        0, 1, [want[0], bad, want[1], 4, want[2], 5, want[3]], [-1, 0, 0, 1, 2, 4, 4]
    )
    end.propose = lambda step: Proposal(step, (tree,))
    result = driver.decode(entry(0, 16, nodes=8), session=7).entries[0].result
    assert list(result.tokens) == want[1:5]
    assert (result.nodes, result.accepted) == (7, 3)
    end.propose = lambda step: Proposal(step)
    assert list(driver.decode(entry(0, 16), session=7).entries[0].result.tokens) == [want[5]]
    driver.check()


def test_bad_proposals_cost_acceptance_only(driver: Driver[FakeTargetRunner]) -> None:
    prompt = [5, 6, 7]
    want = expected_output(prompt, 40, 1000)
    driver.admit(0, prompt, limit=40)
    driver.prefill(0, 0, 3)
    end = driver.attach()
    trees = [
        ProposedTree(0, 2, [want[0], want[1]], [-1, 0]),  # stale epoch
        ProposedTree(3, 1, [want[0]], [-1]),  # another slot
        ProposedTree(0, 1, [1, 5000, -3], [-1, 0, 0]),  # out of the vocabulary
        ProposedTree(0, 1, [1, 2, 3], [-1, 2, 9]),  # parents ahead
        ProposedTree(0, 1, [], []),
        ProposedTree(0, 1, [1] * 9, list(range(-1, 8))),  # more than planned
    ]
    for index, tree in enumerate(trees):
        end.propose = lambda step, tree=tree: Proposal(step, (tree,))  # type: ignore[misc]
        result = driver.decode(entry(0, 40, nodes=8), session=7).entries[0].result
        assert list(result.tokens) == [want[1 + index]], tree
        assert result.nodes == 1
    end.propose = lambda step: None
    assert driver.decode(entry(0, 40, nodes=8), session=7).entries[0].result.nodes == 1


def test_publish_follows_the_cursor(driver: Driver[FakeTargetRunner]) -> None:
    prompt = list(range(20, 30))
    want = expected_output(prompt, 60, 1000)
    end = driver.attach()
    driver.admit(0, prompt, limit=60)
    driver.prefill(0, 0, 6, last=False, session=7)
    driver.prefill(0, 6, 4, session=7)
    first, second = end.messages
    assert [(r.first_row, r.count, r.caught_up) for r in first.records] == [(0, 6, False)]
    assert decode_rows(first.rows) == [(20 + i, i) for i in range(6)]
    assert [(r.first_row, r.count, r.caught_up) for r in second.records] == [(6, 4, True)]
    assert second.records[0].anchor == want[0]
    end.propose = lambda step: Proposal(step, (chain(0, 10, want[0], 4, wrong_from=3),))
    driver.decode(entry(0, 20, nodes=4), session=7)
    (record,) = end.messages[-1].records
    assert (record.first_row, record.count, record.anchor) == (10, 3, want[3])
    assert record.caught_up
    assert decode_rows(end.messages[-1].rows) == [(want[i], 10 + i) for i in range(3)]

    driver.send(lambda n: Rewind(n, 0, 1, 2))
    driver.decode(entry(0, 20, replay=4), session=7)
    (record,) = end.messages[-1].records
    assert (record.first_row, record.count, record.caught_up) == (2, 5, False)
    driver.decode(entry(0, 20, replay=40), session=7)
    (record,) = end.messages[-1].records
    assert (record.first_row, record.count, record.caught_up) == (7, 8, True)
    number = driver.send(lambda n: Rewind(n, 0, 1, 16))
    driver.rejected(number, pb.REJECT_CODE_LENGTH)


def test_publish_false_sends_no_rows(driver: Driver[FakeTargetRunner]) -> None:
    end = driver.attach()
    driver.admit(0, [1, 2, 3], publish=False)
    driver.prefill(0, 0, 3, session=7)
    driver.decode(entry(0, 10), session=7)
    assert [m.records for m in end.messages] == [(), ()]
    assert [m.step for m in end.messages] == [1, 2]


def test_new_session_starts_at_row_0_and_old_one_counts_as_empty(
    driver: Driver[FakeTargetRunner],
) -> None:
    driver.attach(7)
    driver.admit(0, [1, 2, 3])
    driver.prefill(0, 0, 3, session=7)
    old = driver.ends[-1]
    driver.send(lambda n: Detach(n, 7, "draft restarted"))
    assert driver.next() == Detached(7, "draft restarted")
    assert old.reason == "draft restarted"
    done = driver.decode(entry(0, 20, nodes=4), session=7)  # was in flight
    assert done.entries[0].result.nodes == 1
    assert len(old.messages) == 1
    new = driver.attach(8)
    driver.decode(entry(0, 20, replay=100), session=8)
    (record,) = new.messages[0].records
    assert (record.first_row, record.count, record.caught_up) == (0, 5, True)
    number = driver.send(lambda n: Attach(n, 7, 99, "draft:1"))
    assert driver.rejected(number, pb.REJECT_CODE_SESSION).session == 7


def test_a_dead_handoff_is_reported_in_a_step_and_when_idle(
    driver: Driver[FakeTargetRunner],
) -> None:
    end = driver.attach(7)
    driver.admit(0, [1, 2, 3])
    driver.prefill(0, 0, 3, session=7)

    def dies(step: int) -> Proposal | None:
        end.die("watchdog")
        return None

    end.propose = dies
    assert driver.decode(entry(0, 20, nodes=4), session=7).entries[0].result.nodes == 1
    assert driver.next() == Detached(7, "watchdog")
    again = driver.attach(8)
    again.die("gone")
    assert driver.next() == Detached(8, "gone")


def test_a_lost_gateway_s_steps_are_finished_and_slots_freed(
    driver: Driver[FakeTargetRunner],
) -> None:
    end = driver.attach()
    driver.admit(0, [1, 2, 3])
    driver.prefill(0, 0, 3, session=7)
    for _ in range(5):
        driver.plan(StepKind.DECODE, entry(0, 40), session=7)
    driver.close()
    assert len(driver.runner.calls) == 6
    assert [m.step for m in end.messages] == list(range(1, 7))
    assert end.reason == "the gateway went"
    driver.open()
    assert driver.step == 6
    driver.admit(0, [1, 2, 3], epoch=1)  # epochs begin anew
    assert driver.prefill(0, 0, 3).free_pages == 255


def test_context_is_published_before_the_step_is_reported() -> None:
    driver = Driver(FakeTargetRunner())
    end = driver.attach()
    emitted = driver.events

    def emit(event: Event) -> None:
        end.log.append(type(event).__name__)
        emitted.put(event)

    driver.engine._emit = emit
    driver.admit(0, [1, 2, 3])
    driver.prefill(0, 0, 3, session=7)
    assert end.log == ["publish 1", "StepDone"]
    driver.engine.stop()


def test_drain_refuses_new_requests_and_reports_the_last_release(
    driver: Driver[FakeTargetRunner],
) -> None:
    driver.admit(0, [1, 2, 3])
    driver.prefill(0, 0, 3)
    drained = threading.Event()
    driver.engine.drain(drained.set)
    driver.rejected(driver.admit(1, [1, 2, 3]), pb.REJECT_CODE_DRAINING)
    assert driver.decode(entry(0, 9)).entries[0].outcome is Outcome.DONE
    assert not drained.is_set()
    driver.send(lambda n: Release(n, 0, 1))
    assert drained.wait(WAIT_S)


def test_an_exception_in_a_step_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(FakeTargetRunner())
    driver.admit(0, [1, 2, 3])
    driver.runner.fail_next = True
    driver.plan(StepKind.PREFILL, PlanEntry(0, 1, 3, first=0, count=3, last=True))
    driver.engine.stop()
    assert [str(e) for e in driver.failure] == ["the fake target was told to fail"]
    assert "the engine failed" in caplog.text


def test_no_draft_head_no_session() -> None:
    driver = Driver(FakeTargetRunner(feature_width=0))
    number = driver.send(lambda n: Attach(n, 1, 1, "draft:1"))
    driver.rejected(number, pb.REJECT_CODE_PEER)
    driver.engine.stop()


def test_engine_overhead() -> None:
    """A decode step of 8 slots and 8 x 8 nodes costs the engine little beside the model."""
    driver = Driver(FakeTargetRunner(paranoid=False))
    end = driver.attach()
    for slot in range(8):
        driver.admit(slot, [1, 2, 3], limit=500)
        driver.prefill(slot, 0, 3, session=7)
    end.propose = lambda step: Proposal(step, tuple(chain(slot, 3, 1, 8) for slot in range(8)))
    times = []
    for i in range(60):
        entries = [entry(slot, 3 + i + 16, nodes=8) for slot in range(8)]
        before = driver.runner.busy_s
        began = time.perf_counter()
        driver.decode(*entries, session=7)
        times.append(time.perf_counter() - began - (driver.runner.busy_s - before))
    times.sort()
    print(f"engine overhead: median {1e6 * times[30]:.0f} us")
    assert times[30] < 2e-3, "far above what it should be, even on a busy machine"
    driver.engine.stop()
