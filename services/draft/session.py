"""One session of the draft: its slots, and what the target's context records do to them.

Invariant: `Slot.rows` context rows of a slot are in the cache, positions 0 .. rows - 1, each
written once; a live slot's `anchor` sits at position `rows`, where the target will verify next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from services.draft.commands import Admit, Attach, Behind, Event, Live, Plan, PlanEntry, Release
from services.draft.runner import (
    ContextRows,
    DeviceEnd,
    DraftEntry,
    Drafting,
    DraftRunner,
    NoPages,
)
from slipstream.handoff.base import ContextMessage, ContextRecord, DraftEnd
from slipstream.tree import TreeSpec
from slipstream.v1 import common_pb2 as pb
from slipstream.wire import MAX_NODES


class Refusal(Exception):
    """A command, or an entry of a plan, cannot be carried out; `code` is a RejectCode."""

    def __init__(self, code: pb.RejectCode.ValueType, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True)
class Slot:
    """A running request.

    Attributes:
        rows: context rows written; also the position of `anchor` while live.
        live: every row is there and the anchor is known.
        behind: after a record that did not fit, the row with which the target goes on if it knows
            nothing of it; None once a record fitted. Behind is said again only when the target
            went on elsewhere, so that one gap causes one replay.
        starved: rows were turned away for want of pages; waits for a Release.
    """

    epoch: int
    rows: int = 0
    anchor: int = -1
    live: bool = False
    behind: int | None = None
    starved: bool = False


class DevicePart(Protocol):
    """What a session has whose messages stay on devices; `services.draft.device_session`."""

    def admitted(self, number: int, epoch: int) -> None:
        """A request took the slot."""
        ...

    def released(self, number: int) -> None:
        """The slot is empty, and its pages are free."""
        ...

    def fed(self, number: int) -> None:
        """The slot may find pages again."""
        ...

    def enqueue(self, plan: Plan, empty: bool = False) -> list[tuple[PlanEntry, Refusal]]:
        """Puts a plan on the stream, and returns the entries that are refused."""
        ...

    def settle(self, notice: Any) -> list[Event]:
        """Takes note of what a step did; says whose state changed. Raises when it failed."""
        ...

    def close(self) -> None:
        """After the end of the handoff: returns once no device works for the session."""
        ...


class Session:
    """One life of the connection to a target.

    Attributes:
        number: the session's number; `command`: the number of the Attach that began it.
        end: the draft's end of the handoff; None until the target has come.
        device: what a session has whose messages stay on devices. It does the work of `take` and
            `entries`, and `slots` follows.
        next_step: the step that the next plan must have.
        written: the context of all steps up to this one was taken.
    """

    def __init__(self, attach: Attach, runner: DraftRunner) -> None:
        self.number = attach.session
        self.command = attach.number
        self.end: DraftEnd | DeviceEnd | None = None
        self.next_step = attach.first_step
        self.written = attach.first_step - 1
        self.slots: dict[int, Slot] = {}
        self._spec = runner.spec
        self.context = runner.open_context()
        self.device: DevicePart | None = None

    def close(self, reason: str) -> None:
        """Ends the handoff and frees the context; waits until no device works on it."""
        if self.end is not None:
            self.end.end(reason)
        if self.device is not None:
            self.device.close()
        self.slots.clear()
        self.context.close()

    def admit(self, admit: Admit, default: TreeSpec) -> None:
        """Raises Refusal when the slot is out of range or taken."""
        self._check_range(admit.slot)
        taken = self.slots.get(admit.slot)
        if taken is not None:
            raise Refusal(
                pb.REJECT_CODE_STALE_EPOCH, f"slot {admit.slot} is held by epoch {taken.epoch}"
            )
        tree = admit.tree if admit.tree is not None else default
        drafting = Drafting(tree, admit.temperature, admit.seed, admit.choice)
        self.context.admit(admit.slot, drafting)
        self.slots[admit.slot] = Slot(admit.epoch)
        if self.device is not None:
            self.device.admitted(admit.slot, admit.epoch)

    def release(self, release: Release) -> list[Event]:
        """Frees the slot; slots that had found no pages are told of anew. Raises Refusal."""
        self._held(release.slot, release.epoch)
        del self.slots[release.slot]
        self.context.release(release.slot)
        if self.device is not None:
            self.device.released(release.slot)
        events: list[Event] = []
        for number, slot in self.slots.items():
            if slot.starved:
                slot.starved = False
                if self.device is not None:
                    self.device.fed(number)
                events.append(self.behind_event(number, slot, "pages are free again"))
        return events

    def take(self, message: ContextMessage) -> list[Event]:
        """Writes a step's context and says whose state changed.

        Rows that the draft has are skipped. A record that does not fit leaves its slot behind.
        """
        size, events = self._spec.row_bytes, []
        rows = memoryview(message.rows)
        sound = len(rows) == size * sum(record.count for record in message.records)
        writes: list[ContextRows] = []
        at = 0
        for record in message.records:
            part = rows[at : at + record.count * size]
            at += record.count * size
            slot = self.slots.get(record.slot)
            if slot is None or slot.epoch != record.epoch or slot.starved:
                continue
            wrong = self._fault(slot, record) if sound else "a record whose rows are not there"
            if wrong is None and record.first_row + record.count > slot.rows:
                wrong = self._place(slot, record, part, writes)
            events += self._settle(slot, record, wrong)
        if writes:
            self.context.write(writes)
        return events

    def _fault(self, slot: Slot, record: ContextRecord) -> str | None:
        """What is wrong with a record whose bytes are there; None: nothing."""
        if record.first_row < 0 or record.count < 0:
            return f"a bad record: rows {record.first_row} + {record.count}"
        if record.first_row > slot.rows:
            return f"a gap: rows from {record.first_row} on came, {slot.rows} are there"
        if not record.caught_up:
            return None
        end = record.first_row + record.count
        if not 0 <= record.anchor < self._spec.vocab_size or end == 0:
            return f"a bad record: anchor {record.anchor} after {end} rows"
        if end < slot.rows:
            # Rows that the target never committed: none of the slot's rows can be trusted.
            had, slot.rows = slot.rows, 0
            return f"a bad record: it ends at row {end}, {had} were there"
        return None

    def _place(
        self, slot: Slot, record: ContextRecord, part: memoryview, writes: list[ContextRows]
    ) -> str | None:
        """Takes the record's new rows; says what is wrong when there are no pages for them."""
        end = record.first_row + record.count
        try:
            self.context.reserve(record.slot, end)
        except NoPages as error:
            slot.starved = True
            return f"no pages: {error}"
        fresh = part[(slot.rows - record.first_row) * self._spec.row_bytes :]
        writes.append(ContextRows(record.slot, slot.rows, end - slot.rows, fresh))
        slot.rows = end
        return None

    def _settle(self, slot: Slot, record: ContextRecord, wrong: str | None) -> list[Event]:
        """Moves the slot between live and behind, and says so when it changed."""
        was_live, slot.live = slot.live, wrong is None and record.caught_up
        if wrong is not None:
            told = record.first_row == slot.behind
            slot.behind = record.first_row + record.count
            return [] if told else [self.behind_event(record.slot, slot, wrong)]
        slot.behind = None
        if slot.live:
            slot.anchor = record.anchor
            if was_live:
                return []
            return [Live(self.number, record.slot, slot.epoch, slot.rows)]
        if was_live:
            return [self.behind_event(record.slot, slot, "the rows do not end at the start")]
        return []

    def entries(self, plan: Plan) -> Iterator[DraftEntry | tuple[PlanEntry, Refusal]]:
        """The trees to draft in a decode plan, and the entries that are refused."""
        seen: set[int] = set()
        for entry in plan.entries:
            try:
                slot = self.wanted(entry, seen)
            except Refusal as refusal:
                yield entry, refusal
                continue
            if slot is not None and slot.live:
                yield DraftEntry(entry.slot, slot.rows, slot.anchor, entry.nodes)

    def wanted(self, entry: PlanEntry, seen: set[int]) -> Slot | None:
        """The slot of an entry that asks for drafts; None for one that does not. Raises Refusal.

        `seen` are the slots of the plan's entries before; this one is added.
        """
        self._check_range(entry.slot)
        if not 1 <= entry.nodes <= MAX_NODES:
            raise Refusal(
                pb.REJECT_CODE_BAD_VALUE, f"nodes must be in [1, {MAX_NODES}], got {entry.nodes}"
            )
        if entry.slot in seen:
            raise Refusal(pb.REJECT_CODE_BAD_VALUE, f"slot {entry.slot} is in the plan twice")
        seen.add(entry.slot)
        if entry.nodes == 1:
            return None
        return self._held(entry.slot, entry.epoch)

    def _check_range(self, slot: int) -> None:
        if not 0 <= slot < self._spec.slots:
            raise Refusal(
                pb.REJECT_CODE_SLOT_RANGE, f"slot must be in [0, {self._spec.slots}), got {slot}"
            )

    def _held(self, number: int, epoch: int) -> Slot:
        self._check_range(number)
        slot = self.slots.get(number)
        if slot is None:
            raise Refusal(pb.REJECT_CODE_SLOT_EMPTY, f"no request holds slot {number}")
        if slot.epoch != epoch:
            raise Refusal(
                pb.REJECT_CODE_STALE_EPOCH,
                f"slot {number} is held by epoch {slot.epoch}, not {epoch}",
            )
        return slot

    def behind_event(self, number: int, slot: Slot, reason: str) -> Behind:
        """That the slot lacks rows."""
        return Behind(self.number, number, slot.epoch, slot.rows, reason)
