"""Stands for a gateway: drives both servers of a cell by their Run streams, one step at a time."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.cell import GrpcCell, Lost, Peer, Received
from gateway.links import Link, check_pair
from slipstream.v1 import common_pb2, draft_pb2, target_pb2

PROMPT = tuple(range(40, 52))
NODES = 8
TOKENS = 24
PING_S = 1.0


class Driver:
    """At most one session, and one request in slot 0.

    Raises RuntimeError whenever a server says something else than what it was asked for.
    """

    def __init__(self, target: str, draft: str) -> None:
        self._inbox: queue.Queue[Received | Lost] = queue.Queue()
        self._cell = GrpcCell(target, draft, self._inbox.put)
        self._target: Link[target_pb2.TargetCommand] = Link(
            self._cell, Peer.TARGET, target_pb2.TargetCommand, "benchmark"
        )
        self._draft: Link[draft_pb2.DraftCommand] = Link(
            self._cell, Peer.DRAFT, draft_pb2.DraftCommand, "benchmark"
        )
        self._links: dict[Peer, Link[Any]] = {Peer.TARGET: self._target, Peer.DRAFT: self._draft}
        self._address = draft
        self._ready: dict[Peer, Any] = {}
        self._step = 0
        self._epoch = int(time.time() * 1000)
        self._session = 0
        self._pinged = 0.0

    def connect(self, timeout_s: float) -> None:
        """Opens the streams that are not open; tries until a server that starts is there."""
        deadline = time.monotonic() + timeout_s
        while closed := [peer for peer, link in self._links.items() if not link.open]:
            peer, link = closed[0], self._links[closed[0]]
            link.connect()
            event = self._next(deadline, lost=True, peer=peer)
            if isinstance(event, Lost):
                link.lost(time.monotonic())
                time.sleep(0.1)
                continue
            self._ready[peer] = event.event.ready
            if peer is Peer.TARGET:
                self._step = event.event.ready.last_step
        check_pair(self._ready[Peer.TARGET], self._ready[Peer.DRAFT])

    def lost(self) -> None:
        """Waits for the end of a stream, and forgets the session."""
        event = self._next(time.monotonic() + 30, lost=True)
        while not isinstance(event, Lost):
            event = self._next(time.monotonic() + 30, lost=True)
        self._links[event.peer].lost(time.monotonic())
        self._session = 0

    def attach(self) -> str:
        """A new session; how it is connected."""
        self._session = self._session_number()
        address = self._ready[Peer.DRAFT].handoff_address or self._address
        self._draft.attach(self._session, self._step + 1, address)
        self._target.attach(self._session, self._step + 1, address)
        found = self._both("attached", 20)
        return str(found[Peer.TARGET].transport)

    def detach(self) -> None:
        """Both servers end the session; returns when they have."""
        for link in self._links.values():
            link.detach(self._session, "enough")
        self._both("detached", 40)
        self._session = 0

    def steps(self, decode: int) -> tuple[list[int], int]:
        """A request with so many decode steps at most: its tokens, and those accepted drafts."""
        self._epoch += 1
        self._admit()
        tokens = list(self._prefill().tokens)
        accepted = 0
        for _ in range(decode):
            done = self._decode()
            tokens += done.tokens
            accepted += done.accepted
            if done.finish != common_pb2.FINISH_NONE:
                break
        for link in self._links.values():
            link.release(0, self._epoch)
        return tokens, accepted

    def ping(self) -> None:
        """Keeps both servers; call it at least every few seconds."""
        if time.monotonic() > self._pinged + PING_S:
            self._pinged = time.monotonic()
            for link in self._links.values():
                link.ping()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._cell.shutdown()

    def _session_number(self) -> int:
        self._epoch += 1
        return self._epoch

    def _admit(self) -> None:
        command = self._target.command()
        admit = command.admit
        admit.slot, admit.epoch, admit.publish = 0, self._epoch, True
        admit.prompt_ids.extend(PROMPT)
        admit.limit = len(PROMPT) + TOKENS
        admit.sampling.top_p = admit.sampling.repetition_penalty = 1.0
        self._target.send(command)
        own = self._draft.command()
        own.admit.session, own.admit.slot, own.admit.epoch = self._session, 0, self._epoch
        self._draft.send(own)

    def _prefill(self) -> Any:
        count = len(PROMPT)
        return self._plan(
            common_pb2.STEP_KIND_PREFILL, {"count": count, "last": True}, nodes=0, rows=count
        )

    def _decode(self) -> Any:
        return self._plan(common_pb2.STEP_KIND_DECODE, {"nodes": NODES}, nodes=NODES, rows=NODES)

    def _plan(self, kind: Any, fields: dict[str, Any], nodes: int, rows: int) -> Any:
        """The draft's half first, as it works longest; what the target did."""
        self._step += 1
        command = self._draft.command()
        plan = command.plan
        plan.step, plan.session, plan.kind, plan.after = (
            self._step, self._session, kind, self._step - 1,
        )  # fmt: skip
        plan.entries.add(slot=0, epoch=self._epoch, nodes=nodes, rows=rows)
        self._draft.send(command)
        own = self._target.command()
        own.plan.step, own.plan.session, own.plan.kind = self._step, self._session, kind
        reserve = len(PROMPT) + TOKENS + NODES
        own.plan.entries.add(slot=0, epoch=self._epoch, reserve=reserve, **fields)
        self._target.send(own)
        event = self._until(lambda e: e.peer is Peer.TARGET and self._is(e, "step_done"), 20)
        done = event.event.step_done
        if done.step != self._step or done.entries[0].outcome != target_pb2.StepEntry.OUTCOME_DONE:
            raise RuntimeError(f"step {self._step}: {done}")
        return done.entries[0]

    def _both(self, kind: str, timeout_s: float) -> dict[Peer, Any]:
        found: dict[Peer, Any] = {}

        def of_session(event: Received) -> bool:
            said = getattr(event.event, kind) if self._is(event, kind) else None
            if said is None or said.session != self._session:
                return False
            found[event.peer] = said
            return len(found) == 2

        self._until(of_session, timeout_s)
        return found

    def _until(self, wanted: Callable[[Received], bool], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._next(deadline)
            if self._is(event, "rejected"):
                raise RuntimeError(f"the {event.peer.value} refuses: {event.event.rejected}")
            if wanted(event):
                return event

    def _next(self, deadline: float, lost: bool = False, peer: Peer | None = None) -> Any:
        """The next thing of a stream that is open, of `peer` if one is named."""
        while True:
            self.ping()
            try:
                event = self._inbox.get(timeout=0.25)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise RuntimeError("no answer in time") from None
                continue
            link = self._links[event.peer]
            if event.life != link.life or not link.open:
                continue
            if peer and event.peer is not peer:
                if isinstance(event, Lost):
                    link.lost(time.monotonic())
                continue
            if isinstance(event, Lost) and not lost:
                raise RuntimeError(f"lost the {event.peer.value}: {event.error}")
            return event

    @staticmethod
    def _is(event: Received, kind: str) -> bool:
        return event.event.WhichOneof("event") == kind


@contextmanager
def driver(target: str, draft: str, timeout_s: float = 60.0) -> Iterator[Driver]:
    """One that is connected."""
    made = Driver(target, draft)
    try:
        made.connect(timeout_s)
        yield made
    finally:
        made.close()
