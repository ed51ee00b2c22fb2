"""Random lives of the scheduler: whatever happens in whatever order, every request is answered with
the tokens that plain decoding gives, and every page and slot comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.board import DECODE
from gateway.cell import Peer
from tests.unit.scheduler_harness import Harness
from tests.unit.scheduler_target import CellSpec


def check_sums(h: Harness) -> None:
    """What must hold between any two events."""
    board = h.core.board
    if board is None:
        return
    running = [*board.prefilling, *board.decoding]
    assert sorted(r.slot for r in running) == sorted(r.slot for r in board)
    assert board.used_slots == len(running)
    held = sum(board.ledger.pages_for(board.ledger.watermark(r.slot)) for r in running)
    assert held + board.ledger.free == board.ledger.pages
    flying = sum(not r.gone for step in board.flight for r in step.entries)
    assert flying == sum(r.in_flight for r in running)
    for r in running:
        assert r.tokens <= r.limit and r.decodes <= r.in_flight
        assert r.session in (0, h.core.drafting.session) and (r.session or not r.live)
        groups = {s.group for s in board.flight if s.kind == DECODE and r in s.entries}
        assert len(groups) <= 1, "a slot changes its group only with nothing in flight"
        if not r.in_flight and r.tokens > r.rows:
            assert r.start == r.tokens - 1


class Life(RuleBasedStateMachine):
    """One cell with clients that come and go and servers that fail."""

    @initialize(
        seed=st.integers(0, 1 << 30),
        depth=st.integers(0, 1),
        ping_pong=st.sampled_from(["off", "on", "auto"]),
        pages=st.integers(26, 80),
        draft_pages=st.sampled_from([20, 60, 400]),
        draft=st.booleans() | st.just(True),
        pinned=st.booleans(),
    )
    def start(
        self,
        seed: int,
        depth: int,
        ping_pong: str,
        pages: int,
        draft_pages: int,
        draft: bool,
        pinned: bool,
    ) -> None:
        spec = CellSpec(slots=6, pages=pages, draft_pages=draft_pages)
        self.h = Harness(
            spec, draft=draft, seed=seed, pipeline_depth=depth, ping_pong=ping_pong,
            pin_nodes=pinned, recover_timeout_s=5.0,
        )  # fmt: skip
        self.h.start()

    @rule(
        prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        drafts=st.booleans() | st.just(True),
        stop=st.booleans(),
    )
    def submit(self, prompt: int, max_tokens: int, drafts: bool, stop: bool) -> None:
        ids = frozenset(range(0, 97, 19)) if stop else frozenset()
        self.h.submit(prompt, max_tokens, draft=drafts, stop_ids=ids)

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        alive = list(self.h.core.requests)
        if alive:
            self.h.core.cancel(alive[which % len(alive)])
            self.h.turn()

    @rule(moves=st.integers(1, 400))
    def run(self, moves: int) -> None:
        for _ in range(moves):
            self.h.now += 0.0007
            if not self.h.move():
                self.h.turn()

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds: float) -> None:
        self.h.now += seconds
        self.h.turn()

    @rule(down=st.booleans())
    def kill_draft(self, down: bool) -> None:
        self._kill(Peer.DRAFT, down)

    @rule(down=st.booleans())
    def kill_target(self, down: bool) -> None:
        self._kill(Peer.TARGET, down)

    @rule()
    def watchdog(self) -> None:
        self.h.cell.watchdog()

    @rule()
    def servers_come_back(self) -> None:
        self.h.cell.dead.clear()

    def _kill(self, peer: Peer, down: bool) -> None:
        if down:
            self.h.cell.dead.add(peer)
        self.h.cell.kill(peer)

    @invariant()
    def sums(self) -> None:
        if hasattr(self, "h"):
            check_sums(self.h)

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.cell.dead.clear()
        self.h.settle()
        for number in self.h.requests:
            self.h.check(number, errors=True)
        self.h.check_idle()


Life.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLife = Life.TestCase


@pytest.mark.parametrize(
    ("seed", "depth", "ping_pong"), [(1, 1, "off"), (2, 0, "off"), (3, 1, "on"), (4, 1, "auto")]
)
def test_thousands_of_steps(seed: int, depth: int, ping_pong: str) -> None:
    """A long life with everything going on, one step or more always in flight."""
    dice = random.Random(seed)
    spec = CellSpec(slots=8, pages=60, draft_pages=70)
    pinned = seed % 2 == 0
    h = Harness(spec, seed=seed, pipeline_depth=depth, ping_pong=ping_pong, pin_nodes=pinned)
    h.start()
    while h.core.counters.steps < 4000:
        h.now += 0.002
        if not h.move():
            h.turn()
        event = dice.random()
        if event < 0.04 and len(h.core.requests) < 24:
            stop = frozenset(range(0, 97, 29)) if dice.random() < 0.3 else frozenset()
            h.submit(dice.randint(1, 50), dice.randint(1, 60), stop_ids=stop)
        elif event < 0.042 and h.core.requests:
            h.core.cancel(dice.choice(list(h.core.requests)))
            h.turn()
        elif event < 0.0424:
            h.cell.kill(dice.choice((Peer.DRAFT, Peer.DRAFT, Peer.TARGET)))
        elif event < 0.043:
            h.cell.watchdog()
        check_sums(h)
    h.settle()
    for number in h.requests:
        h.check(number, errors=True)
    h.check_idle()
    counters = h.core.counters
    assert counters.finished > 100 and counters.cancelled > 5 and counters.recoveries > 0
    assert counters.sessions > 2 and counters.replayed > 0 and counters.preemptions > 0
