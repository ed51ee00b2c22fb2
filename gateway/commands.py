"""Fills the protocol's messages from the gateway's nouns.

Messages are built in place, field by field: that is the cheapest way with protobuf, and a plan of
64 slots is built once per step and server.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.board import PREFILL, Running, Step
from gateway.ledger import Ledger
from gateway.request import TokenLogprob
from slipstream.v1 import common_pb2, draft_pb2, target_pb2


def fill_target_admit(admit: target_pb2.TargetAdmit, running: Running, publish: bool) -> None:
    """What the target must know of a request."""
    request, params = running.request, running.request.params
    admit.slot = running.slot
    admit.epoch = running.epoch
    admit.prompt_ids.extend(params.prompt_ids)
    admit.output_ids.extend(request.output)
    admit.limit = running.limit
    admit.min_tokens = params.min_tokens
    admit.stop_ids.extend(sorted(params.stop_ids))
    sampling = admit.sampling
    sampling.temperature = params.temperature
    sampling.top_p = params.top_p
    sampling.top_k = params.top_k
    sampling.min_p = params.min_p
    sampling.presence_penalty = params.presence_penalty
    sampling.frequency_penalty = params.frequency_penalty
    sampling.repetition_penalty = params.repetition_penalty
    for token, bias in params.logit_bias.items():
        sampling.logit_bias[token] = bias
    sampling.banned_ids.extend(params.banned_ids)
    sampling.seed = request.seed
    sampling.choice = params.choice
    if params.logprobs is not None:
        admit.logprobs = params.logprobs
    if request.unscored and params.prompt_logprobs is not None:
        admit.prompt_logprobs = params.prompt_logprobs
    if params.grammar is not None:
        admit.grammar.CopyFrom(params.grammar.to_proto())
    admit.publish = publish


def fill_draft_admit(
    admit: draft_pb2.DraftAdmit, running: Running, tree: draft_pb2.TreeSpec
) -> None:
    """What the draft must know of a request."""
    admit.session = running.session
    admit.slot = running.slot
    admit.epoch = running.epoch
    admit.tree.CopyFrom(tree)
    admit.temperature = running.request.params.temperature
    admit.seed = running.request.seed
    admit.choice = running.request.params.choice


def fill_target_plan(plan: target_pb2.TargetPlan, step: Step, ledger: Ledger) -> None:
    """The target's half of a step."""
    plan.step = step.number
    plan.session = step.session
    add, watermark = plan.entries.add, ledger.watermark
    if step.kind == PREFILL:
        plan.kind = common_pb2.STEP_KIND_PREFILL
        for running, (first, count), last in zip(
            step.entries, step.spans, step.nodes_of, strict=True
        ):
            entry = add(
                slot=running.slot,
                epoch=running.epoch,
                reserve=watermark(running.slot),
                count=count,
                last=bool(last),
            )
            setattr(entry, "from", first)  # a keyword of Python
        return
    plan.kind = common_pb2.STEP_KIND_DECODE
    for running, nodes, replay in zip(step.entries, step.nodes_of, step.replays, strict=True):
        slot = running.slot
        add(
            slot=slot,
            epoch=running.epoch,
            reserve=watermark(slot),
            nodes=nodes,
            replay=replay,
            branches=nodes > 1 and running.branches,
        )


def fill_draft_plan(plan: draft_pb2.DraftPlan, step: Step) -> None:
    """The draft's half of a step."""
    plan.step = step.number
    plan.session = step.session
    plan.after = step.after
    add = plan.entries.add
    if step.kind == PREFILL:
        plan.kind = common_pb2.STEP_KIND_PREFILL
        for running, (_, count) in zip(step.entries, step.spans, strict=True):
            add(slot=running.slot, epoch=running.epoch, nodes=1, rows=count)
        return
    plan.kind = common_pb2.STEP_KIND_DECODE
    for running, nodes, replay in zip(step.entries, step.nodes_of, step.replays, strict=True):
        add(slot=running.slot, epoch=running.epoch, nodes=nodes, rows=nodes + replay)


def logprobs_of(rows: Iterable[target_pb2.TokenLogprobs]) -> tuple[TokenLogprob, ...]:
    """Row for row."""
    return tuple(
        TokenLogprob(row.logprob, tuple(zip(row.top_ids, row.top_logprobs, strict=True)))
        for row in rows
    )
