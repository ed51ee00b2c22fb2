"""The target's engine between a gateway and a draft that do anything, right and wrong, at random.

The engine's messages are handled here one by one, without its thread, so that a failure shrinks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from services.target.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    Event,
    Outcome,
    Plan,
    PlanEntry,
    Ready,
    Rejected,
    Release,
    Rewind,
    StepDone,
    StepKind,
)
from services.target.engine import Engine, _Close, _Open
from services.target.runner import SlotAdmit
from slipstream.errors import PeerLost, SlipstreamError
from slipstream.handoff.base import (
    ContextMessage,
    DeviceTargetEnd,
    PeerSpec,
    Proposal,
    ProposedTree,
    TargetEnd,
)
from slipstream.params import SamplingParams
from tests.fakes.encoding import decode_rows, next_token
from tests.fakes.target import FakeTargetRunner, expected_output

SLOTS = 4
VOCAB = 50
PAGE = 4
SEEN: Counter[str] = Counter()


@dataclass
class Request:
    """What the test knows of an occupied slot."""

    epoch: int
    prompt: list[int]
    want: list[int]
    got: list[int]
    prefilled: int = 0
    finished: bool = False
    drafted: int = 0  # rows the draft holds

    @property
    def start(self) -> int:
        return len(self.prompt) + len(self.got) - 1

    @property
    def anchor(self) -> int:
        return (self.prompt + self.got)[-1]


class End:
    """The draft: keeps rows, proposes trees that are right, wrong or torn."""

    transport: Literal["grpc"] = "grpc"

    def __init__(self, machine: Machine, session: int) -> None:
        self.machine = machine
        self.session = session
        self.alive = True
        self.reason = ""
        self.published: list[int] = []

    def publish_context(self, message: ContextMessage) -> None:
        if not self.alive:
            return
        self.published.append(message.step)
        rows = decode_rows(message.rows)
        for record in message.records:
            request = self.machine.requests[record.slot]
            assert record.epoch == request.epoch
            assert record.first_row == request.drafted
            part, rows = rows[: record.count], rows[record.count :]
            assert [p for _, p in part] == list(
                range(record.first_row, record.first_row + record.count)
            )
            request.drafted += record.count
        assert not rows

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        rng = self.machine.rng
        if rng.random() < 0.05:
            self.alive, self.reason = False, "watchdog"
            return None
        trees = []
        for slot, request in self.machine.requests.items():
            if not request.got or rng.random() < 0.2:
                continue
            tokens, parents, depths = [request.anchor], [-1], [0]
            for node in range(1, rng.randint(1, 8)):
                parent = rng.choice([node - 1, rng.randint(-1, node)])
                parents.append(parent)
                above = parent if 0 <= parent < node else 0
                depths.append(depths[above] + 1)
                right = next_token(tokens[above], request.start + depths[node], VOCAB)
                tokens.append(right if rng.random() < 0.8 else rng.randint(-1, VOCAB))
            trees.append(ProposedTree(slot, request.epoch, tokens, parents))
        return Proposal(step, tuple(trees))

    def end(self, reason: str) -> None:
        self.alive = False


class Connector:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.made: End | None = None

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Callable[[TargetEnd | DeviceTargetEnd | SlipstreamError], None],
        export: Any = None,
    ) -> None:
        bad = self.machine.rng.random() < 0.2
        self.made = None if bad else End(self.machine, session)
        done(PeerLost("nobody there") if self.made is None else self.made)


class Machine:
    """Everything a gateway and a draft may do, right and wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.requests: dict[int, Request] = {}
        self.events: list[Event] = []
        self.end: End | None = None
        self.session = 0
        self.sessions = 0
        self.number = 1
        self.epoch = 0
        self.step = 0
        self.runner = FakeTargetRunner(
            vocab=VOCAB, slots=SLOTS, pages=40, page_size=PAGE, max_model_len=64
        )
        self.connector = Connector(self)
        self.engine = Engine(
            lambda: self.runner, self.connector, loaded=lambda spec: None, failed=lambda e: None
        )
        self.engine._setup(self.runner)
        self.open()

    def open(self) -> None:
        self.engine._handle(_Open(self.events.append))
        (ready,) = self.take()
        assert isinstance(ready, Ready) and ready.last_step == self.step

    def take(self) -> list[Event]:
        events, self.events[:] = list(self.events), []
        for event in events:
            if isinstance(event, Detached):
                assert event.session == self.session
                self.session, self.end = 0, None
        return events

    def send(self, make: Callable[[int], Command]) -> list[Event]:
        self.number += 1
        self.engine._handle(make(self.number))
        return self.settle()

    def settle(self) -> list[Event]:
        """Handles what the engine told itself."""
        while not self.engine._inbox.empty():
            self.engine._handle(self.engine._inbox.get_nowait())
        return self.take()

    def admit(self) -> None:
        rng = self.rng
        free = [slot for slot in range(SLOTS) if slot not in self.requests]
        slot = rng.choice(free) if free and rng.random() < 0.9 else rng.randint(0, SLOTS)
        length, more, resumed = rng.randint(0, 20), rng.randint(0, 30), rng.choice([0, 0, 3])
        self.epoch += 1
        epoch = self.epoch
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        limit = length + more
        stop = frozenset({rng.randrange(VOCAB)})
        minimum = rng.choice([0, 0, 5])
        want = expected_output(prompt, limit, VOCAB, stop, minimum) if prompt else []
        output = want[: min(resumed, len(want) - 1)] if len(want) > 1 else []
        fits = slot < SLOTS and slot not in self.requests and prompt and more > len(output)
        request = SlotAdmit(
            prompt, tuple(output), limit, minimum, stop, SamplingParams(), None, True
        )
        events = self.send(lambda n: Admit(n, slot, epoch, request))
        if fits and limit <= 64:
            assert events == []
            self.requests[slot] = Request(epoch, prompt + output, want[len(output) :], [])
        else:
            assert isinstance(events[0], Rejected)

    def run(self, kind: StepKind, entries: list[PlanEntry], session: int) -> StepDone:
        self.step += 1
        step, end = self.step, self.end
        connected = end is not None and session == end.session
        before = len(end.published) if end else 0
        events = self.send(lambda n: Plan(n, step, session, kind, entries))
        (done,) = [e for e in events if isinstance(e, StepDone)]
        assert (done.step, len(done.entries)) == (step, len(entries))
        dropped = sum(e.outcome is Outcome.DROPPED for e in done.entries)
        rejected = [e for e in events if isinstance(e, Rejected) and e.session == 0]
        assert len(rejected) == dropped
        if end is not None and end.alive:
            assert len(end.published) == before + connected
        return done

    def prefill(self) -> None:
        count, named = self.rng.randint(1, 12), self.rng.random() < 0.8
        entries = []
        for slot, request in self.requests.items():
            left = len(request.prompt) - request.prefilled
            if left and not request.got:
                n = min(count, left)
                first = request.prefilled
                entries.append(
                    PlanEntry(slot, request.epoch, first + n, first=first, count=n, last=n == left)
                )
        done = self.run(StepKind.PREFILL, entries, self.session if named else 0)
        for planned, entry in zip(entries, done.entries, strict=True):
            if entry.outcome is Outcome.DONE:
                self.requests[entry.slot].prefilled += planned.count
                self.accept(entry.slot, list(entry.result.tokens), entry.result.finish != "none")

    def decode(self) -> None:
        nodes, replay = self.rng.randint(1, 8), self.rng.choice([0, 0, 30])
        named = self.rng.random() < 0.8
        entries = [
            PlanEntry(slot, r.epoch, max(1, r.start) + nodes, nodes=nodes, replay=replay)
            for slot, r in self.requests.items()
            if r.got
        ]
        done = self.run(StepKind.DECODE, entries, self.session if named else 0)
        for entry in done.entries:
            request = self.requests[entry.slot]
            if request.finished:
                SEEN["padding"] += 1
                assert entry.outcome is Outcome.PADDING
            if entry.outcome is Outcome.DONE:
                assert 1 <= len(entry.result.tokens) <= entry.result.accepted + 1
                SEEN["accepted"] += len(entry.result.tokens) > 2
                self.accept(entry.slot, list(entry.result.tokens), entry.result.finish != "none")

    def accept(self, slot: int, tokens: list[int], finished: bool) -> None:
        request = self.requests[slot]
        request.got += tokens
        assert request.got == request.want[: len(request.got)]
        if tokens:
            assert finished == (len(request.got) == len(request.want))
        request.finished = finished
        SEEN["finished"] += finished

    def bad_plan(self) -> None:
        slot, epoch = self.rng.randint(0, SLOTS), self.rng.randint(0, 3)
        nodes = self.rng.randint(0, 300)
        done = self.run(StepKind.DECODE, [PlanEntry(slot, epoch, 0, nodes=nodes)], 0)
        assert done.entries[0].outcome is not Outcome.DONE

    def misnumbered_plan(self) -> None:
        step = max(0, self.step + self.rng.choice([-1, 0, 2, 5]))
        events = self.send(lambda n: Plan(n, step, 0, StepKind.DECODE, []))
        assert [type(e) for e in events] == [Rejected, StepDone]

    def release(self) -> None:
        slot = self.rng.randint(0, SLOTS)
        request = self.requests.pop(slot, None)
        epoch = request.epoch if request else 1
        events = self.send(lambda n: Release(n, slot, epoch))
        assert bool(events) == (request is None)

    def rewind(self) -> None:
        slot, rows = self.rng.randint(0, SLOTS - 1), self.rng.randint(0, 40)
        request = self.requests.get(slot)
        epoch = request.epoch if request else 1
        events = self.send(lambda n: Rewind(n, slot, epoch, rows))
        if request is not None and rows <= request.drafted:
            assert events == []
            request.drafted = rows
        else:
            assert isinstance(events[0], Rejected)

    def attach(self) -> None:
        self.sessions += 1
        session, step, old = self.sessions, self.step + 1, self.session
        self.number += 1
        self.engine._handle(Attach(self.number, session, step, "draft:1"))
        assert [type(e) for e in self.take()] == ([Detached] if old else [])
        self.session, self.end = session, self.connector.made
        events = self.settle()
        if self.end is None:
            assert isinstance(events[0], Rejected) and events[0].session == session
            self.session = 0
        else:
            assert events == [Attached(session, "grpc")]
            for request in self.requests.values():
                request.drafted = 0

    def detach(self) -> None:
        if self.end is None:
            return
        if self.rng.random() < 0.5:
            self.end.alive, self.end.reason = False, "gone"
            self.engine._retire_lost()
            events = self.take()
        else:
            session = self.session
            events = self.send(lambda n: Detach(n, session, "so said the gateway"))
        assert [type(e) for e in events] == [Detached]

    def lose_gateway(self) -> None:
        done: list[bool] = []
        end = self.end
        self.engine._handle(_Close(lambda: done.append(True)))
        assert done and self.engine._slots.pool.free == 40
        assert end is None or not end.alive
        self.requests.clear()
        self.take()
        self.open()

    def books_agree(self) -> None:
        self.engine.check()
        held = {slot.number: slot for slot in self.engine._slots}
        assert held.keys() == self.requests.keys()
        for number, request in self.requests.items():
            if self.session:
                assert held[number].cursor == request.drafted
