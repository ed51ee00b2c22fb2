"""A session whose messages stay on devices: plans are put on a stream, what came of them is told
later.

The slots' true state is on the device (`slipstream.kernels.peer`). `Session.slots` follows it as
verdicts arrive; of what is still on its way the host knows bounds, and makes room for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.draft.commands import Event, Live, Plan, PlanEntry
from services.draft.completions import Completions, Words
from services.draft.peer_input import Ask, Edit, signed
from services.draft.peer_step import Piece
from services.draft.runner import DeviceEnd
from services.draft.session import Refusal, Session, Slot
from slipstream.handoff.layout import RING
from slipstream.kernels.peer import VERDICTS
from slipstream.wire import MAX_NODES

if TYPE_CHECKING:
    from services.draft.device_runner import DeviceContext

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""Most seconds that a stream whose waits are released may take to become idle."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What became of the records of one step; `words` is (records, VERDICT_INTS)."""

    session: int
    step: int
    words: Words


@dataclass(frozen=True, slots=True)
class Failed:
    """A step of a session raised on its device."""

    session: int
    error: BaseException


Notice = Verdicts | Failed


@dataclass(slots=True)
class _Room:
    """What a slot's pages hold.

    Attributes:
        capacity: rows, beside a block; negative without pages for one.
        coming: most fresh rows of each step that is on the stream and not yet told of.
    """

    capacity: int = 0
    coming: dict[int, int] = field(default_factory=dict)


class DeviceSession:
    """The device's half of a `Session`.

    Args:
        base: the session; its `end` is the one of this session.
        tell: called on another thread with every notice, to be given back to `settle`.

    Raises RuntimeError from any method once a step has failed on the device.
    """

    def __init__(
        self,
        base: Session,
        context: DeviceContext,
        end: DeviceEnd,
        tell: Callable[[Notice], None],
    ) -> None:
        self._base, self._context, self._end, self._tell = base, context, end, tell
        peer = context.step.peer
        assert peer is not None
        self._step, self._peer = context.step, peer
        self._rooms: dict[int, _Room] = {}
        # What an earlier session left in the slots is nobody's.
        self._edits = {slot: Edit(reset=True) for slot in range(context.spec.slots)}
        self._plans: dict[int, Plan] = {}  # whose context was not taken yet
        self._releases = 0
        self._taken: dict[int, int] = {}  # steps on the stream: releases before them
        self._closed = False
        self._completions = Completions(lambda error: tell(Failed(base.number, error)))
        for number, slot in base.slots.items():
            self.admitted(number, slot.epoch)
        with self._step.graphs.on_stream():
            self._peer.input.connect(end.memory, end.which)

    # Slots

    def admitted(self, number: int, epoch: int) -> None:
        """A request took the slot."""
        self._rooms[number] = _Room()
        self._edits[number] = Edit(reset=True, held=epoch)

    def released(self, number: int) -> None:
        """The slot is empty, and its pages are free."""
        del self._rooms[number]
        self._releases += 1
        self._edits[number] = Edit(reset=True)

    def fed(self, number: int) -> None:
        """The slot may find pages again."""
        self._edit(number).feed = True

    def _edit(self, number: int) -> Edit:
        """The edit of a held slot, which goes with the next plan."""
        edit = self._edits.setdefault(number, Edit())
        edit.capacity = self._rooms[number].capacity
        return edit

    # Steps

    def enqueue(self, plan: Plan, empty: bool = False) -> list[tuple[PlanEntry, Refusal]]:
        """Puts a plan on the stream, and returns the entries that are refused.

        Everything the plan is to do comes after what it waits for; nothing here waits for a device.

        Args:
            empty: it takes no context and proposes nothing.
        """
        refused: list[tuple[PlanEntry, Refusal]] = []
        asks = [] if empty or not plan.decode else self._asks(plan, refused)
        self._peer.results.begin_plan()
        with self._step.graphs.on_stream():
            if not empty:
                while plan.after - self._base.written > RING:  # no more records are kept
                    self._take(self._send(plan, self._base.written + RING, []))
                self._take(self._send(plan, plan.after, asks))
                if plan.decode and any(entry.nodes > 1 for entry in plan.entries):
                    self._draft(asks)
            self._end.publish(plan.step)
            self._plans[plan.step] = plan
            self._end.planned(plan.step)
            end, step = self._end, plan.step
            self._peer.results.end_plan(self._completions, lambda: end.passed(step))
        return refused

    def _asks(self, plan: Plan, refused: list[tuple[PlanEntry, Refusal]]) -> list[Ask]:
        """Blocks of the entries that may have one; whether their slots are live is not known."""
        asks: list[Ask] = []
        seen: set[int] = set()
        # A ring entry has room for the target's slots, which may be fewer than the draft's.
        out, most = 0, min(self._peer.input.slots, self._end.memory.layout.slots)
        for index, entry in enumerate(plan.entries):
            try:
                slot = self._base.wanted(entry, seen)
            except Refusal as refusal:
                refused.append((entry, refusal))
            else:
                if slot is not None and index < most and out + entry.nodes <= most * MAX_NODES:
                    rows = self._context.block_rows(entry.nodes)
                    asks.append(Ask(entry.slot, entry.epoch, entry.nodes, rows, out, index))
            out += entry.nodes
        return asks

    def _send(self, plan: Plan, after: int, asks: Sequence[Ask]) -> dict[int, list[Piece]]:
        """Everything that the host says of a plan, and room for the context up to `after`.

        Returns the passes that take each step of it.
        """
        passes, limits = {}, {}
        for step in range(self._base.written + 1, after + 1):
            passes[step], limits[step] = self._peer.passes(self._expect(step))
        for number, room in self._rooms.items():
            self._reserve(number, room)
        self._step.send_tables()
        edits, self._edits = self._edits, {}
        self._peer.input.send(
            plan.step, len(plan.entries), self._base.written + 1, limits, asks, edits
        )
        if edits:
            self._step.run("edit")
        return passes

    def _expect(self, step: int) -> int:
        """Most fresh rows of a step, which is about to be taken."""
        plan, total = self._plans.get(step), 0
        for entry in () if plan is None else plan.entries:
            slot, room = self._base.slots.get(entry.slot), self._rooms.get(entry.slot)
            if plan is None or slot is None or room is None or slot.epoch != entry.epoch:
                continue
            # Of a tree only one path is kept, which is no deeper than a block.
            rows = entry.rows
            if plan.decode:
                path = min(entry.nodes, self._context.spec.block_size)
                rows = path + max(0, entry.rows - entry.nodes)
            room.coming[step] = rows
            total += rows
        return total

    def _reserve(self, number: int, room: _Room) -> None:
        """Pages for what may come; where there are none the device will turn rows away."""
        slot = self._base.slots[number]
        if not room.coming or slot.starved:
            return
        rows = slot.rows + sum(room.coming.values())
        if rows > room.capacity:
            capacity = self._context.reserve_most(number, rows)
            if capacity > room.capacity:
                room.capacity = capacity
                self._edit(number)

    def _take(self, passes: dict[int, list[Piece]]) -> None:
        """Waits, on the stream, for the context of these steps, and takes it."""
        if not passes:
            return
        after = max(passes)
        self._end.await_context(after)
        for step, pieces in passes.items():
            self._peer.results.begin_copy()
            self._step.run("accept")
            for piece in pieces:
                self._step.run(*piece)
            self._base.written = step
            self._taken[step] = self._releases
            self._plans.pop(step, None)
            self._peer.results.copy(
                self._peer.verdicts[step % VERDICTS], self._completions, self._told
            )
        self._end.consumed(after)

    def _told(self, words: Words) -> None:
        """On the thread of the completions."""
        step, count = words[0, :2].tolist()
        self._tell(Verdicts(self._base.number, step, words[1 : 1 + max(0, count)].copy()))

    def _draft(self, asks: Sequence[Ask]) -> None:
        """Trees of the blocks, or the word that there are none."""
        most = self._peer.most_blocks
        for first in range(0, max(1, len(asks)), most):
            part = asks[first : first + most]
            self._step.run("open")
            if part:
                finish = self._context.finish_for((ask.slot, ask.nodes) for ask in part)
                self._step.draft(sum(ask.rows for ask in part), finish)
            self._step.run("put")

    # What came of them

    def settle(self, notice: Notice) -> list[Event]:
        """Takes note of verdicts; says whose state changed."""
        if isinstance(notice, Failed):
            raise RuntimeError("a draft step failed on its device") from notice.error
        before = self._taken.pop(notice.step)
        for room in self._rooms.values():
            room.coming.pop(notice.step, None)
        events: list[Event] = []
        for row in notice.words.tolist():
            number, epoch, code, rows, *rest = row
            slot = self._base.slots.get(number)
            if slot is None or signed(slot.epoch) != epoch:
                continue
            live, starved = rest[-2:]
            slot.rows, slot.live, slot.starved = rows, bool(live), bool(starved)
            events += self._events(number, slot, code, rest)
            if slot.starved and before != self._releases:
                # It asked before the pages of a Release could be given to it.
                slot.starved = False
                self.fed(number)
                events.append(self._base.behind_event(number, slot, "pages are free again"))
        return events

    def _events(self, number: int, slot: Slot, code: int, rest: Sequence[int]) -> Iterable[Event]:
        if code == 0:
            return ()
        if code == 1:
            return (Live(self._base.number, number, slot.epoch, slot.rows),)
        return (self._base.behind_event(number, slot, _reason(code, rest)),)

    # The end

    def close(self) -> None:
        """After the end's `end`: waits until the stream is idle, then lets go of the memory.

        Raises RuntimeError when the stream does not become idle, or a step has failed.
        """
        if self._closed:
            return
        self._closed = True
        began = time.monotonic()
        with self._step.graphs.on_stream():
            self._peer.input.connect(None)
            idle = self._peer.results.begin_plan(IDLE_S)
            if idle:
                self._peer.results.end_plan(self._completions, lambda: None)
        if not idle or not self._completions.drain(IDLE_S):
            raise RuntimeError(f"a draft stream failed, or is not idle {IDLE_S:g} s after its end")
        self._completions.close()
        log.debug("the stream was idle after %.1f ms", 1e3 * (time.monotonic() - began))
        self._end.close()


def _reason(code: int, rest: Sequence[int]) -> str:
    """What `Session` says of the same; `rest` as in a verdict from V_FIRST on."""
    first, count, anchor, had = rest[:4]
    end = first + count
    match code:
        case 2:
            return "the rows do not end at the start"
        case 3:
            return f"a bad record: rows {first} + {count}"
        case 4:
            return f"a gap: rows from {first} on came, {had} are there"
        case 5:
            return f"a bad record: anchor {anchor} after {end} rows"
        case 6:
            return f"a bad record: it ends at row {end}, {had} were there"
        case 7:
            return f"no pages: there is no room for {end} rows"
        case _:
            return f"a bad record: rows {first} + {count} are more than were planned"
