"""The target of the scheduler's fake cell, and what all of that cell is made of: its shape, the
tokens, the data plane of a session. `FakeTarget` asserts everything the scheduler owes a target.

Tokens are a pure function of (seed, position, token before), so what a request must get is known
whatever was drafted, preempted or restarted.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.cell import Peer
from gateway.request import GenerateParams
from slipstream.v1 import common_pb2 as common
from slipstream.v1 import target_pb2
from slipstream.wire import PROTOCOL

if TYPE_CHECKING:
    from tests.unit.scheduler_fakes import FakeCell

VOCAB = 97
WIDTH = 16  # feature width
DONE = target_pb2.StepEntry.OUTCOME_DONE
PADDING = target_pb2.StepEntry.OUTCOME_PADDING
DROPPED = target_pb2.StepEntry.OUTCOME_DROPPED


def draw(seed: int, choice: int, position: int, before: int) -> int:
    """The token at `position`, after token `before`."""
    text = f"{seed},{choice},{position},{before}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % VOCAB


def score(token: int) -> target_pb2.TokenLogprobs:
    """The log-probability of a token, wherever it is."""
    return target_pb2.TokenLogprobs(logprob=-float(token))


def expected(params: GenerateParams, seed: int, max_model_len: int) -> tuple[list[int], str]:
    """What a request must get in the end, and why it ends."""
    known = list(params.prompt_ids)
    limit = min(len(known) + params.max_tokens, max_model_len)
    output: list[int] = []
    if params.max_tokens == 0:
        return output, "length"
    while True:
        token = draw(seed, params.choice, len(known), known[-1])
        if len(output) < params.min_tokens and token in params.stop_ids:
            token = VOCAB - 1
        known.append(token)
        output.append(token)
        if token in params.stop_ids and len(output) >= params.min_tokens:
            return output, "stop"
        if len(known) == limit:
            return output, "length"


@dataclass
class CellSpec:
    """What the fakes are."""

    slots: int = 8
    pages: int = 64
    page_size: int = 4
    max_model_len: int = 96
    max_prefill_rows: int = 16
    max_nodes: int = 64
    block_size: int = 8
    budget: int = 16
    draft_pages: int = 200
    window: int = 2  # steps in flight the scheduler may have, for one group
    groups: int = 1
    right: int = 70  # per cent of drafts that are right
    verify_ms: float = 10.0


@dataclass
class Handoff:
    """One session's data plane."""

    session: int
    first_step: int
    alive: bool = True
    context: dict[int, list[tuple[int, int, int, list[int], int, bool]]] = field(
        default_factory=dict
    )
    proposals: dict[int, dict[tuple[int, int], list[int]]] = field(default_factory=dict)


@dataclass
class TargetSlot:
    epoch: int
    admit: target_pb2.TargetAdmit
    known: list[int]
    limit: int
    start: int = 0
    live: bool = False
    finished: bool = False
    cursor: int = 0
    reserved: int = 0
    pages: int = 0


class FakeTarget:
    """The target: runs one command at a time, in order."""

    def __init__(self, cell: FakeCell) -> None:
        self.cell = cell
        self.spec = cell.spec
        self.commands: deque[target_pb2.TargetCommand] = deque()
        self.slots: dict[int, TargetSlot] = {}
        self.last_epoch: dict[int, int] = {}
        self.last_step = 0
        self.number = 0
        self.free = self.spec.pages
        self.session: Handoff | None = None
        self.retired: set[int] = set()
        self.up = False
        self.received = 0  # highest step received
        self.done = 0
        self.draining = False
        self.verified: list[int] = []  # nodes per decode entry

    def ready(self) -> target_pb2.TargetReady:
        spec = self.spec
        ready = target_pb2.TargetReady(
            protocol=PROTOCOL, last_step=self.last_step, model="fake", vocab_size=VOCAB,
            max_model_len=spec.max_model_len, slots=spec.slots, pages=spec.pages,
            page_size=spec.page_size, max_nodes=spec.max_nodes,
            max_prefill_rows=spec.max_prefill_rows, feature_width=WIDTH,
            feature_dtype=common.DTYPE_F32, eos_ids=[0], dtype="float32",
        )  # fmt: skip
        ready.fingerprints.fc = self.cell.fingerprint
        for slots in (1, 8):
            for nodes in (1, 8, 16):
                ns = int(spec.verify_ms * 1e6 * (1 + 0.01 * slots * nodes))
                ready.decode_costs.add(slots=slots, rows=slots * nodes, ns=ns)
        return ready

    def send(self, command: target_pb2.TargetCommand) -> None:
        self.number += 1
        assert command.number == self.number, "commands are numbered without gaps"
        if command.WhichOneof("command") == "plan":
            assert command.plan.step == self.received + 1, "steps are numbered without gaps"
            self.received = command.plan.step
            window = self.spec.window * self.spec.groups
            assert command.plan.step - self.done <= window, "too many steps in flight"
        self.commands.append(command)

    def move(self) -> bool:
        """Carries out the next command; False if there is none or it must wait."""
        if not self.up or not self.commands:
            return False
        command = self.commands[0]
        kind = command.WhichOneof("command")
        if kind == "plan" and not self._can_run(command.plan):
            return False
        self.commands.popleft()
        getattr(self, f"_{kind}")(command)
        return True

    def _hello(self, command: target_pb2.TargetCommand) -> None:
        self.cell.emit(Peer.TARGET, target_pb2.TargetEvent(ready=self.ready()))

    def _ping(self, command: target_pb2.TargetCommand) -> None:
        pass

    def _admit(self, command: target_pb2.TargetCommand) -> None:
        admit = command.admit
        if self.draining:
            self._reject(command.number, admit.slot, admit.epoch, common.REJECT_CODE_DRAINING)
            return
        assert admit.slot < self.spec.slots and admit.slot not in self.slots
        assert admit.epoch > self.last_epoch.get(admit.slot, 0)
        known = [*admit.prompt_ids, *admit.output_ids]
        scored_only = admit.HasField("prompt_logprobs") and not admit.output_ids
        assert admit.prompt_ids and len(known) < admit.limit + scored_only
        assert admit.limit <= self.spec.max_model_len
        self.last_epoch[admit.slot] = admit.epoch
        self.slots[admit.slot] = TargetSlot(admit.epoch, admit, known, admit.limit)

    def _reject(self, command: int, slot: int, epoch: int, code: common.RejectCode) -> None:
        rejected = common.Rejected(command=command, slot=slot, epoch=epoch, code=code)
        self.cell.emit(Peer.TARGET, target_pb2.TargetEvent(rejected=rejected))

    def _release(self, command: target_pb2.TargetCommand) -> None:
        if self.draining and command.release.slot not in self.slots:
            return
        slot = self.slots.pop(command.release.slot)
        assert slot.epoch == command.release.epoch
        self.free += slot.pages

    def _attach(self, command: target_pb2.TargetCommand) -> None:
        assert self.session is None, "one session at a time"
        attach = command.attach
        assert attach.draft_address == "draft:1"
        assert attach.first_step > self.last_step
        self.session = self.cell.handoff(attach.session, attach.first_step)
        for slot in self.slots.values():
            slot.cursor = 0
        self.cell.connect(Peer.TARGET, attach.session)

    def _detach(self, command: target_pb2.TargetCommand) -> None:
        if self.session and self.session.session == command.detach.session:
            self.retire(tell=False)

    def retire(self, tell: bool = True) -> None:
        if self.session is None:
            return
        self.session.alive = False
        self.retired.add(self.session.session)
        if tell:
            gone = common.Detached(session=self.session.session, reason="watchdog")
            self.cell.emit(Peer.TARGET, target_pb2.TargetEvent(detached=gone))
        self.session = None

    def _rewind(self, command: target_pb2.TargetCommand) -> None:
        rewind = command.rewind
        slot = self.slots[rewind.slot]
        assert slot.epoch == rewind.epoch and rewind.rows <= slot.cursor
        slot.cursor = rewind.rows

    def _named(self, plan: target_pb2.TargetPlan) -> Handoff | None:
        if plan.session == 0 or plan.session in self.retired:
            return None
        assert self.session is not None and self.session.session == plan.session
        assert plan.step >= self.session.first_step
        return self.session

    def _can_run(self, plan: target_pb2.TargetPlan) -> bool:
        named = self._named(plan)
        if named is None or not named.alive or all(e.nodes <= 1 for e in plan.entries):
            return True
        return plan.step in named.proposals

    def _reserve(self, slot: TargetSlot, reserve: int, needed: int) -> None:
        assert reserve >= needed, f"reserve {reserve} does not hold {needed} positions"
        assert reserve >= slot.reserved, "a watermark only rises"
        slot.reserved = reserve
        more = -(-reserve // self.spec.page_size) - slot.pages
        if more > 0:
            assert more <= self.free, "the gateway reserved pages that are not free"
            slot.pages += more
            self.free -= more

    def _plan(self, command: target_pb2.TargetCommand) -> None:
        plan = command.plan
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        named = self._named(plan)
        done = target_pb2.StepDone(step=plan.step, kind=plan.kind)
        decode = plan.kind == common.STEP_KIND_DECODE
        rows = 0
        records = []
        assert len({e.slot for e in plan.entries}) == len(plan.entries) > 0
        for entry in plan.entries:
            out = done.entries.add(slot=entry.slot, epoch=entry.epoch, outcome=DROPPED)
            slot = self.slots.get(entry.slot)
            if slot is None and self.draining:
                continue
            assert slot is not None and slot.epoch == entry.epoch, "released before its last plan"
            if slot.finished:
                out.outcome = PADDING
                continue
            out.outcome = DONE
            out.finish = common.FINISH_NONE
            if decode:
                self._decode(plan.step, named, entry, slot, out)
                most = entry.nodes + entry.replay
            else:
                rows += entry.count
                self._prefill(entry, slot, out)
                most = entry.count
            count = min(slot.start - slot.cursor, most)
            if named is not None and slot.admit.publish and count > 0:
                first = slot.cursor
                slot.cursor += count
                caught_up = slot.live and slot.cursor == slot.start
                content = [self._row(slot, j) for j in range(first, first + count)]
                records.append((entry.slot, entry.epoch, first, content, slot.known[-1], caught_up))
        assert rows <= self.spec.max_prefill_rows
        if named is not None:
            named.context[plan.step] = records
        done.free_pages = self.free
        self.done = plan.step
        self.cell.emit(Peer.TARGET, target_pb2.TargetEvent(step_done=done))

    def _row(self, slot: TargetSlot, position: int) -> int:
        """The feature row of a position names its slot's epoch, position and token."""
        return hash((slot.epoch, position, slot.known[position]))

    def _prefill(
        self, entry: target_pb2.TargetPlanEntry, slot: TargetSlot, out: target_pb2.StepEntry
    ) -> None:
        first = getattr(entry, "from")
        assert not slot.live and first == slot.start and entry.count > 0
        end = first + entry.count
        self._reserve(slot, entry.reserve, end)
        assert end <= len(slot.known) and entry.last == (end == len(slot.known))
        slot.start = end
        if slot.admit.HasField("prompt_logprobs"):
            prompt = slot.admit.prompt_ids
            for position in range(first + 1, min(end + 1, len(prompt))):
                out.prompt_logprobs.append(score(prompt[position]))
        if entry.last and len(slot.known) == slot.limit:
            slot.live = slot.finished = True
            out.finish = common.FINISH_LIMIT
        elif entry.last:
            slot.live = True
            self._commit(slot, [self._draw(slot, len(slot.known), slot.known[-1])], out)

    def _draw(self, slot: TargetSlot, position: int, before: int) -> int:
        sampling, admit = slot.admit.sampling, slot.admit
        token = draw(sampling.seed, sampling.choice, position, before)
        early = position - len(admit.prompt_ids) < admit.min_tokens
        return VOCAB - 1 if early and token in admit.stop_ids else token

    def _decode(
        self,
        step: int,
        named: Handoff | None,
        entry: target_pb2.TargetPlanEntry,
        slot: TargetSlot,
        out: target_pb2.StepEntry,
    ) -> None:
        assert slot.live and 1 <= entry.nodes <= self.spec.max_nodes
        assert slot.start == len(slot.known) - 1
        self._reserve(slot, entry.reserve, slot.start + entry.nodes)
        drafts: list[int] = []
        if named is not None and entry.nodes > 1:
            drafts = named.proposals.get(step, {}).get((entry.slot, entry.epoch), [])
        assert len(drafts) < entry.nodes
        tokens = [self._draw(slot, len(slot.known), slot.known[-1])]
        for guess in drafts:
            if guess != tokens[-1]:
                break
            tokens.append(self._draw(slot, len(slot.known) + len(tokens), tokens[-1]))
        out.accepted = len(tokens) - 1
        out.nodes = 1 + len(drafts)
        self.verified.append(out.nodes)
        self._commit(slot, tokens, out)
        slot.start = len(slot.known) - 1

    def _commit(self, slot: TargetSlot, tokens: list[int], out: target_pb2.StepEntry) -> None:
        for token in tokens:
            slot.known.append(token)
            out.tokens.append(token)
            outputs = len(slot.known) - len(slot.admit.prompt_ids)
            if token in slot.admit.stop_ids and outputs >= slot.admit.min_tokens:
                out.finish = common.FINISH_STOP_ID
            elif len(slot.known) == slot.limit:
                out.finish = common.FINISH_LIMIT
            else:
                continue
            slot.finished = True
            return
