"""A gateway and a draft in memory, to drive the target's engine without gRPC."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from services.target.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Event,
    Plan,
    PlanEntry,
    Ready,
    Rejected,
    StepDone,
    StepKind,
)
from services.target.engine import Engine
from services.target.runner import SlotAdmit, TargetRunner
from slipstream.errors import SlipstreamError
from slipstream.grammar import Grammar
from slipstream.handoff.base import (
    ContextMessage,
    DeviceTargetEnd,
    PeerSpec,
    Proposal,
    TargetEnd,
)
from slipstream.params import SamplingParams

R = TypeVar("R", bound=TargetRunner)
WAIT_S = 20.0

Done = Callable[[TargetEnd | DeviceTargetEnd | SlipstreamError], None]


class FakeEnd:
    """A handoff end in memory; `propose` makes the proposal of a step from what was published."""

    transport: Literal["grpc"] = "grpc"

    def __init__(self, session: int) -> None:
        self.session = session
        self.messages: list[ContextMessage] = []
        self.awaited: list[tuple[int, tuple[int, int]]] = []
        self.propose: Callable[[int], Proposal | None] = lambda step: Proposal(step)
        self.reason = ""
        self.alive = True
        self.log: list[str] = []

    def publish_context(self, message: ContextMessage) -> None:
        self.messages.append(message)
        self.log.append(f"publish {message.step}")

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        self.awaited.append((step, shape))
        return self.propose(step)

    def end(self, reason: str) -> None:
        if self.alive:
            self.alive, self.reason = False, reason

    def die(self, reason: str) -> None:
        self.alive, self.reason = False, reason


@dataclass
class FakeConnector:
    calls: list[tuple[int, int, str, PeerSpec]] = field(default_factory=list)
    answer: Callable[[int], TargetEnd | DeviceTargetEnd | SlipstreamError | None] = FakeEnd
    pending: list[Callable[[TargetEnd | DeviceTargetEnd | SlipstreamError], None]] = field(
        default_factory=list
    )

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Done,
        export: Any = None,
    ) -> None:
        self.calls.append((session, first_step, address, spec))
        answer = self.answer(session)
        if answer is None:
            self.pending.append(done)
        else:
            done(answer)


class Driver(Generic[R]):
    """A gateway in the test: numbers commands and steps, collects events."""

    def __init__(self, runner: R) -> None:
        self.runner = runner
        self.connector = FakeConnector()
        self.ends: list[FakeEnd] = []
        self.connector.answer = self._make_end
        self.failure: list[BaseException] = []
        self.loaded = threading.Event()
        self.engine = Engine(
            lambda: runner,
            self.connector,
            loaded=lambda spec: self.loaded.set(),
            failed=self.failure.append,
        )
        self.engine.start()
        self.number = 1
        self.step = 0
        self.open()

    def _make_end(self, session: int) -> FakeEnd:
        self.ends.append(FakeEnd(session))
        return self.ends[-1]

    def open(self) -> None:
        events: queue.Queue[Event] = queue.Queue()
        self.events = events
        self.engine.open(events.put)
        ready = self.next()
        assert isinstance(ready, Ready)
        self.step = ready.last_step

    def close(self) -> None:
        done = threading.Event()
        self.engine.close(done.set)
        assert done.wait(WAIT_S)

    def next(self) -> Event:
        return self.events.get(timeout=WAIT_S)

    def send(self, make: Callable[[int], Command]) -> int:
        self.number += 1
        self.engine.submit(make(self.number))
        return self.number

    def admit(
        self,
        slot: int,
        prompt: list[int],
        *,
        epoch: int = 1,
        limit: int = 64,
        output: tuple[int, ...] = (),
        stop: tuple[int, ...] = (),
        min_tokens: int = 0,
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        publish: bool = True,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> int:
        request = SlotAdmit(
            prompt, output, limit, min_tokens, frozenset(stop),
            sampling or SamplingParams(), logprobs, publish, prompt_logprobs, grammar,
        )  # fmt: skip
        return self.send(lambda n: Admit(n, slot, epoch, request))

    def plan(self, kind: StepKind, *entries: PlanEntry, session: int = 0) -> int:
        self.step += 1
        step = self.step
        return self.send(lambda n: Plan(n, step, session, kind, entries, time.monotonic_ns()))

    def prefill(
        self,
        slot: int,
        first: int,
        count: int,
        last: bool = True,
        *,
        epoch: int = 1,
        session: int = 0,
        reserve: int | None = None,
    ) -> StepDone:
        held = first + count if reserve is None else reserve
        entry = PlanEntry(slot, epoch, held, first=first, count=count, last=last)
        self.plan(StepKind.PREFILL, entry, session=session)
        return self.done()

    def decode(self, *entries: PlanEntry, session: int = 0) -> StepDone:
        self.plan(StepKind.DECODE, *entries, session=session)
        return self.done()

    def done(self) -> StepDone:
        event = self.next()
        assert isinstance(event, StepDone), event
        assert event.step == self.step
        return event

    def rejected(self, number: int, code: int) -> Rejected:
        event = self.next()
        assert isinstance(event, Rejected), event
        assert (event.command, event.code) == (number, code), event
        return event

    def attach(self, session: int = 7, first_step: int | None = None) -> FakeEnd:
        first = self.step + 1 if first_step is None else first_step
        self.send(lambda n: Attach(n, session, first, "draft:1"))
        assert self.next() == Attached(session, "grpc")
        return self.ends[-1]

    def check(self) -> None:
        """Every invariant, once the engine has handled all that it was given; drops unread events.

        A release says no event, so only an answer from behind it tells that nothing is under way.
        """
        self.open()
        self.engine.check()


def entry(slot: int, reserve: int, nodes: int = 1, replay: int = 0, epoch: int = 1) -> PlanEntry:
    """An entry of a decode plan."""
    return PlanEntry(slot, epoch, reserve, nodes=nodes, replay=replay)
