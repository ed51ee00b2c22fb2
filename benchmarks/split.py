"""The whole split step: two server processes, and the gateway's scheduler in this one.

The scheduler is the real one, without REST and text: requests of random ids, greedy, that no token
ends, with pinned trees. What the target says of every decode step is kept as it came.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.split_servers import Servers
from gateway.cell import Command, GrpcCell, Lost, Peer, Post, Received
from gateway.request import Chunk, GenerateParams
from gateway.scheduler import Scheduler
from gateway.settings import PingPongMode, SchedulerSettings
from slipstream.serving import SWITCH_S
from slipstream.v1 import common_pb2, target_pb2

CONNECT_S = 30.0
SESSION_S = 5.0
"""After the scheduler is ready, which waits for the draft itself for some seconds."""

STEADY_STEPS = 8
"""Steps in a row that have all requests, each with its whole tree, before anything is measured."""

KEPT = 20
"""Most refusals that are kept, to say what went wrong."""

Kind = Literal["chain", "tree"]

_DECODE = common_pb2.STEP_KIND_DECODE


@dataclass(frozen=True, slots=True)
class Load:
    """What runs: `batch` requests whose prompts have `context` tokens.

    Attributes:
        nodes: of every tree, root included.
        width: of trees that are not chains.
        depth: plans ahead of the step that runs.
    """

    batch: int
    context: int = 1024
    kind: Kind = "chain"
    nodes: int = 16
    width: int = 7
    depth: int = 1
    ping_pong: PingPongMode = "off"

    def settings(self, servers: Servers) -> SchedulerSettings:
        """Of a gateway for it."""
        return SchedulerSettings(
            target=servers.target_address,
            draft=servers.draft_address,
            pipeline_depth=self.depth,
            ping_pong=self.ping_pong,
            pin_nodes=True,
            tree="chain" if self.kind == "chain" else "top2gap",
            width=1 if self.kind == "chain" else self.width,
            budget=self.nodes,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step as it was planned and as the target says it was. Times in ns.

    Attributes:
        slots: of its requests; those of a group with ping-pong.
        least, nodes: fewest nodes planned for a request, and the nodes verified in all.
        sent, arrived: when its plan left and its result came, by this process's monotonic clock.
    """

    number: int
    slots: tuple[int, ...]
    least: int
    nodes: int
    accepted: int
    tokens: int
    sent: int
    arrived: int
    queued: int
    waited: int
    computed: int
    published: int
    drafted: int
    started: int
    enqueued: int
    handed: int


class NoSession(RuntimeError):
    """Target and draft cannot be connected as wanted: no other load will fare better."""


class Watch:
    """Keeps the steps of a cell as they pass, and what was said of its sessions."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.steps: list[Step] = []
        self.transports: list[str] = []
        self.detached: list[str] = []
        self.ended: list[str] = []
        self.rejected: list[str] = []
        self.changed = threading.Condition()
        self._plans: dict[int, tuple[int, tuple[int, ...], int]] = {}

    def planned(self, plan: target_pb2.TargetPlan) -> None:
        """A plan is about to be sent, late by the delay. On the scheduler's thread."""
        if self.delay_s:
            time.sleep(self.delay_s)
        if plan.kind == _DECODE:
            slots = tuple(entry.slot for entry in plan.entries)
            least = min((entry.nodes for entry in plan.entries), default=0)
            self._plans[plan.step] = time.monotonic_ns(), slots, least

    def received(self, message: Received | Lost) -> None:
        """On the streams' threads."""
        if isinstance(message, Lost):
            self._note(self.ended, f"{message.peer.value}: {message.error}")
            return
        event, kind = message.event, message.event.WhichOneof("event")
        if kind == "step_done" and isinstance(event, target_pb2.TargetEvent):
            self._step(event.step_done, int(1e9 * message.at))
        elif kind == "attached" and message.peer is Peer.TARGET:
            self._note(self.transports, event.attached.transport)
        elif kind == "rejected" and len(self.rejected) < KEPT:
            self.rejected.append(f"{message.peer.value}: {event.rejected.reason}")
        elif kind == "detached":
            self._note(self.detached, f"{message.peer.value}: {event.detached.reason}")

    def delivered(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        """The scheduler's chunks: of interest is who has ended."""
        for number, chunk in batch:
            if chunk.finish != "none":
                self._note(self.ended, f"request {number}: {chunk.finish} {chunk.error or ''}")

    def _note(self, notes: list[str], text: str) -> None:
        with self.changed:
            notes.append(text)
            self.changed.notify_all()

    def _step(self, done: target_pb2.StepDone, arrived: int) -> None:
        plan = self._plans.pop(done.step, None)
        if plan is None:
            return
        entries, times = done.entries, done.times
        step = Step(
            done.step, plan[1], plan[2],
            sum(entry.nodes for entry in entries),
            sum(entry.accepted for entry in entries),
            sum(len(entry.tokens) for entry in entries),
            plan[0], arrived, times.queued, times.waited, times.computed, times.published,
            times.drafted, times.started, times.enqueued, times.handed,
        )  # fmt: skip
        with self.changed:
            self.steps.append(step)
            self.changed.notify_all()


class WatchedCell(GrpcCell):
    """A cell whose plans and events pass a Watch."""

    def __init__(self, settings: SchedulerSettings, post: Post, watch: Watch) -> None:
        def seen(message: Received | Lost) -> None:
            watch.received(message)
            post(message)

        super().__init__(settings.target, settings.draft, seen)
        self._watch = watch

    def send(self, peer: Peer, command: Command) -> None:
        if isinstance(command, target_pb2.TargetCommand) and command.HasField("plan"):
            self._watch.planned(command.plan)
        super().send(peer, command)


class Driven:
    """Requests that run; `window` measures them.

    Attributes:
        transport: of the session, grpc or cuda_ipc.
    """

    def __init__(self, servers: Servers, load: Load, scheduler: Scheduler, watch: Watch) -> None:
        self.load = load
        self._servers, self._scheduler, self._watch = servers, scheduler, watch
        self.transport = watch.transports[-1]
        vocab = scheduler.info.vocab_size
        draw = random.Random(load.context)
        self._most = scheduler.info.max_model_len - load.context
        self.requests = [
            scheduler.submit(
                GenerateParams(
                    prompt_ids=tuple(draw.choices(range(vocab), k=load.context)),
                    max_tokens=self._most,
                )
            )
            for _ in range(load.batch)
        ]

    def settle(self, timeout: float = 120.0) -> None:
        """Waits until every request decodes with its whole tree. Raises RuntimeError."""
        steps = self._watch.steps

        def steady() -> bool:
            return len(steps) >= STEADY_STEPS and self._steady(steps[-STEADY_STEPS:])

        self._wait(steady, timeout, "all requests to decode")

    def window(
        self, count: int, *, warm: int = 10, delay_ms: float = 0.0, timeout: float = 60.0
    ) -> list[Step]:
        """The next `count` steps after `warm` more; plans leave `delay_ms` late meanwhile.

        Raises RuntimeError when they do not come, or are not all of all requests.
        """
        watch = self._watch
        watch.delay_s = delay_ms / 1e3
        try:
            first = len(watch.steps) + warm
            self._wait(lambda: len(watch.steps) >= first + count, timeout, f"{count} steps")
        finally:
            watch.delay_s = 0.0
        steps = watch.steps[first : first + count]
        if not self._steady(steps):
            raise RuntimeError("steps without some of the requests, or without their trees")
        return steps

    def _steady(self, steps: Sequence[Step]) -> bool:
        """Whether each step has all requests (of its group) with all nodes."""
        groups = {step.slots for step in steps}
        whole = {slot for group in groups for slot in group}
        return len(whole) == self.load.batch == sum(map(len, groups)) and all(
            step.least == self.load.nodes for step in steps
        )

    def _wait(self, until: Callable[[], bool], timeout: float, what: str) -> None:
        watch, deadline = self._watch, time.monotonic() + timeout
        before = len(watch.detached), len(watch.ended)
        with watch.changed:
            while not until():
                self._servers.check()
                if before != (len(watch.detached), len(watch.ended)):
                    said = (*watch.detached, *watch.ended, *watch.rejected)
                    raise RuntimeError(f"waiting for {what}: {said}")
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"waiting for {what}: {len(watch.steps)} steps in {timeout:g} s, the last"
                        f" {watch.steps[-1:]}; refused: {watch.rejected}"
                    )
                watch.changed.wait(0.5)


@contextmanager
def driven(servers: Servers, load: Load, transport: str = "") -> Iterator[Driven]:
    """`load` on the servers, not yet steady.

    Raises NoSession when the session is not over `transport`, where that is given.
    """
    servers.check()
    sys.setswitchinterval(SWITCH_S)  # as in a gateway
    watch, settings = Watch(), load.settings(servers)
    fatal: list[BaseException] = []
    scheduler = Scheduler(
        settings,
        watch.delivered,
        on_fatal=fatal.append,
        make_cell=lambda post: WatchedCell(settings, post, watch),
    )
    scheduler.start()
    try:
        scheduler.wait_ready(CONNECT_S)
        with watch.changed:
            met = watch.changed.wait_for(lambda: watch.transports, SESSION_S)
        if not met or (transport and watch.transports[-1] != transport):
            said = (*watch.transports, *watch.rejected, *watch.detached, *watch.ended)
            raise NoSession(f"no session over {transport}: {tuple(dict.fromkeys(said))}")
        yield Driven(servers, load, scheduler, watch)
        if fatal:
            raise RuntimeError(f"the scheduler failed: {fatal}")
    finally:
        watch.delay_s = 0.0
        scheduler.stop(0.0)


def columns(steps: Sequence[Step]) -> dict[str, list[Any]]:
    """The steps as they came, column by column; their slots as the number of them."""
    rows = [asdict(step) | {"slots": len(step.slots)} for step in steps]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
