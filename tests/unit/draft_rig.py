"""An engine of the draft with a fake runner and a fake target, driven by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Event,
    Live,
    Plan,
    PlanEntry,
    Rejected,
    Release,
)
from services.draft.engine import Engine
from slipstream.errors import SlipstreamError
from slipstream.handoff.base import ContextMessage, ContextRecord, PeerSpec, Proposal, ProposedTree
from slipstream.handoff.mailbox import Mailbox
from slipstream.tree import TreeSpec, resolve_spec
from tests.fakes.draft import FakeDraftRunner
from tests.fakes.encoding import encode_rows, next_token

WAIT_S = 5.0


class FakeEnd:
    """A `DraftEnd` whose target is the test."""

    transport = "grpc"

    def __init__(self, session: int) -> None:
        self.session = session
        self.mailbox: Mailbox[ContextMessage] = Mailbox()
        self.proposals: queue.Queue[Proposal] = queue.Queue()
        self.waiting = threading.Event()

    @property
    def alive(self) -> bool:
        return not self.mailbox.closed

    @property
    def reason(self) -> str:
        return self.mailbox.reason

    def await_context(self, step: int) -> ContextMessage | None:
        self.waiting.set()
        message = self.mailbox.take(step)
        self.waiting.clear()
        return message

    def publish_proposal(self, proposal: Proposal) -> None:
        if self.alive:
            self.proposals.put(proposal)

    def end(self, reason: str) -> None:
        self.mailbox.close(reason)


class FakePeers:
    """`Peers` that connects when the test says so."""

    def __init__(self) -> None:
        self.expected: dict[int, Callable[[Any], None]] = {}
        self.forgotten: list[int] = []

    def expect(
        self,
        session: int,
        first_step: int,
        spec: PeerSpec,
        done: Callable[[Any], None],
        timeout_s: float = 10.0,
    ) -> None:
        self.expected[session] = done

    def forget(self, session: int) -> None:
        self.forgotten.append(session)


class Request:
    """What the target knows of a slot: its tokens, and how many rows were published."""

    def __init__(self, slot: int, epoch: int, prompt: Sequence[int], vocab: int) -> None:
        self.slot, self.epoch, self.vocab = slot, epoch, vocab
        self.tokens = list(prompt)
        self.cursor = 0

    def draw(self, count: int = 1) -> None:
        for _ in range(count):
            self.tokens.append(next_token(self.tokens[-1], len(self.tokens), self.vocab))

    def record(self, most: int | None = None, **changed: Any) -> tuple[ContextRecord, bytes]:
        """The rows from the cursor on, at most `most` of them; moves the cursor."""
        start = len(self.tokens) - 1
        count = start - self.cursor if most is None else min(most, start - self.cursor)
        first = self.cursor
        self.cursor += count
        values = {
            "slot": self.slot,
            "epoch": self.epoch,
            "first_row": first,
            "count": count,
            "anchor": self.tokens[-1],
            "caught_up": self.cursor == start,
        } | changed
        return ContextRecord(**values), encode_rows(first, self.tokens[first : first + count])


class Rig:
    """Drives an engine; `with Rig() as rig` ends it and checks that nothing is left."""

    def __init__(self, attach: bool = True, first_step: int = 1, **runner: Any) -> None:
        self.runner = FakeDraftRunner(**{"accept": 1.0} | runner)
        self.peers = FakePeers()
        self.events: queue.Queue[Event] = queue.Queue()
        self.closed: queue.Queue[BaseException | None] = queue.Queue()
        self.tree: TreeSpec = resolve_spec(block_size=self.runner.spec.block_size)
        self.engine = Engine(
            self.runner, self.peers, self.tree, threading.Lock(), self.events.put, self.closed.put
        )
        self.engine.start()
        self.number = 1
        self.session = 7
        self.step = first_step - 1
        if attach:
            self.end = self.attach(self.session, first_step)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close("the test is over")
        self.engine.interrupt("the test is over")
        self.engine.join(WAIT_S)
        if error[0] is None:
            assert self.closed.get(timeout=WAIT_S) is None
            assert self.runner.contexts == []

    def send(self, make: Callable[..., Command], *values: Any) -> int:
        self.number += 1
        self.engine.submit(make(self.number, *values))
        return self.number

    def event(self) -> Event:
        return self.events.get(timeout=WAIT_S)

    def quiet(self) -> None:
        """Fails if the commands so far had said anything that was not read."""
        number = self.send(Release, 0, 2**60)  # refused, whoever holds the slot
        event = self.event()
        assert isinstance(event, Rejected) and event.command == number, event

    def connect(self, session: int, result: FakeEnd | SlipstreamError) -> None:
        while session not in self.peers.expected:
            pass
        self.peers.expected.pop(session)(result)

    def attach(self, session: int, first_step: int) -> FakeEnd:
        self.send(Attach, session, first_step)
        end = FakeEnd(session)
        self.connect(session, end)
        assert self.event() == Attached(session, "grpc")
        return end

    def admit(
        self, slot: int, epoch: int, prompt: Sequence[int] = (5, 6, 7), tree: TreeSpec | None = None
    ) -> Request:
        self.send(Admit, self.session, slot, epoch, tree, 0.0, 0, 0)
        return Request(slot, epoch, prompt, self.runner.spec.vocab_size)

    def plan(self, *entries: tuple[Request, int], after: int, decode: bool = True) -> int:
        """The next plan; entries are (request, nodes)."""
        self.step += 1
        made = tuple(PlanEntry(r.slot, r.epoch, nodes) for r, nodes in entries)
        self.send(Plan, self.step, self.session, decode, made, after)
        return self.step

    def context(self, step: int, *records: tuple[ContextRecord, bytes]) -> None:
        message = ContextMessage(
            step, tuple(record for record, _ in records), b"".join(rows for _, rows in records)
        )
        assert self.end.mailbox.put(message)

    def proposal(self, step: int) -> dict[int, ProposedTree]:
        """The trees of `step` by slot."""
        got = self.end.proposals.get(timeout=WAIT_S)
        assert got.step == step
        return {tree.slot: tree for tree in got.trees}

    def prefill(self, *requests: Request) -> int:
        """One prefill step of whole prompts; its context is published."""
        step = self.plan(*((r, 0) for r in requests), after=self.step, decode=False)
        assert self.proposal(step) == {}
        for request in requests:
            request.draw()
        self.context(step, *(request.record() for request in requests))
        return step


def live(rig: Rig, request: Request) -> None:
    """Has the first decode plan run, with nothing drafted."""
    step = rig.plan((request, 1), after=rig.step)
    assert rig.event() == Live(rig.session, request.slot, request.epoch, len(request.tokens) - 1)
    assert rig.proposal(step) == {}
    request.draw()
    rig.context(step, request.record())
