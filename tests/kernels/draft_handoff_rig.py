"""The draft's engine over a target's memory and, beside it, over a stream: the same commands."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Behind,
    Event,
    Plan,
    PlanEntry,
    Release,
)
from services.draft.context_cache import PagePool
from services.draft.engine import Engine
from slipstream.handoff.base import ContextMessage, ContextRecord
from slipstream.handoff.layout import Layout
from slipstream.tree import TreeSpec, resolve_spec
from tests.fakes.device_end import FakeDeviceEnd, FakeMemory
from tests.kernels.test_draft_device import (
    MAX_LEN,
    SLOTS,
    WIDTH,
    B,
)
from tests.unit.draft_rig import FakeEnd

WAIT_S = 60.0
WHICH = 1
PAGES = 100  # enough for every slot at its longest
CHAIN = resolve_spec("chain", block_size=B)
TREE = resolve_spec("top2gap", 4, 24, block_size=B)
LAYOUT = Layout(SLOTS, pages=80, page_size=8, table_pages=10, width=WIDTH, dtype="float32")


class Meeting:
    """`Peers` that keep who is expected."""

    def __init__(self) -> None:
        self.done: dict[int, Callable[[Any], None]] = {}
        self.mappers: list[Any] = []

    def expect(self, session: int, first: int, spec: Any, done: Any, *_: Any, **more: Any) -> None:
        self.mappers.append(more.get("mapper"))
        self.done[session] = done

    def forget(self, session: int) -> None:
        del self.done[session]


class Driver:
    """An engine and what it says."""

    def __init__(self, runner: Any) -> None:
        self.peers = Meeting()
        self.events: queue.Queue[Event] = queue.Queue()
        self.closed: queue.Queue[BaseException | None] = queue.Queue()
        lock = threading.Lock()
        self.engine = Engine(runner, self.peers, TREE, lock, self.events.put, self.closed.put)
        self.engine.start()
        self.number = 1

    def send(self, make: Callable[..., Any], *values: Any) -> None:
        self.number += 1
        self.engine.submit(make(self.number, *values))

    def connect(self, session: int, first_step: int, end: Any) -> None:
        self.send(Attach, session, first_step)
        while session not in self.peers.done:
            threading.Event().wait(0.001)
        self.peers.done[session](end)
        assert isinstance(self.event(), Attached)

    def event(self) -> Event:
        return self.events.get(timeout=WAIT_S)

    def stop(self) -> BaseException | None:
        self.engine.close("over")
        self.engine.interrupt("over")
        return self.closed.get(timeout=WAIT_S)


@dataclass(slots=True)
class Request:
    """What the target knows of a slot."""

    slot: int
    epoch: int
    spec: TreeSpec
    tokens: list[int]
    features: Tensor
    cursor: int = 0
    live: bool = False
    behind: bool = False

    @property
    def start(self) -> int:
        return len(self.tokens) - 1


@dataclass(slots=True)
class Twins:
    """Both engines, and a target that says the same to them."""

    plain: Driver
    device: Driver
    memory: FakeMemory
    session: int
    first_step: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    requests: dict[int, Request] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    epoch: int = (1 << 64) - 5
    step: int = 0
    after: int = 0
    drafted: int = 0
    differ: int = 0
    ends: tuple[FakeEnd, FakeDeviceEnd] = ()  # type: ignore[assignment]

    def begin(self) -> None:
        self.step = self.after = self.first_step - 1
        end = FakeDeviceEnd(self.session, self.memory, WHICH, self.first_step)
        self.ends = (FakeEnd(self.session), end)
        for driver, own in zip((self.plain, self.device), self.ends, strict=True):
            driver.connect(self.session, self.first_step, own)

    @property
    def plain_pool(self) -> PagePool:
        return self.plain.engine._session.context.cache._pool  # type: ignore[union-attr]

    @property
    def device_pool(self) -> PagePool:
        return self.device.engine._session.context._pool  # type: ignore[union-attr]

    def both(self, make: Callable[..., Any], *values: Any) -> None:
        for driver in (self.plain, self.device):
            driver.send(make, *values)

    def admit(self, slot: int, spec: TreeSpec = TREE, prompt: int = 4) -> Request:
        self.epoch = (self.epoch + 1) % (1 << 64)
        tokens = [self.rng.randrange(4, 300) for _ in range(prompt + 1)]
        seed = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        features = torch.randn(LAYOUT.page_size * LAYOUT.table_pages, WIDTH, generator=seed)
        request = self.requests[slot] = Request(slot, self.epoch, spec, tokens, features)
        first = slot * LAYOUT.table_pages
        pages = list(range(first, first + LAYOUT.table_pages))
        self.rng.shuffle(pages)
        self.memory.tables[slot] = torch.tensor(pages)
        self.memory.put_rows(slot, 0, features)
        self.both(Admit, self.session, slot, self.epoch, spec, 0.0, 3, 0)
        return request

    def release(self, slot: int) -> None:
        request = self.requests.pop(slot)
        self.both(Release, slot, request.epoch)

    def plan(self, nodes: dict[int, int], decode: bool = True, replay: int = 0) -> int:
        self.step += 1
        entries = tuple(
            PlanEntry(slot, self.requests[slot].epoch, count, count + replay)
            if decode
            else PlanEntry(slot, self.requests[slot].epoch, 0, count)
            for slot, count in nodes.items()
        )
        plan = Plan(0, self.step, self.session, decode, entries, self.after)
        self.plans[self.step] = plan
        self.both(Plan, self.step, self.session, decode, entries, self.after)
        return self.step

    def check_trees(self, step: int) -> dict[int, Any]:
        """The proposals of a step are equal, and those of the slots that have one."""
        end, device_end = self.ends
        proposal = end.proposals.get(timeout=WAIT_S)
        assert proposal.step == step
        want = {
            tree.slot: (signed(tree.epoch), tree.tokens, tree.parents) for tree in proposal.trees
        }
        device_end.await_proposal(step)
        nodes = [entry.nodes for entry in self.plans[step].entries]
        got = self.memory.read_trees(WHICH, step, nodes)
        if all(count <= 1 for count in nodes):
            assert want == {}
            return want
        assert got is not None
        self.drafted += len(want)
        if not self.memory.features.is_cuda:
            assert got == want
        else:  # rounding differs, so near-ties may turn
            assert {s: (e, t[0]) for s, (e, t, _) in got.items()} == {
                s: (e, t[0]) for s, (e, t, _) in want.items()
            }
            self.differ += sum(got[slot] != want[slot] for slot in want)
            assert self.differ <= 2 + self.drafted // 50
        return want

    def publish(self, step: int, records: list[ContextRecord]) -> None:
        """A record for each entry of the plan; the rows are what the features say."""
        rows = [
            self.requests[r.slot].features[r.first_row : r.first_row + r.count]
            for r in records
            if r.count and r.slot in self.requests
        ]
        raw = torch.cat([torch.zeros(0, WIDTH), *rows]).numpy().tobytes()
        given = tuple(record for record in records if record.count)
        self.ends[0].mailbox.put(ContextMessage(step, given, raw))
        self.ends[1].publish_context(step, records)
        self.after = step

    def record(self, request: Request, most: int) -> ContextRecord:
        """Up to `most` rows from the cursor on."""
        count = min(most, request.start - request.cursor)
        first = request.cursor
        request.cursor += count
        caught_up = request.cursor == request.start
        anchor = request.tokens[-1]
        return ContextRecord(request.slot, request.epoch, first, count, anchor, caught_up)

    def prefill(self, *requests: Request, chunk: int | None = None) -> None:
        """A chunk of each prompt, by default all of it."""
        chunks = {r.slot: chunk or r.start for r in requests}
        step = self.plan(chunks, decode=False)
        self.ends[0].proposals.get(timeout=WAIT_S)
        self.publish(step, [self.record(request, chunks[request.slot]) for request in requests])

    def decode(self, nodes: dict[int, int], replay: int = 0) -> dict[int, Any]:
        """A step of the lock-step loop, and the context that the target publishes for it."""
        step = self.plan(nodes, replay=replay)
        trees = self.check_trees(step)
        records = []
        for slot, count in nodes.items():
            request = self.requests[slot]
            if request.start + B < MAX_LEN:
                for _ in range(self.rng.randint(1, min(count, B))):
                    request.tokens.append(self.rng.randrange(4, 300))
            records.append(self.record(request, count + replay))
        self.publish(step, records)
        return trees

    def events(self, count: int) -> list[Event]:
        """The next events, the same of both; those of one slot in their order."""
        pairs = [(self.plain.event(), self.device.event()) for _ in range(count)]
        for want, got in pairs:
            assert without_pages(got) == without_pages(want)
        return [want for want, _ in pairs]

    def quiet(self) -> None:
        """Nothing is said but what was asked for."""
        self.flush()
        self.flush()
        assert self.plain.events.empty() and self.device.events.empty()

    def flush(self) -> None:
        """Both engines took all context there is."""
        step = self.plan(dict.fromkeys(self.requests, 2))
        self.check_trees(step)
        self.publish(step, [self.record(r, 2) for r in self.requests.values()])


def without_pages(event: Event) -> Event:
    if isinstance(event, Behind) and event.reason.startswith("no pages"):
        return Behind(event.session, event.slot, event.epoch, event.rows, "no pages")
    return event


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
