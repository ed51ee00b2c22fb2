"""One step: check its entries, await the trees, compute, commit, publish.

A step is begun and ended. On a runner that runs ahead others begin in between, and a session whose
messages stay on devices publishes without the host; everywhere else a step ends before the next
begins. Only the engine thread calls it, and only in the order of steps. Nothing but `_commit` and
`_publish` changes a slot's lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

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
from services.target.device_clock import DeviceClock
from services.target.plan_check import NOTHING, Job, PlanCheck
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    Flight,
    Link,
    LinkEntry,
    PrefillEntry,
    RunAheadRunner,
    Stamps,
    TargetRunner,
)
from services.target.session import Sessions
from services.target.slots import SlotTable
from slipstream.handoff.base import ContextMessage, ContextRecord, ProposedTree
from slipstream.v1 import common_pb2 as pb


@dataclass(slots=True)
class Begun:
    """A step that has begun.

    Attributes:
        results: of the jobs, once they are there.
        flight: where they come from until then; None: they are there.
        link: the draft's part, where it stays on devices.
        named: whether the context is to be published by the host.
    """

    plan: Plan
    done: list[EntryDone]
    jobs: Sequence[Job]
    results: Sequence[EntryResult] = ()
    flight: Flight | None = None
    link: Link | None = None
    named: bool = False
    taken: int = 0
    began: int = 0
    computed: int = 0
    drafted: int = 0


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
        self._ahead = run_ahead(runner)
        self._spec = runner.spec
        self._slots = slots
        self._sessions = sessions
        self._reject = reject
        self._check = PlanCheck(runner.spec, slots, reject)
        self._clock = DeviceClock()

    def drop(self, plan: Plan) -> StepDone:
        """The StepDone of a plan that is refused as a whole."""
        done = [EntryDone(e.slot, e.epoch, Outcome.DROPPED, NOTHING) for e in plan.entries]
        return StepDone(plan.step, plan.kind, done, self._slots.pool.free, Times())

    def alone(self, plan: Plan) -> bool:
        """Whether a step needs what the ones before it gave: they must have ended."""
        if self._ahead is None:
            return True
        if self._sessions.names(plan.session, plan.step) and self._sessions.link() is None:
            return True  # its trees come through the host, and depend on the context before
        return any(self._slots.has_grammar(e.slot) for e in plan.entries)

    def begin(self, plan: Plan) -> Begun:
        """Takes a plan up; whatever happens to it, `end` says it."""
        taken = time.monotonic_ns()
        done, jobs = self._check.take(plan)
        named = self._named(plan)
        begun = Begun(plan, done, jobs, taken=taken)
        linked = self._sessions.link() is not None
        begun.link = self._link(plan, jobs) if named and linked else None
        begun.named = named and not linked
        trees: dict[tuple[int, int], ProposedTree] = {}
        if begun.named:
            trees, begun.drafted = self._trees(plan, jobs)
        begun.began = time.monotonic_ns()
        self._compute(begun, trees)
        begun.computed = time.monotonic_ns()
        for job in jobs:
            _expect(plan, job, self._spec.most_commits)
        return begun

    def end(self, begun: Begun) -> StepDone:
        """Commits a step and publishes its context; exactly one StepDone whatever happened."""
        plan, jobs = begun.plan, begun.jobs
        if begun.flight is not None:
            begun.results = begun.flight.results()
        for job, result in zip(jobs, begun.results, strict=True):
            over = job.slot.finished
            _commit(plan, job, result, self._spec.most_commits)
            outcome = Outcome.PADDING if over else Outcome.DONE
            result = NOTHING if over else result
            begun.done[job.index] = EntryDone(job.slot.number, job.slot.epoch, outcome, result)
        times = self._times(begun, time.monotonic_ns())
        published = time.monotonic_ns()
        if begun.link is not None:
            begun.link.end.passed(plan.step, times.waited)
            self._follow(begun)
        elif begun.named and self._sessions.is_current(plan.session):
            self._publish(plan, jobs)
        times = replace(times, published=time.monotonic_ns() - published)
        return StepDone(plan.step, plan.kind, begun.done, self._slots.pool.free, times)

    def _times(self, begun: Begun, seen: int) -> Times:
        """All but the time of publishing; the results were seen at `seen`."""
        queued = begun.taken - begun.plan.received_ns if begun.plan.received_ns else 0
        stamps = begun.flight.stamps() if begun.flight is not None else Stamps()
        if stamps.ended == 0:  # no device, or one without a clock
            computed = begun.computed if begun.flight is None else seen
            return Times(
                queued=queued,
                waited=begun.began - begun.taken,
                computed=computed - begun.began,
                drafted=begun.drafted,
                started=begun.began,
                enqueued=begun.computed - begun.began,
            )
        idle = self._clock.idle(stamps)
        started = self._clock.monotonic(stamps.began, stamps.ended, seen)
        waited = begun.began - begun.taken if begun.named else 0
        if begun.link is not None and begun.link.awaits:
            # Before the step was on the stream the device waited for a plan, not for the draft.
            waited = min(idle, max(started - begun.began, 0))
        drafted = stamps.draft_ended - stamps.draft_began
        handed = 0
        if begun.link is not None and begun.link.end.one_gpu and stamps.draft_ended:
            handed = max(stamps.began - stamps.draft_ended, 0)
        return Times(
            queued=queued,
            waited=waited,
            computed=stamps.ended - stamps.began,
            drafted=begun.drafted or max(drafted, 0),
            started=started,
            enqueued=begun.computed - begun.began,
            handed=handed,
        )

    def _link(self, plan: Plan, jobs: Sequence[Job]) -> Link | None:
        """The draft's part of a step, where messages stay on devices."""
        end = self._sessions.link()
        if end is None or self._ahead is None or not end.alive:
            return None
        numbers = {job.index: number for number, job in enumerate(jobs)}
        entries: list[LinkEntry] = []
        node = 0
        for index, entry in enumerate(plan.entries):
            number = numbers.get(index, -1)
            most = live = 0
            if number >= 0:
                slot = jobs[number].slot
                most = _most(plan, entry) if slot.admit.publish else 0
                live = plan.kind is StepKind.DECODE or (entry.last and not slot.admit.only_scored)
            entries.append(LinkEntry(entry.slot, entry.epoch, most, node, number, bool(live)))
            node += entry.nodes
        awaits = any(job.entry.nodes > 1 for job in jobs)
        return Link(end, plan.step, entries, awaits)

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

    def _trees(
        self, plan: Plan, jobs: Sequence[Job]
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

    def _compute(self, begun: Begun, trees: dict[tuple[int, int], ProposedTree]) -> None:
        """Has the jobs computed, or starts that."""
        plan, jobs, link = begun.plan, begun.jobs, begun.link
        if not jobs and link is None:
            return
        if plan.kind is StepKind.PREFILL:
            chunks = [
                PrefillEntry(
                    j.slot.number, j.entry.first, j.entry.count, j.entry.last, j.slot.table.pages
                )
                for j in jobs
            ]
            if self._ahead is None:
                begun.results = self._runner.prefill(chunks)
            elif chunks:
                begun.flight = self._ahead.start_prefill(chunks, link)
            else:
                begun.flight = self._ahead.start_decode((), link)
            return
        rows = [
            DecodeEntry(
                j.slot.number, j.slot.start, j.slot.anchor,
                j.entry.nodes, _proposed(j, trees.get((j.slot.number, j.slot.epoch))),
                j.slot.table.pages, link is not None and j.entry.nodes > 1, j.entry.branches,
            )
            for j in jobs
        ]  # fmt: skip
        if self._ahead is None:
            begun.results = self._runner.decode(rows)
        else:
            begun.flight = self._ahead.start_decode(rows, link)

    def _publish(self, plan: Plan, jobs: Sequence[Job]) -> None:
        """One context message for the step, empty if there is nothing to say."""
        records: list[ContextRecord] = []
        spans: list[FeatureSpan] = []
        for job in jobs:
            slot = job.slot
            count = slot.publishable(_most(plan, job.entry))
            if count <= 0 or not self._slots.holds(slot):
                continue  # of a slot released meanwhile neither runner nor draft knows anything
            first = slot.cursor
            slot.cursor += count
            spans.append(FeatureSpan(slot.number, first, count))
            records.append(
                ContextRecord(
                    slot.number, slot.epoch, first, count, slot.anchor, slot.caught_up
                )
            )  # fmt: skip
        features = self._runner.features(spans) if spans else b""
        self._sessions.publish(ContextMessage(plan.step, tuple(records), features))

    def _follow(self, begun: Begun) -> None:
        """Moves the cursors as the device has moved its own."""
        if self._sessions.is_current(begun.plan.session):
            for job in begun.jobs:
                if job.index < self._spec.slots:  # a link says no more entries
                    most = _most(begun.plan, job.entry)
                    job.slot.cursor += max(job.slot.publishable(most), 0)


def run_ahead(runner: TargetRunner) -> RunAheadRunner | None:
    """The runner, if it can start steps before others have ended."""
    return cast(RunAheadRunner, runner) if hasattr(runner, "start_decode") else None


def _proposed(job: Job, tree: ProposedTree | None) -> tuple[Sequence[int], Sequence[int]] | None:
    """What the peer wrote; None when nothing of it can be verified."""
    if tree is None or job.entry.nodes == 1 or len(tree.tokens) < 2:
        return None
    return tree.tokens, tree.parents


def _most(plan: Plan, entry: PlanEntry) -> int:
    """Context rows that a step publishes of an entry at most."""
    return entry.count if plan.kind is StepKind.PREFILL else entry.nodes + entry.replay


def _yields(job: Job, most_commits: int) -> int:
    """Tokens that a decode step commits to a slot at most."""
    return min(job.entry.nodes, most_commits)


def _expect(plan: Plan, job: Job, most_commits: int) -> None:
    """A step is on its way: what it may do to its slot."""
    if plan.kind is StepKind.PREFILL:
        job.slot.planned += job.entry.count
    else:
        job.slot.yields += _yields(job, most_commits)


def _commit(plan: Plan, job: Job, result: EntryResult, most_commits: int) -> None:
    """The one place where a slot moves on."""
    slot, entry = job.slot, job.entry
    if plan.kind is StepKind.DECODE:
        slot.yields -= _yields(job, most_commits)
    if slot.finished:
        return  # a step before it ended the request: its rows were padding
    if plan.kind is StepKind.PREFILL:
        slot.start += entry.count
        slot.live = entry.last and len(result.tokens) > 0
    else:
        slot.start += len(result.tokens)
    if result.tokens:
        slot.committed += len(result.tokens)
        slot.anchor = result.tokens[-1]
    slot.finish = result.finish
