"""One step: check its entries, await the trees, compute, commit, publish.

Only the engine thread calls it. Nothing but `_commit` and `_publish` changes a slot's lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.target.commands import (
    EntryDone,
    Outcome,
    Plan,
    PlanEntry,
    Rejected,
    StepDone,
    StepKind,
    Times,
)
from services.target.pages import NoPages
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    PrefillEntry,
    TargetRunner,
)
from services.target.session import Sessions
from services.target.slots import Refused, Slot, SlotTable
from slipstream.handoff.base import ContextMessage, ContextRecord, ProposedTree
from slipstream.v1 import common_pb2 as pb

_NOTHING = EntryResult()


@dataclass(frozen=True, slots=True)
class _Job:
    """A plan entry that is computed."""

    index: int
    entry: PlanEntry
    slot: Slot


class Steps:
    """Runs plans on a runner; `reject` is told of every entry that is refused."""

    def __init__(
        self,
        runner: TargetRunner,
        slots: SlotTable,
        sessions: Sessions,
        reject: Callable[[Rejected], None],
    ) -> None:
        self._runner = runner
        self._spec = runner.spec
        self._slots = slots
        self._sessions = sessions
        self._reject = reject

    def drop(self, plan: Plan) -> StepDone:
        """The StepDone of a plan that is refused as a whole."""
        done = [EntryDone(e.slot, e.epoch, Outcome.DROPPED, _NOTHING) for e in plan.entries]
        return StepDone(plan.step, plan.kind, done, self._slots.pool.free, Times())

    def run(self, plan: Plan) -> StepDone:
        """Carries out a plan and publishes its context; exactly one StepDone whatever happens."""
        taken = time.monotonic_ns()
        done, jobs = self._take(plan)
        named = self._named(plan)
        trees, drafted = self._trees(plan, jobs) if named else ({}, 0)
        began = time.monotonic_ns()
        for job, result in zip(jobs, self._compute(plan, jobs, trees), strict=True):
            _commit(plan, job, result)
            done[job.index] = EntryDone(job.slot.number, job.slot.epoch, Outcome.DONE, result)
        computed = time.monotonic_ns()
        if named:
            self._publish(plan, jobs)
        times = Times(
            queued=taken - plan.received_ns if plan.received_ns else 0,
            waited=began - taken,
            computed=computed - began,
            published=time.monotonic_ns() - computed,
            drafted=drafted,
            started=began,
        )
        return StepDone(plan.step, plan.kind, done, self._slots.pool.free, times)

    def _named(self, plan: Plan) -> bool:
        """Whether the draft takes part in this step."""
        if plan.session == 0 or self._sessions.retired(plan.session):
            return False
        if self._sessions.names(plan.session, plan.step):
            return True
        reason = f"session: {plan.session} is not attached at step {plan.step}"
        self._reject(
            Rejected(
                plan.number,
                pb.REJECT_CODE_SESSION,
                reason,
                step=plan.step,
                session=plan.session,
            )
        )
        return False

    def _take(self, plan: Plan) -> tuple[list[EntryDone], list[_Job]]:
        """Every entry as DROPPED or PADDING, and the jobs, which will replace theirs."""
        check = _CHECKS[plan.kind]
        done: list[EntryDone] = []
        jobs: list[_Job] = []
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
                    jobs.append(_Job(index, entry, slot))
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
            done.append(EntryDone(entry.slot, entry.epoch, outcome, _NOTHING))
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
        end, known = entry.first + entry.count, slot.committed
        if slot.live:
            raise Refused(pb.REJECT_CODE_LENGTH, f"slot: {slot.number} is already prefilled")
        if entry.first != slot.start:
            raise Refused(
                pb.REJECT_CODE_LENGTH, f"from: {entry.first} is not the next row, {slot.start}"
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
        if not slot.live:
            raise Refused(pb.REJECT_CODE_LENGTH, f"slot: {slot.number} is not prefilled yet")
        if not 1 <= entry.nodes <= self._spec.max_nodes:
            raise Refused(
                pb.REJECT_CODE_LENGTH,
                f"nodes: {entry.nodes} is not in [1, {self._spec.max_nodes}]",
            )
        _covers(entry, slot.start + entry.nodes)

    def _check_unknown(self, entry: PlanEntry, slot: Slot, rows: int) -> None:
        raise Refused(pb.REJECT_CODE_BAD_VALUE, "kind: a plan is either prefill or decode")

    def _trees(
        self, plan: Plan, jobs: Sequence[_Job]
    ) -> tuple[dict[tuple[int, int], ProposedTree], int]:
        """The draft's trees by (slot, epoch), and its compute time in ns."""
        rows = sum(job.entry.nodes for job in jobs)
        if plan.kind is not StepKind.DECODE or rows == len(jobs):
            return {}, 0
        proposal = self._sessions.await_proposal(plan.step, (len(jobs), rows))
        if proposal is None:
            return {}, 0
        trees: dict[tuple[int, int], ProposedTree] = {}
        for tree in proposal.trees:
            trees.setdefault((tree.slot, tree.epoch), tree)
        return trees, proposal.drafted_ns

    def _compute(
        self,
        plan: Plan,
        jobs: Sequence[_Job],
        trees: dict[tuple[int, int], ProposedTree],
    ) -> Sequence[EntryResult]:
        if not jobs:
            return ()
        if plan.kind is StepKind.PREFILL:
            return self._runner.prefill(
                [
                    PrefillEntry(
                        j.slot.number, j.entry.first, j.entry.count, j.entry.last,
                        j.slot.table.pages,
                    )
                    for j in jobs
                ]
            )  # fmt: skip
        return self._runner.decode(
            [
                DecodeEntry(
                    j.slot.number, j.slot.start, j.slot.anchor,
                    j.entry.nodes, _proposed(j, trees.get((j.slot.number, j.slot.epoch))),
                    j.slot.table.pages,
                )
                for j in jobs
            ]
        )  # fmt: skip

    def _publish(self, plan: Plan, jobs: Sequence[_Job]) -> None:
        """One context message for the step, empty if there is nothing to say."""
        records: list[ContextRecord] = []
        spans: list[FeatureSpan] = []
        for job in jobs:
            entry, slot = job.entry, job.slot
            most = entry.count if plan.kind is StepKind.PREFILL else entry.nodes + entry.replay
            count = slot.publishable(most)
            if count <= 0:
                continue
            first = slot.cursor
            slot.cursor += count
            spans.append(FeatureSpan(slot.number, first, count))
            records.append(
                ContextRecord(
                    slot.number, slot.epoch, first, count, slot.anchor, slot.caught_up
                )
            )  # fmt: skip
        rows = self._runner.features(spans) if spans else b""
        self._sessions.publish(ContextMessage(plan.step, tuple(records), rows))


_Check = Callable[[Steps, PlanEntry, Slot, int], None]
_CHECKS: dict[StepKind, _Check] = {
    StepKind.PREFILL: Steps._check_prefill,
    StepKind.DECODE: Steps._check_decode,
    StepKind.UNKNOWN: Steps._check_unknown,
}


def _proposed(job: _Job, tree: ProposedTree | None) -> tuple[Sequence[int], Sequence[int]] | None:
    """What the peer wrote; None when nothing of it can be verified."""
    if tree is None or job.entry.nodes == 1 or len(tree.tokens) < 2:
        return None
    return tree.tokens, tree.parents


def _covers(entry: PlanEntry, positions: int) -> None:
    """The plan's own reservation must hold the rows it plans."""
    if entry.reserve < positions:
        raise Refused(
            pb.REJECT_CODE_LENGTH,
            f"reserve: {entry.reserve} positions do not hold the {positions} that are planned",
        )


def _commit(plan: Plan, job: _Job, result: EntryResult) -> None:
    """The one place where a slot moves on."""
    slot, entry = job.slot, job.entry
    if plan.kind is StepKind.PREFILL:
        slot.start += entry.count
        slot.live = entry.last and len(result.tokens) > 0
    else:
        slot.start += len(result.tokens)
    if result.tokens:
        slot.committed += len(result.tokens)
        slot.anchor = result.tokens[-1]
    slot.finish = result.finish
