"""Whether a plan's entries can be carried out, and the pages that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.target.commands import EntryDone, Outcome, Plan, PlanEntry, Rejected, StepKind
from services.target.pages import NoPages
from services.target.runner import EntryResult, TargetSpec
from services.target.slots import Refused, Slot, SlotTable
from slipstream.v1 import common_pb2 as pb

NOTHING = EntryResult()


@dataclass(frozen=True, slots=True)
class Job:
    """A plan entry that is computed."""

    index: int
    entry: PlanEntry
    slot: Slot


class PlanCheck:
    """Checks plans in their order; `reject` is told of every entry that is refused."""

    def __init__(
        self, spec: TargetSpec, slots: SlotTable, reject: Callable[[Rejected], None]
    ) -> None:
        self._spec, self._slots, self._reject = spec, slots, reject

    def take(self, plan: Plan) -> tuple[list[EntryDone], list[Job]]:
        """Every entry as DROPPED or PADDING, and the jobs, which will replace theirs."""
        check = _CHECKS[plan.kind]
        done: list[EntryDone] = []
        jobs: list[Job] = []
        seen: set[int] = set()
        rows = 0
        for index, entry in enumerate(plan.entries):
            outcome = Outcome.DROPPED
            try:
                slot = self._slots.find(entry.slot, entry.epoch)
                if slot.finished:
                    outcome = Outcome.PADDING
                else:
                    check(self, entry, slot, rows)
                    self._reserve(entry, slot, seen)
                    seen.add(entry.slot)
                    rows += entry.count
                    jobs.append(Job(index, entry, slot))
            except Refused as refused:
                self._reject(
                    Rejected(
                        plan.number,
                        refused.code,
                        refused.reason,
                        entry.slot,
                        entry.epoch,
                        plan.step,
                    )
                )
            done.append(EntryDone(entry.slot, entry.epoch, outcome, NOTHING))
        return done, jobs

    def _reserve(self, entry: PlanEntry, slot: Slot, seen: set[int]) -> None:
        if entry.slot in seen:
            raise Refused(pb.REJECT_CODE_BAD_VALUE, f"slot: {entry.slot} is in the plan twice")
        if entry.reserve > self._spec.max_positions:
            raise Refused(
                pb.REJECT_CODE_LENGTH,
                f"reserve: {entry.reserve} is more than {self._spec.max_positions}",
            )
        try:
            slot.table.reserve(entry.reserve)
        except NoPages as error:
            raise Refused(pb.REJECT_CODE_NO_PAGES, f"reserve: {error}") from error

    def _check_prefill(self, entry: PlanEntry, slot: Slot, rows: int) -> None:
        end, known = entry.first + entry.count, slot.admit.known_len
        if slot.prefilled:
            raise Refused(pb.REJECT_CODE_LENGTH, f"slot: {slot.number} is already prefilled")
        if entry.first != slot.planned:
            raise Refused(
                pb.REJECT_CODE_LENGTH, f"from: {entry.first} is not the next row, {slot.planned}"
            )
        if entry.count == 0 or end > known:
            raise Refused(
                pb.REJECT_CODE_LENGTH,
                f"count: {entry.count} from {entry.first} is not within {known} tokens",
            )
        if entry.last != (end == known):
            raise Refused(
                pb.REJECT_CODE_LENGTH, f"last: {entry.last}, but {end} of {known} rows are planned"
            )
        if rows + entry.count > self._spec.max_prefill_rows:
            raise Refused(
                pb.REJECT_CODE_LENGTH,
                f"count: the plan has more than {self._spec.max_prefill_rows} rows",
            )
        _covers(entry, end)

    def _check_decode(self, entry: PlanEntry, slot: Slot, rows: int) -> None:
        if not slot.prefilled:
            raise Refused(pb.REJECT_CODE_LENGTH, f"slot: {slot.number} is not prefilled yet")
        if not 1 <= entry.nodes <= self._spec.max_nodes:
            raise Refused(
                pb.REJECT_CODE_LENGTH,
                f"nodes: {entry.nodes} is not in [1, {self._spec.max_nodes}]",
            )
        _covers(entry, slot.bound + entry.nodes)

    def _check_unknown(self, entry: PlanEntry, slot: Slot, rows: int) -> None:
        raise Refused(pb.REJECT_CODE_BAD_VALUE, "kind: a plan is either prefill or decode")


_Check = Callable[[PlanCheck, PlanEntry, Slot, int], None]
_CHECKS: dict[StepKind, _Check] = {
    StepKind.PREFILL: PlanCheck._check_prefill,
    StepKind.DECODE: PlanCheck._check_decode,
    StepKind.UNKNOWN: PlanCheck._check_unknown,
}


def _covers(entry: PlanEntry, positions: int) -> None:
    """The plan's own reservation must hold the rows it plans."""
    if entry.reserve < positions:
        raise Refused(
            pb.REJECT_CODE_LENGTH,
            f"reserve: {entry.reserve} positions do not hold the {positions} that are planned",
        )
