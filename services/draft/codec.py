"""The draft's commands and events to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Behind,
    Command,
    Detach,
    Detached,
    Event,
    Live,
    Malformed,
    Plan,
    PlanEntry,
    Rejected,
    Release,
)
from services.draft.runner import DraftCost, DraftSpec
from slipstream.errors import InvalidRequest, ProtocolError
from slipstream.tree import TreeSpec
from slipstream.v1 import common_pb2 as pb
from slipstream.v1 import draft_pb2
from slipstream.wire import PROTOCOL


def check_hello(command: draft_pb2.DraftCommand) -> pb.Hello:
    """The Hello that every stream begins with. Raises ProtocolError."""
    kind = command.WhichOneof("command")
    if kind != "hello" or command.number != 1:
        raise ProtocolError(f"the first command must be Hello, number 1, got {kind}")
    if command.hello.protocol != PROTOCOL:
        raise ProtocolError(
            f"protocol: the gateway speaks {command.hello.protocol}, this draft {PROTOCOL}"
        )
    return command.hello


def decode(command: draft_pb2.DraftCommand, block_size: int) -> Command | None:
    """A command for the engine; None for a ping. Raises ProtocolError on a second Hello.

    A tree that does not fit blocks of `block_size` makes its command Malformed.
    """
    number = command.number
    match command.WhichOneof("command"):
        case "ping":
            return None
        case "plan":
            return _plan(number, command.plan)
        case "admit":
            return _admit(number, command.admit, block_size)
        case "release":
            return Release(number, command.release.slot, command.release.epoch)
        case "attach":
            return Attach(number, command.attach.session, command.attach.first_step)
        case "detach":
            return Detach(number, command.detach.session, command.detach.reason)
        case kind:
            raise ProtocolError(f"command {number}: {kind or 'nothing'} is not allowed here")


def _plan(number: int, plan: draft_pb2.DraftPlan) -> Plan:
    entries = tuple([PlanEntry(e.slot, e.epoch, e.nodes, e.rows) for e in plan.entries])
    decodes = plan.kind == pb.STEP_KIND_DECODE
    return Plan(number, plan.step, plan.session, decodes, entries, plan.after)


def _admit(number: int, admit: draft_pb2.DraftAdmit, block_size: int) -> Admit | Malformed:
    def malformed(reason: str) -> Malformed:
        return Malformed(number, admit.slot, admit.epoch, reason)

    if not (math.isfinite(admit.temperature) and admit.temperature >= 0):
        return malformed(f"temperature must be finite and at least 0, got {admit.temperature}")
    tree = None
    if admit.HasField("tree"):
        try:
            tree = TreeSpec.from_proto(admit.tree, block_size)
        except InvalidRequest as error:
            return malformed(f"tree: {error}")
    return Admit(
        number,
        admit.session,
        admit.slot,
        admit.epoch,
        tree,
        admit.temperature,
        admit.seed,
        admit.choice,
    )


def encode(event: Event) -> draft_pb2.DraftEvent:
    """An event as the gateway reads it."""
    match event:
        case Live():
            live = draft_pb2.Live(
                session=event.session, slot=event.slot, epoch=event.epoch, rows=event.rows
            )
            return draft_pb2.DraftEvent(live=live)
        case Behind():
            behind = draft_pb2.Behind(
                session=event.session,
                slot=event.slot,
                epoch=event.epoch,
                rows=event.rows,
                reason=event.reason,
            )
            return draft_pb2.DraftEvent(behind=behind)
        case Attached():
            return draft_pb2.DraftEvent(attached=event.to_proto())
        case Detached():
            return draft_pb2.DraftEvent(detached=event.to_proto())
        case Rejected():
            return draft_pb2.DraftEvent(rejected=event.to_proto())


def ready(
    spec: DraftSpec, tree: TreeSpec, costs: Sequence[DraftCost], handoff_address: str
) -> draft_pb2.DraftEvent:
    """The answer to Hello."""
    message = draft_pb2.DraftReady(
        protocol=PROTOCOL,
        model=spec.model,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        causal=spec.causal,
        vocab_size=spec.vocab_size,
        feature_width=spec.feature_width,
        fingerprints=pb.Fingerprints(**spec.fingerprints),
        slots=spec.slots,
        pages=spec.pages,
        page_size=spec.page_size,
        tree=tree.to_proto(),
        draft_costs=[pb.CostPoint(slots=c.slots, rows=c.rows, ns=c.ns) for c in costs],
        acceptance=spec.acceptance,
        handoff_address=handoff_address,
    )
    return draft_pb2.DraftEvent(ready=message)
