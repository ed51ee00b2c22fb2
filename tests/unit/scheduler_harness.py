"""Drives the scheduler's core against the fake cell, one move at a time, with its own clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from gateway.board import DECODE, Step
from gateway.cell import Lost, Received
from gateway.core import Core
from gateway.request import Chunk, GenerateParams, Request
from gateway.settings import SchedulerSettings
from tests.unit.scheduler_fakes import FakeCell
from tests.unit.scheduler_target import VOCAB, CellSpec, expected


class Harness:
    """A core, a cell and the chunks delivered."""

    def __init__(
        self, spec: CellSpec | None = None, *, draft: bool = True, seed: int = 0, **settings: Any
    ) -> None:
        self.spec = spec or CellSpec()
        depth = settings.setdefault("pipeline_depth", 1)
        mode = settings.setdefault("ping_pong", "off")
        self.spec.window = 1 + depth
        self.spec.groups = 1 if mode == "off" else 2
        self.now = 1.0
        self.random = random.Random(seed)
        self.cell = FakeCell(self.spec)
        self.cell.clock = lambda: self.now
        self.settings = SchedulerSettings("target:1", "draft:1" if draft else None, **settings)
        self.core = Core(self.settings, self.cell, self._deliver, lambda: self.now)
        self.requests: dict[int, Request] = {}
        self.chunks: dict[int, list[Chunk]] = {}
        self.batches = 0
        self._next_id = 1

    def _deliver(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        self.batches += 1
        for number, chunk in batch:
            got = self.chunks[number]
            assert not got or got[-1].finish == "none", "a chunk after the last one"
            got.append(chunk)

    def submit(self, prompt: int = 5, max_tokens: int = 12, **params: Any) -> int:
        """Queues a request of random prompt ids."""
        number = self._next_id
        self._next_id += 1
        ids = tuple(self.random.randrange(VOCAB) for _ in range(prompt))
        seed = params.pop("seed", number * 7919)
        asked = GenerateParams(ids, max_tokens=max_tokens, seed=seed, **params)
        self.requests[number] = request = Request(number, asked, seed)
        self.chunks[number] = []
        self.core.submit(request)
        self.turn()
        return number

    def turn(self) -> None:
        """One turn of the scheduler's loop."""
        self.core.tick(self.now)
        while (step := self.core.plan(self.now)) is not None:
            _check_step(step)
            self.core.launch(step, self.now)
        self.core.finish()

    def deliver_event(self) -> bool:
        """Hands the oldest event to the core."""
        if not self.cell.events:
            return False
        event = self.cell.events.popleft()
        if isinstance(event, Received):
            self.core.received(event)
        else:
            assert isinstance(event, Lost)
            self.core.lost(event)
        return True

    def move(self) -> bool:
        """One random move of the cell or of an event; False when nothing can move."""
        moves = [self.cell.target.move, self.cell.draft.move, self.deliver_event]
        self.random.shuffle(moves)
        for move in moves:
            if move():
                self.turn()
                return True
        return False

    def settle(self, moves: int = 200_000) -> None:
        """Moves until every request has ended and nothing is left to do."""
        for _ in range(moves):
            self.now += 0.0005
            if not self.move():
                if not self.core.requests:
                    return
                self.now = max(self.core.deadline(self.now), self.now)
                self.turn()
        raise AssertionError(f"not settled: {len(self.core.requests)} requests left")

    def start(self) -> None:
        """Until the cell is connected, and attached where there is a draft."""
        self.turn()
        for _ in range(1000):
            if self.core.ready:
                return
            self.now += 0.001
            if not self.move():
                self.turn()
        raise AssertionError("not ready")

    def tokens(self, number: int) -> list[int]:
        """Output delivered to a request."""
        return [token for chunk in self.chunks[number] for token in chunk.tokens]

    def finish_of(self, number: int) -> str:
        """How a request ended; "none" while it runs."""
        got = self.chunks[number]
        return got[-1].finish if got else "none"

    def check(self, number: int, *, errors: bool = False) -> None:
        """A request got what plain decoding gives, or the beginning of it."""
        request = self.requests[number]
        right, finish = expected(request.params, request.seed, self.spec.max_model_len)
        tokens, ended = self.tokens(number), self.finish_of(number)
        if ended in ("stop", "length"):
            assert (tokens, ended) == (right, finish)
        else:
            assert ended == "cancelled" or (errors and ended == "error"), ended
            assert tokens == right[: len(tokens)]

    def check_idle(self) -> None:
        """Every page and slot came back, on every side."""
        board = self.core.board
        assert not self.core.requests and len(self.core.queue) == 0
        if board is not None:
            assert not board.flight and board.free_slots == board.slots
            assert board.ledger.free == board.ledger.pages
            assert not board.prefilling and not board.decoding
        target, draft = self.cell.target, self.cell.draft
        if target.up:
            assert not target.slots and target.free == self.spec.pages
        if draft.up and draft.session is not None:
            assert not draft.slots and draft.free == self.spec.draft_pages


def _check_step(step: Step) -> None:
    """What no server can tell: nothing is planned in vain."""
    for running, nodes in zip(step.entries, step.nodes_of, strict=True):
        if step.kind == DECODE:
            assert running.tokens + running.yields < running.limit, "it would be padding"
            assert nodes == 1 or (step.session and running.live), "drafts that cannot come"
            assert running.group == step.group == running.wanted
