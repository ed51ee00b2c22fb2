"""The scheduler's core against a cell that asserts the protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.board import Step
from gateway.cell import Peer
from gateway.request import GenerateParams
from slipstream.errors import ConfigError, InvalidRequest, PairError, PeerLost
from slipstream.grammar import Grammar, GrammarKind
from tests.unit.scheduler_harness import Harness
from tests.unit.scheduler_target import CellSpec


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    ("depth", "ping_pong"), [(0, "off"), (1, "off"), (0, "on"), (1, "on"), (1, "auto")]
)
def test_every_depth_and_grouping_gives_the_same_tokens(
    draft: bool, depth: int, ping_pong: str
) -> None:
    h = Harness(draft=draft, pipeline_depth=depth, ping_pong=ping_pong, pin_nodes=True, seed=3)
    h.start()
    numbers = [
        h.submit(prompt=1 + 5 * i % 37, max_tokens=1 + 7 * i % 50, stop_ids=frozenset({i % 97}))
        for i in range(30)
    ]
    h.settle()
    for number in numbers:
        h.check(number)
    h.check_idle()
    assert (max(h.cell.target.verified) > 1) == draft
    if ping_pong == "on" and draft:
        assert h.core.planner is not None and h.core.counters.steps > 0


def test_drafting_takes_fewer_steps() -> None:
    steps = []
    for draft in (False, True):
        h = Harness(draft=draft, pin_nodes=True)
        h.start()
        for _ in range(4):
            h.submit(prompt=4, max_tokens=60)
        h.settle()
        steps.append(h.core.counters.slot_steps)
    assert steps[1] < 0.6 * steps[0]


def test_a_request_without_draft_is_verified_with_one_node() -> None:
    h = Harness(pin_nodes=True)
    h.start()
    number = h.submit(max_tokens=40, draft=False)
    h.settle()
    h.check(number)
    assert set(h.cell.target.verified) == {1}


def test_stop_wins_over_the_limit_and_min_tokens_holds_it_back() -> None:
    h = Harness(pin_nodes=True)
    h.start()
    every = frozenset(range(96))
    first = h.submit(max_tokens=10, stop_ids=every)
    held = h.submit(max_tokens=10, stop_ids=every, min_tokens=6)
    last = h.submit(max_tokens=1, stop_ids=every)
    h.settle()
    for number in (first, held, last):
        h.check(number)
    assert h.finish_of(last) == "stop"


def test_cancel_frees_the_slot_at_once() -> None:
    h = Harness(CellSpec(slots=1))
    h.start()
    running, waiting, after = h.submit(max_tokens=60), h.submit(), h.submit()
    while not h.tokens(running):
        h.move()
    h.core.cancel(running)
    h.core.cancel(waiting)
    h.core.cancel(12345)
    h.turn()
    assert h.finish_of(running) == h.finish_of(waiting) == "cancelled"
    h.settle()
    h.check(after)
    h.check_idle()


def test_no_pages_preempts_the_youngest_and_keeps_the_order() -> None:
    spec = CellSpec(slots=4, pages=20, page_size=4, max_model_len=72)
    h = Harness(spec, pin_nodes=True)
    h.start()
    numbers = [h.submit(prompt=8, max_tokens=50) for _ in range(6)]
    first_tokens: list[int] = []
    for _ in range(100_000):
        h.now += 0.001
        if not h.move():
            break
        for number in numbers:
            if h.tokens(number) and number not in first_tokens:
                first_tokens.append(number)
    h.settle()
    assert first_tokens == numbers, "nobody overtakes"
    for number in numbers:
        h.check(number)
    assert h.core.counters.preemptions > 0
    h.check_idle()


def test_a_request_that_fills_the_pool_alone_runs() -> None:
    spec = CellSpec(slots=4, pages=16, page_size=4, max_model_len=96, budget=16)
    h = Harness(spec, pin_nodes=True)
    h.start()
    numbers = [h.submit(prompt=20, max_tokens=43), h.submit(prompt=3, max_tokens=20)]
    too_long = h.submit(prompt=20, max_tokens=44)
    h.settle()
    for number in numbers:
        h.check(number)
    assert h.finish_of(too_long) == "error"
    h.check_idle()


def test_draft_lost_and_back_again_replays_and_drafts() -> None:
    h = Harness(CellSpec(max_model_len=2000, pages=2000, draft_pages=4000), pin_nodes=True)
    h.start()
    numbers = [h.submit(prompt=30, max_tokens=400) for _ in range(3)]
    while len(h.tokens(numbers[0])) < 50:
        h.now += 0.001
        h.move()
    h.cell.dead.add(Peer.DRAFT)
    h.cell.kill(Peer.DRAFT)
    for _ in range(200):
        h.now += 0.001
        h.move()
    assert h.core.drafting.session == 0
    h.cell.dead.clear()
    before = len(h.cell.target.verified)
    h.settle()
    assert h.core.counters.sessions == 2
    assert max(h.cell.target.verified[before:]) > 1, "drafting resumed"
    assert h.core.counters.replayed >= 3
    for number in numbers:
        h.check(number)
    h.check_idle()


def test_watchdog_retires_the_session_only() -> None:
    h = Harness(CellSpec(max_model_len=900, pages=1000, draft_pages=2000), pin_nodes=True)
    h.start()
    numbers = [h.submit(max_tokens=600) for _ in range(4)]
    for _ in range(300):
        h.now += 0.001
        h.move()
    h.cell.watchdog()
    h.settle()
    assert h.core.counters.sessions == 2 and h.core.counters.recoveries == 0
    for number in numbers:
        h.check(number)
    h.check_idle()


def test_a_draft_without_pages_calls_slots_behind() -> None:
    spec = CellSpec(draft_pages=12, max_model_len=300, pages=400)
    h = Harness(spec, pin_nodes=True)
    h.start()
    numbers = [h.submit(prompt=10, max_tokens=60) for _ in range(5)]
    h.settle()
    for number in numbers:
        h.check(number)
    assert h.core.counters.replayed > 0
    h.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_target_lost_and_back_in_time(depth: int) -> None:
    h = Harness(pipeline_depth=depth, pin_nodes=True)
    h.start()
    numbers = [h.submit(prompt=9, max_tokens=40) for _ in range(12)]
    while len(h.tokens(numbers[1])) < 9:
        h.now += 0.001
        h.move()
    h.cell.dead.add(Peer.TARGET)
    h.cell.kill(Peer.TARGET)
    while h.deliver_event():
        pass
    h.turn()
    assert h.core.board is None and not h.core.ready
    h.cell.dead.clear()
    h.settle()
    for number in numbers:
        h.check(number)
    assert h.core.counters.recoveries > 0
    h.check_idle()


def test_target_lost_for_too_long() -> None:
    h = Harness(recover_timeout_s=3.0)
    h.start()
    numbers = [h.submit(max_tokens=60) for _ in range(3)]
    while not h.tokens(numbers[0]):
        h.move()
    h.cell.dead.add(Peer.TARGET)
    h.cell.kill(Peer.TARGET)
    h.settle()
    for number in numbers:
        h.check(number, errors=True)
        assert isinstance(h.chunks[number][-1].error, PeerLost)


def test_a_pair_that_does_not_fit_is_refused_at_start() -> None:
    h = Harness()
    h.cell.draft_fingerprint = "other"
    with pytest.raises(PairError, match="fingerprint of fc: the target has 'same', .* 'other'"):
        h.start()


def test_a_tree_that_is_not_possible_is_refused_at_start() -> None:
    h = Harness(budget=3)
    with pytest.raises(ConfigError, match="budget must be at least 8"):
        h.start()


def test_another_draft_later_only_ends_drafting() -> None:
    h = Harness(pin_nodes=True)
    h.start()
    h.cell.draft_fingerprint = "other"
    h.cell.kill(Peer.DRAFT)
    number = h.submit(max_tokens=50)
    h.settle()
    h.check(number)
    assert h.core.drafting.session == 0 and h.core.ready


def test_steps_go_on_from_the_targets_last_one() -> None:
    h = Harness()
    h.cell.target.last_step = 41
    h.start()
    number = h.submit()
    h.settle()
    h.check(number)
    assert h.cell.target.last_step > 41


def test_refill_waits_for_two_slots_but_not_long() -> None:
    h = Harness(CellSpec(slots=8, pages=400, max_model_len=300), draft=False)
    h.start()
    for _ in range(8):
        h.submit(prompt=4, max_tokens=280)
    h.now += 0.1
    for _ in range(100):
        h.move()
    waiting = h.submit()
    h.core.cancel(1)
    h.turn()
    board = h.core.board
    assert board is not None and board.free_slots == 1 and len(h.core.queue) == 1
    h.now += 0.049
    h.turn()
    assert len(h.core.queue) == 1
    h.now += 0.002
    h.turn()
    assert len(h.core.queue) == 0 and board.free_slots == 0
    h.settle()
    h.check(waiting)


def test_one_batch_per_step() -> None:
    h = Harness(draft=False, pipeline_depth=0)
    h.start()
    for _ in range(8):
        h.submit(prompt=2, max_tokens=20)
    h.settle()
    assert h.batches == h.core.counters.steps


def test_a_session_that_does_not_connect_in_time_holds_nothing_up_for_long() -> None:
    spec = CellSpec(max_model_len=4000, pages=2000, draft_pages=4000)
    h = Harness(spec, draft_wait_s=0.0)
    h.cell.dead.add(Peer.DRAFT)
    h.start()
    number = h.submit(max_tokens=3500)
    for _ in range(40):
        h.now += 0.01
        h.move()
    h.cell.dead.clear()
    while h.core.drafting.sessions.idle:
        h.now += 0.01
        h.move()
    longest = stalled = 0.0
    for _ in range(600):  # the draft is deaf from here on
        h.now += 0.001
        stalled += 0.001
        if h.cell.target.move() or h.deliver_event():
            stalled = 0.0
        longest = max(longest, stalled)
        h.turn()
    assert 0.01 < longest < 0.06
    h.settle()
    h.check(number)
    assert h.core.counters.sessions == 1
    h.check_idle()


def test_a_draining_target_keeps_its_requests_waiting() -> None:
    h = Harness(draft=False)
    h.start()
    first = h.submit(max_tokens=30)
    while not h.tokens(first):
        h.move()
    h.cell.target.draining = True
    second = h.submit(max_tokens=5)
    for _ in range(500):
        h.now += 0.001
        h.move()
    h.check(first)
    assert h.finish_of(second) == "none" and len(h.core.queue) == 1
    h.cell.kill(Peer.TARGET)
    h.settle()
    h.check(second)
    h.check_idle()


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 50])
def test_prompt_log_probabilities_come_in_order_across_chunks(prompt: int, max_tokens: int) -> None:
    h = Harness(pin_nodes=True, seed=prompt)
    h.start()
    numbers = [
        h.submit(prompt, max_tokens, prompt_logprobs=0),
        h.submit(prompt, max(max_tokens, 1)),
        h.submit(prompt, max_tokens, prompt_logprobs=3),
    ]
    h.settle()
    for number in numbers[::2]:
        h.check(number)
        ids = h.requests[number].params.prompt_ids
        rows = [row for chunk in h.chunks[number] for row in chunk.prompt_logprobs]
        assert [row.logprob for row in rows] == [-float(token) for token in ids[1:]]
    assert not any(chunk.prompt_logprobs for chunk in h.chunks[numbers[1]])
    h.check_idle()


def test_prompt_log_probabilities_after_the_target_came_back() -> None:
    h = Harness(CellSpec(max_prefill_rows=4), seed=2)
    h.start()
    number = h.submit(40, 6, prompt_logprobs=0)
    while sum(len(chunk.prompt_logprobs) for chunk in h.chunks[number]) < 15:
        h.move()
    h.cell.kill(Peer.TARGET)
    h.settle()
    h.check(number)
    ids = h.requests[number].params.prompt_ids
    rows = [row for chunk in h.chunks[number] for row in chunk.prompt_logprobs]
    assert [row.logprob for row in rows] == [-float(token) for token in ids[1:]]
    assert h.core.counters.recoveries == 1


@pytest.mark.parametrize(("width", "budget", "most"), [(None, 9, 9), (1, None, 8), (2, 12, 12)])
def test_a_tree_of_its_own(width: int | None, budget: int | None, most: int) -> None:
    h = Harness(pin_nodes=True)
    planned: dict[int, int] = {}
    launch = h.core.launch

    def watch(step: Step, now: float) -> None:
        for running, nodes in zip(step.entries, step.nodes_of, strict=True):
            planned[running.request.id] = max(nodes, planned.get(running.request.id, 0))
        launch(step, now)

    h.core.launch = watch  # type: ignore[method-assign]
    h.start()
    own = h.submit(5, 60, width=width, budget=budget)
    usual = h.submit(5, 60)
    h.settle()
    assert planned == {own: most, usual: 16}
    for number in (own, usual):
        h.check(number)
    h.check_idle()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"width": 9}, "speculative.width"),
        ({"budget": 17}, "speculative.budget"),
        ({"budget": 7}, "speculative.budget"),
    ],
)
def test_a_tree_that_the_cell_does_not_build(asked: dict[str, int], param: str) -> None:
    h = Harness()
    h.start()
    assert h.core.info is not None
    with pytest.raises(InvalidRequest, match=f"^{param} must be at ") as bad:
        GenerateParams((1, 2), **asked).validate(h.core.info)
    assert bad.value.param == param


def test_a_grammar_ends_the_answer_itself() -> None:
    """A least number of tokens beyond its end would leave the target nothing to draw."""
    h = Harness()
    h.start()
    assert h.core.info is not None
    info = replace(h.core.info, grammars=True)
    bound = GenerateParams((1, 2), grammar=Grammar(GrammarKind.CHOICE, '["a"]'), max_tokens=9)
    bound.validate(info)
    with pytest.raises(InvalidRequest, match="min_tokens must be 0") as bad:
        replace(bound, min_tokens=2).validate(info)
    assert bad.value.param == "min_tokens"
