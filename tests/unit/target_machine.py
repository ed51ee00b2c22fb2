"""The target's engine between a gateway and a draft that do anything, right and wrong, at random.

The engine's messages are handled here one by one, without its thread, so that a failure shrinks.
Over a runner that runs ahead, `land` lets a step end, and everything else may come in between.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

from services.target.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    EntryDone,
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
from services.target.engine import Engine
from services.target.inbox import Close, Open, Through
from services.target.runner import SlotAdmit
from slipstream.handoff.base import (
    ProposedTree,
)
from slipstream.params import SamplingParams
from tests.fakes.encoding import next_token
from tests.fakes.run_ahead import FakeDeviceEnd, RunAheadFake
from tests.fakes.target import FakeTargetRunner, expected_output
from tests.unit.target_machine_parts import Connector, DirectWaiter, End, Request, Step

SLOTS = 4
VOCAB = 50
PAGE = 4
SEEN: Counter[str] = Counter()


class Machine:
    """Everything a gateway and a draft may do, right and wrong."""

    def __init__(self, seed: int, ahead: bool = False) -> None:
        self.rng = random.Random(seed)
        self.ahead = ahead
        self.requests: dict[int, Request] = {}
        self.events: list[Event] = []
        self.steps: deque[Step] = deque()
        self.linked: dict[int, FakeDeviceEnd] = {}  # by step
        self.end: End | FakeDeviceEnd | None = None
        self.session = 0
        self.sessions = 0
        self.number = 1
        self.epoch = 0
        self.step = 0
        make = RunAheadFake if ahead else FakeTargetRunner
        self.runner = make(vocab=VOCAB, slots=SLOTS, pages=40, page_size=PAGE, max_model_len=64)
        self.connector = Connector(self)
        self.engine = Engine(
            lambda: self.runner, self.connector, loaded=lambda spec: None, failed=lambda e: None
        )
        self.engine._setup(self.runner)
        if isinstance(self.runner, RunAheadFake):
            self.engine._waiter.stop()
            self.engine._waiter = DirectWaiter(self.runner)  # type: ignore[assignment]
        self.open()

    def open(self) -> None:
        self.engine._handle(Open(self.hear))
        (ready,) = self.take()
        assert isinstance(ready, Ready) and ready.last_step == self.step

    def hear(self, event: Event) -> None:
        """Follows what the engine says, when it says it."""
        self.events.append(event)
        if isinstance(event, StepDone) and self.steps:
            self.landed(self.steps.popleft(), event)
        elif isinstance(event, Rejected) and self.steps and event.step == self.steps[-1].number:
            if not event.session:
                self.steps[-1].refused.add(event.slot)
        elif isinstance(event, Detached):
            assert event.session == self.session
            self.session, self.end = 0, None
        elif isinstance(event, Attached):
            for request in self.requests.values():
                request.drafted = 0

    def take(self) -> list[Event]:
        """What was said since the last time."""
        events, self.events[:] = list(self.events), []
        return events

    def trees(self) -> list[ProposedTree]:
        """What a draft proposes that knows what the stream, or the gateway, knows."""
        rng, trees = self.rng, []
        for slot, request in self.requests.items():
            if not request.got or rng.random() < 0.2:
                continue
            anchor, start = request.anchor, request.start
            if isinstance(self.runner, RunAheadFake):
                held = self.runner._slots.get(slot)
                if held is None:
                    continue
                anchor, start = held.tokens[-1], len(held.tokens) - 1
            tokens, parents, depths = [anchor], [-1], [0]
            for node in range(1, rng.randint(1, 8)):
                parent = rng.choice([node - 1, rng.randint(-1, node)])
                parents.append(parent)
                above = parent if 0 <= parent < node else 0
                depths.append(depths[above] + 1)
                right = next_token(tokens[above], start + depths[node], VOCAB)
                tokens.append(right if rng.random() < 0.8 else rng.randint(-1, VOCAB))
            trees.append(ProposedTree(slot, request.epoch, tokens, parents))
        return trees

    def device_trees(self, step: int) -> list[ProposedTree]:
        """A proposal, or the draft's death, when the stream reaches a step."""
        end = self.linked[step]
        if self.rng.random() < 0.05:
            end.die("watchdog")
            return []
        return self.trees()

    def send(self, make: Callable[[int], Command]) -> list[Event]:
        self.number += 1
        self.engine._handle(make(self.number))
        return self.settle()

    def settle(self) -> list[Event]:
        """Handles what the engine told itself; everything that was said but results of plans."""
        while not self.engine._inbox.empty():
            self.engine._handle(self.engine._inbox.get_nowait())
        return [event for event in self.take() if not isinstance(event, StepDone)]

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
            self.requests[slot] = Request(epoch, prompt + output, want[len(output) :], [], limit)
        else:
            assert isinstance(events[0], Rejected)

    def run(
        self, kind: StepKind, entries: list[PlanEntry], session: int, known: bool = True
    ) -> None:
        """Gives a plan; over a plain runner its result is there at once."""
        self.step += 1
        number, end = self.step, self.end
        before = len(end.published) if isinstance(end, End) else 0
        requests = [self.requests[entry.slot] if known else None for entry in entries]
        SEEN["ahead"] += bool(self.steps)
        step = Step(number, kind, entries, requests)
        self.steps.append(step)
        if isinstance(end, FakeDeviceEnd) and end.alive and session == end.session:
            self.linked[number] = end
        events = self.send(lambda n: Plan(n, number, session, kind, entries))
        refused = [e for e in events if isinstance(e, Rejected) and e.session == 0]
        assert len(refused) == len(step.refused)
        step.waits = step in self.steps
        assert self.ahead or not step.waits
        for entry, request in zip(entries, requests, strict=True):
            if request is not None and entry.slot not in step.refused:
                request.sent += entry.count
                request.decodes += step.waits and kind is StepKind.DECODE
        if isinstance(end, End) and end.alive and not self.ahead:
            assert len(end.published) == before + (session == end.session)

    def landed(self, step: Step, done: StepDone) -> None:
        """The result of the oldest plan is there."""
        assert (done.step, len(done.entries)) == (step.number, len(step.entries))
        for planned, request, entry in zip(step.entries, step.requests, done.entries, strict=True):
            assert (entry.outcome is Outcome.DROPPED) == (planned.slot in step.refused)
            if entry.outcome is Outcome.DROPPED:
                continue
            if request is not None:
                request.decodes -= step.waits and step.kind is StepKind.DECODE
            if request is None or entry.outcome is Outcome.PADDING:
                assert entry.outcome is Outcome.PADDING and not entry.result.tokens
                assert request is None or request.finished
                SEEN["padding"] += 1
            else:
                self.accept(request, step.kind, entry)
        self.records(step.number)

    def records(self, step: int) -> None:
        """What the stream published of a step."""
        end = self.linked.pop(step, None)
        if end is None:
            return
        if step not in end.records:  # the draft died before the step began
            assert step not in end.passed_steps and end is not self.end
            return
        assert end.passed_steps[-1] == step
        for record in end.records.pop(step):
            request = self.requests.get(record.slot)
            if request is not None and request.epoch == record.epoch and self.end is end:
                assert record.first_row == request.drafted
                request.drafted += record.count
                SEEN["published"] += 1

    def accept(self, request: Request, kind: StepKind, entry: EntryDone) -> None:
        tokens = list(entry.result.tokens)
        finished = entry.result.finish != "none"
        if kind is StepKind.DECODE:
            assert 1 <= len(tokens) <= entry.result.accepted + 1
            SEEN["accepted"] += len(tokens) > 2
        request.got += tokens
        assert request.got == request.want[: len(request.got)]
        if tokens:
            assert finished == (len(request.got) == len(request.want))
        request.finished = finished
        SEEN["finished"] += finished
        SEEN["late"] += bool(tokens) and request not in self.requests.values()

    def land(self) -> None:
        """The device is through with a step; the engine may hear of it later."""
        if isinstance(self.runner, RunAheadFake) and self.runner.waiting:
            self.runner.land()
            if self.rng.random() < 0.8:
                self.engine._handle(Through())
                self.settle()

    def prefill(self) -> None:
        count, named = self.rng.randint(1, 12), self.rng.random() < 0.8
        entries = []
        for slot, request in self.requests.items():
            left, first = len(request.prompt) - request.sent, request.sent
            if left:
                n = min(count, left)
                entries.append(
                    PlanEntry(slot, request.epoch, first + n, first=first, count=n, last=n == left)
                )
        self.run(StepKind.PREFILL, entries, self.session if named else 0)

    def decode(self) -> None:
        nodes, replay = self.rng.randint(1, 8), self.rng.choice([0, 0, 30])
        named = self.rng.random() < 0.8
        entries = [
            PlanEntry(slot, r.epoch, r.bound + nodes, nodes=nodes, replay=replay)
            for slot, r in self.requests.items()
            if r.sent == len(r.prompt)
        ]
        self.run(StepKind.DECODE, entries, self.session if named else 0)

    def bad_plan(self) -> None:
        slot, epoch = self.rng.randint(0, SLOTS), self.rng.randint(0, 3)
        nodes = self.rng.randint(0, 300)
        self.run(StepKind.DECODE, [PlanEntry(slot, epoch, 0, nodes=nodes)], 0, known=False)

    def misnumbered_plan(self) -> None:
        step = max(0, self.step + self.rng.choice([-1, 0, 2, 5]))
        self.number += 1
        self.engine._handle(Plan(self.number, step, 0, StepKind.DECODE, []))
        said = [event for event in self.take() if not isinstance(event, Detached)]
        assert [type(e) for e in said[-2:]] == [Rejected, StepDone] and not self.steps

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
            assert events == [Attached(session, self.end.transport)]

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
        self.engine._handle(Close(lambda: done.append(True)))
        assert done and self.engine._slots.pool.free == 40
        assert end is None or not end.alive
        assert not self.steps and not self.linked
        self.requests.clear()
        self.take()
        self.open()

    def books_agree(self) -> None:
        slots = self.engine._slots
        slots.pool.check(slot.table.pages for slot in slots)
        if not self.steps:
            self.engine.check()
        held = {slot.number: slot for slot in slots}
        assert held.keys() == self.requests.keys()
        for number, request in self.requests.items():
            if self.session:
                assert held[number].cursor == request.drafted
            if isinstance(self.runner, RunAheadFake) and isinstance(self.end, FakeDeviceEnd):
                assert self.steps or self.runner.cursors[number] == request.drafted
