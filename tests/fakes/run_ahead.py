"""A target without a model that runs ahead, and a draft's end on a device, both in memory.

The runner's stream is a list: what it is told is done in order, up to the step that the test lets
end. So the engine sees what it would see of a GPU: results late, lengths that it does not know yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from services.target.runner import (
    DecodeEntry,
    EntryResult,
    Finish,
    Link,
    LinkEntry,
    PrefillEntry,
    SlotAdmit,
    Stamps,
)
from slipstream.handoff.base import ContextRecord, ProposedTree
from tests.fakes.target import FakeTargetRunner

MOST_COMMITS = 8
WAIT_S = 20.0


class FakeDeviceEnd:
    """The target's end of a session whose messages stay on a device.

    Attributes:
        propose: the trees of a step, asked for when the stream reaches it.
        records: what the stream published, by step.
        operations, passed_steps: calls, in order.
        ended: reasons given to `end`.
    """

    transport: Literal["cuda_ipc"] = "cuda_ipc"
    one_gpu = False

    def __init__(self, session: int, which: int = 0) -> None:
        self.session, self.which = session, which
        self.alive = True
        self.reason = ""
        self.propose: Callable[[int], Sequence[ProposedTree]] = lambda step: ()
        self.records: dict[int, list[ContextRecord]] = {}
        self.operations: list[tuple[str, int]] = []
        self.passed_steps: list[int] = []
        self.ended: list[str] = []

    def _put(self, name: str, step: int) -> None:
        if self.alive:
            self.operations.append((name, step))

    def await_proposal(self, step: int) -> None:
        self._put("proposal", step)

    def await_room(self, step: int) -> None:
        self._put("room", step)

    def publish(self, step: int) -> None:
        self._put("publish", step)

    def passed(self, step: int, waited_ns: int) -> None:
        assert waited_ns >= 0
        self.passed_steps.append(step)

    def end(self, reason: str) -> None:
        self.ended.append(reason)
        if self.alive:
            self.die(reason)

    def die(self, reason: str) -> None:
        self.alive, self.reason = False, reason


@dataclass(eq=False)
class FakeFlight:
    """A step on the fake's stream.

    Attributes:
        given: what is computed.
        error: raised in place of results.
    """

    runner: RunAheadFake
    kind: str
    given: Sequence[Any]
    link: Link | None
    found: list[EntryResult] = field(default_factory=list)
    landed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    read: bool = False
    stamp: Stamps = Stamps()

    def wait(self) -> None:
        assert self.landed.wait(WAIT_S), "nobody let the step end"
        if self.error is not None:
            raise self.error

    def results(self) -> list[EntryResult]:
        assert self.landed.is_set() and not self.read
        assert self is self.runner.unread.popleft(), "not in the order of steps"
        self.read = True
        return self.found

    def stamps(self) -> Stamps:
        return self.stamp


class RunAheadFake(FakeTargetRunner):
    """`RunAheadRunner` over the fake's books.

    Attributes:
        shared: given to the connector.
        stamp: when a step happened; asked for as it ends.
        held: steps end when the test calls `land`; otherwise as soon as they are started.
        started: (kind, slots) of every step.
        unread: flights whose results were not taken yet.
        cursors: feature rows that the stream published, by slot.
        rests: calls of `at_rest`.
        restless: as many of them as from now on do not say that this was all.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.spec = replace(self.spec, most_commits=MOST_COMMITS)
        self.shared: Any = object()
        self.stamp: Callable[[], Stamps] = Stamps
        self.held = True
        self.started: list[tuple[str, tuple[int, ...]]] = []
        self.unread: deque[FakeFlight] = deque()
        self.cursors: dict[int, int] = {}
        self.rests = self.restless = 0
        self._stream: deque[FakeFlight | Callable[[], None]] = deque()
        self._over: set[int] = set()
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        """Steps that have not ended."""
        with self._lock:
            return sum(isinstance(item, FakeFlight) for item in self._stream)

    def land(self, count: int = 1, error: BaseException | None = None) -> None:
        """Lets the next steps end; the last one with `error`. Any thread."""
        with self._lock:
            for left in reversed(range(count)):
                while not isinstance(item := self._stream.popleft(), FakeFlight):
                    item()
                self._run(item, error if left == 0 else None)
            while self._stream and not isinstance(self._stream[0], FakeFlight):
                self._stream.popleft()()  # type: ignore[operator]

    def land_all(self) -> None:
        """Lets every step end."""
        self.land(self.waiting)

    def admit(self, slot: int, admit: SlotAdmit) -> None:
        def do() -> None:
            FakeTargetRunner.admit(self, slot, admit)
            self.cursors[slot] = 0
            self._over.discard(slot)

        self._put(do)

    def release(self, slot: int) -> None:
        self._put(lambda: FakeTargetRunner.release(self, slot))

    def rewind(self, slot: int, rows: int) -> None:
        self._put(lambda: self.cursors.update({slot: rows}))

    def rewind_all(self) -> None:
        self._put(lambda: self.cursors.update(dict.fromkeys(self.cursors, 0)))

    def at_rest(self) -> bool:
        assert not self.unread and not self.waiting, "steps are on their way"
        self.rests += 1
        if self.restless:
            self.restless -= 1
            return False
        return True

    def start_prefill(self, entries: Sequence[PrefillEntry], link: Link | None) -> FakeFlight:
        assert entries
        return self._start("prefill", entries, link)

    def start_decode(self, entries: Sequence[DecodeEntry], link: Link | None) -> FakeFlight:
        assert entries or link is not None
        return self._start("decode", entries, link)

    def _start(self, kind: str, entries: Sequence[Any], link: Link | None) -> FakeFlight:
        if link is not None:
            assert [e.job for e in link.entries if e.job >= 0] == list(range(len(entries)))
            wait = link.end.await_proposal if link.awaits else link.end.await_room
            wait(link.step)
            link.end.publish(link.step)
        with self._lock:
            given = [replace(entry, pages=list(entry.pages)) for entry in entries]
            flight = FakeFlight(self, kind, given, link)
            self.started.append((kind, tuple(entry.slot for entry in entries)))
            self.unread.append(flight)
            self._stream.append(flight)
            if not self.held:
                self.land_all()
        return flight

    def _put(self, do: Callable[[], None]) -> None:
        with self._lock:
            if self._stream:
                self._stream.append(do)
            else:
                do()

    def _run(self, flight: FakeFlight, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise error
            if flight.kind == "prefill":
                flight.found = self.prefill(flight.given)
                self._end_where(flight, flight.found)
            else:
                trees = _trees(flight.link)
                jobs = _jobs(flight.link)
                for number, entry in enumerate(flight.given):
                    tree = trees.get(jobs[number]) if entry.linked else None
                    flight.found.append(self._decode_ahead(entry, tree))
                self._end_where(flight, flight.found)
            if flight.link is not None:
                self._publish(flight.link)
        except BaseException as raised:
            flight.error = raised
        flight.stamp = self.stamp()
        flight.landed.set()

    def _end_where(self, flight: FakeFlight, found: Sequence[EntryResult]) -> None:
        for entry, result in zip(flight.given, found, strict=True):
            if result.finish is not Finish.NONE:
                self._over.add(entry.slot)

    def _decode_ahead(self, entry: DecodeEntry, tree: ProposedTree | None) -> EntryResult:
        """One entry, from the lengths that the device knows."""
        slot = self._slots[entry.slot]
        assert entry.start <= slot.rows, "a start beyond what is there"
        assert (slot.rows + entry.nodes - 1) // self.spec.page_size < len(entry.pages)
        if entry.slot in self._over:
            return EntryResult(nodes=1)
        proposed = entry.proposed if tree is None else (tree.tokens, tree.parents)
        known = replace(entry, start=slot.rows, anchor=slot.tokens[-1], proposed=proposed)
        result = self._decode(slot, known)
        assert len(result.tokens) <= self.spec.most_commits
        return result

    def _publish(self, link: Link) -> None:
        records = []
        for entry in link.entries:
            if entry.job >= 0:
                records += self._record(entry)
        link.end.records[link.step] = records  # type: ignore[attr-defined]

    def _record(self, entry: LinkEntry) -> list[ContextRecord]:
        slot, first = self._slots[entry.slot], self.cursors[entry.slot]
        count = min(slot.rows - first, entry.most)
        if count <= 0:
            return []
        self.cursors[entry.slot] += count
        live = entry.live and first + count == slot.rows
        anchor = slot.tokens[min(slot.rows, len(slot.tokens) - 1)]
        return [ContextRecord(entry.slot, entry.epoch, first, count, anchor, live)]


def _jobs(link: Link | None) -> dict[int, tuple[int, int]]:
    """(slot, epoch) of each job of a linked step."""
    entries = link.entries if link is not None else ()
    return {entry.job: (entry.slot, entry.epoch) for entry in entries if entry.job >= 0}


def _trees(link: Link | None) -> dict[tuple[int, int], ProposedTree]:
    """What lies in the ring when the stream reaches a step; a dead draft left nothing."""
    if link is None or not link.awaits or not link.end.alive:
        return {}
    propose: Callable[[int], Sequence[ProposedTree]] = link.end.propose  # type: ignore[attr-defined]
    return {(tree.slot, tree.epoch): tree for tree in propose(link.step)}
