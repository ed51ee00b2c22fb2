"""The one place where the target's words become messages of the wire, and back."""

from __future__ import annotations

from services.target.commands import (
    Admit,
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    EntryDone,
    Event,
    Outcome,
    Plan,
    PlanEntry,
    Ready,
    Rejected,
    Release,
    Rewind,
    StepDone,
    StepKind,
)
from services.target.runner import CostPoint, Finish, Logprob, SlotAdmit, TargetSpec
from slipstream import wire
from slipstream.errors import ProtocolError
from slipstream.grammar import Grammar
from slipstream.params import SamplingParams
from slipstream.v1 import common_pb2, target_pb2

_KINDS = {
    common_pb2.STEP_KIND_PREFILL: StepKind.PREFILL,
    common_pb2.STEP_KIND_DECODE: StepKind.DECODE,
}
_KIND_NUMBERS = {
    StepKind.PREFILL: common_pb2.STEP_KIND_PREFILL,
    StepKind.DECODE: common_pb2.STEP_KIND_DECODE,
    StepKind.UNKNOWN: common_pb2.STEP_KIND_UNSPECIFIED,
}
_FINISHES = {
    Finish.NONE: common_pb2.FINISH_NONE,
    Finish.STOP: common_pb2.FINISH_STOP_ID,
    Finish.LIMIT: common_pb2.FINISH_LIMIT,
    Finish.ERROR: common_pb2.FINISH_ERROR,
}
_OUTCOMES = {
    Outcome.DONE: target_pb2.StepEntry.OUTCOME_DONE,
    Outcome.PADDING: target_pb2.StepEntry.OUTCOME_PADDING,
    Outcome.DROPPED: target_pb2.StepEntry.OUTCOME_DROPPED,
}


def read_command(message: target_pb2.TargetCommand, received_ns: int) -> Command | None:
    """What the gateway asks for; None for a ping. Raises ProtocolError on Hello or nothing."""
    number = message.number
    match message.WhichOneof("command"):
        case "plan":
            return _plan(number, message.plan, received_ns)
        case "admit":
            return Admit(number, message.admit.slot, message.admit.epoch, _admit(message.admit))
        case "release":
            return Release(number, message.release.slot, message.release.epoch)
        case "attach":
            it = message.attach
            return Attach(number, it.session, it.first_step, it.draft_address)
        case "detach":
            return Detach(number, message.detach.session, message.detach.reason)
        case "rewind":
            rewind = message.rewind
            return Rewind(number, rewind.slot, rewind.epoch, rewind.rows)
        case "ping":
            return None
        case other:
            raise ProtocolError(f"command {number}: {other or 'nothing'} is not expected here")


def _admit(message: target_pb2.TargetAdmit) -> SlotAdmit:
    return SlotAdmit(
        prompt_ids=tuple(message.prompt_ids),
        output_ids=tuple(message.output_ids),
        limit=message.limit,
        min_tokens=message.min_tokens,
        stop_ids=frozenset(message.stop_ids),
        sampling=SamplingParams.from_proto(message.sampling),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        publish=message.publish,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=Grammar.from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def _plan(number: int, message: target_pb2.TargetPlan, received_ns: int) -> Plan:
    kind = _KINDS.get(message.kind, StepKind.UNKNOWN)
    if kind is StepKind.PREFILL:
        entries = [
            PlanEntry(
                e.slot, e.epoch, e.reserve, first=getattr(e, "from"), count=e.count, last=e.last
            )
            for e in message.entries
        ]
    else:
        entries = [
            PlanEntry(
                e.slot, e.epoch, e.reserve, nodes=e.nodes, replay=e.replay, branches=e.branches
            )
            for e in message.entries
        ]
    return Plan(number, message.step, message.session, kind, entries, received_ns)


def event_message(event: Event, spec: TargetSpec) -> target_pb2.TargetEvent:
    """What the gateway is told."""
    match event:
        case StepDone():
            return target_pb2.TargetEvent(step_done=_step_done(event))
        case Rejected():
            return target_pb2.TargetEvent(rejected=event.to_proto())
        case Attached():
            return target_pb2.TargetEvent(attached=event.to_proto())
        case Detached():
            return target_pb2.TargetEvent(detached=event.to_proto())
        case Ready():
            return target_pb2.TargetEvent(ready=_ready(event, spec))


def _step_done(event: StepDone) -> target_pb2.StepDone:
    times = event.times
    return target_pb2.StepDone(
        step=event.step,
        kind=_KIND_NUMBERS[event.kind],
        entries=[_entry(entry) for entry in event.entries],
        free_pages=event.free_pages,
        times=target_pb2.StepTimes(
            queued=times.queued,
            waited=times.waited,
            computed=times.computed,
            published=times.published,
            drafted=times.drafted,
            started=times.started,
            enqueued=times.enqueued,
            handed=times.handed,
        ),
    )


def _entry(entry: EntryDone) -> target_pb2.StepEntry:
    result = entry.result
    return target_pb2.StepEntry(
        slot=entry.slot,
        epoch=entry.epoch,
        outcome=_OUTCOMES[entry.outcome],
        tokens=result.tokens,
        finish=_FINISHES[result.finish],
        logprobs=[_logprobs(row) for row in result.logprobs],
        nodes=result.nodes,
        accepted=result.accepted,
        prompt_logprobs=[_logprobs(row) for row in result.prompt_logprobs],
    )


def _logprobs(row: Logprob) -> target_pb2.TokenLogprobs:
    return target_pb2.TokenLogprobs(
        logprob=row.logprob,
        top_ids=[token for token, _ in row.top],
        top_logprobs=[value for _, value in row.top],
    )


def _ready(event: Ready, spec: TargetSpec) -> target_pb2.TargetReady:
    return target_pb2.TargetReady(
        protocol=wire.PROTOCOL,
        last_step=event.last_step,
        model=spec.model,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        slots=spec.slots,
        pages=spec.pages,
        page_size=spec.page_size,
        max_nodes=spec.max_nodes,
        max_prefill_rows=spec.max_prefill_rows,
        feature_width=spec.feature_width,
        feature_dtype=wire.DTYPES[spec.feature_dtype],
        fingerprints=common_pb2.Fingerprints(**spec.fingerprints),
        eos_ids=spec.eos_ids,
        decode_costs=[_cost(point) for point in spec.decode_costs],
        dtype=spec.dtype,
        grammars=spec.grammars,
    )


def _cost(point: CostPoint) -> common_pb2.CostPoint:
    return common_pb2.CostPoint(slots=point.slots, rows=point.rows, ns=point.ns)
