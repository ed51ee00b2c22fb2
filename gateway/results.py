"""What a StepDone says: each slot's tokens, and what the scheduler learns from the step's time."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.board import DECODE, Running, Step
from gateway.commands import logprobs_of
from gateway.counters import Counters
from gateway.planner import Planner
from gateway.request import Chunk, Finish, Request, TokenLogprob
from slipstream.errors import EngineFailed, ProtocolError, SlipstreamError
from slipstream.v1 import common_pb2, target_pb2

_DONE = target_pb2.StepEntry.OUTCOME_DONE
_DROPPED = target_pb2.StepEntry.OUTCOME_DROPPED
_FINISHES: dict[int, Finish] = {
    common_pb2.FINISH_STOP_ID: "stop",
    common_pb2.FINISH_LIMIT: "length",
    common_pb2.FINISH_ERROR: "error",
}


class Results:
    """Reads results; it moves the lengths of a slot on and nothing else.

    Args:
        lock_step: a step is only sent after the one before it.
    """

    def __init__(self, counters: Counters, lock_step: bool) -> None:
        self._counters = counters
        self._lock_step = lock_step
        self._last: tuple[float, int] = (0.0, 0)  # arrival and kind of the last result

    def forget(self) -> None:
        """The next result follows no other."""
        self._last = (0.0, 0)

    def chunks(
        self, step: Step, done: target_pb2.StepDone, planner: Planner, current: bool
    ) -> Iterator[tuple[Running, Chunk]]:
        """What the step gave each slot that still runs; `current`: its session still is.

        Raises ProtocolError when it does not answer the plan.
        """
        if len(done.entries) != len(step.entries):
            raise ProtocolError(
                f"step {done.step}: {len(done.entries)} entries, planned {len(step.entries)}"
            )
        decode = step.kind == DECODE
        learn = planner.chooser if current and step.nodes > 1 else None
        for index, entry in enumerate(done.entries):
            running, nodes = step.entries[index], step.nodes_of[index]
            if running.gone:
                continue
            if entry.slot != running.slot or entry.epoch != running.epoch:
                raise ProtocolError(f"step {step.number}: slot {entry.slot} is not in row order")
            if entry.outcome != _DONE:
                if entry.outcome == _DROPPED:
                    yield running, _failed("the target dropped the request")
                continue
            scores = () if decode else _scores(step, index, running.request, entry)
            chunk = self._chunk(step, running, entry, scores)
            if decode:
                usual = nodes == step.nodes and not running.request.params.own_tree
                if learn is not None and usual:
                    learn.observe_accepted(nodes, chunk.accepted)
            elif not (chunk.tokens or scores) and chunk.finish == "none":
                continue
            yield running, chunk

    def _chunk(
        self,
        step: Step,
        running: Running,
        entry: target_pb2.StepEntry,
        scores: tuple[TokenLogprob, ...],
    ) -> Chunk:
        request, counters = running.request, self._counters
        tokens = tuple(entry.tokens)
        running.tokens += len(tokens)
        if running.tokens > running.limit:
            raise ProtocolError(f"step {step.number}: slot {entry.slot} is beyond its limit")
        request.output += tokens
        counters.tokens += len(tokens)
        finish = _FINISHES.get(entry.finish, "none")
        if finish == "none" and running.tokens == running.limit and not request.unscored:
            finish = "length"  # nothing more would be planned for it
        error = _stopped(request) if finish == "error" else None
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = logprobs_of(entry.logprobs)
            if len(logprobs) != len(tokens):
                raise ProtocolError(
                    f"step {step.number}: {len(logprobs)} log-probabilities of {len(tokens)} tokens"
                )
        if step.kind != DECODE:
            return Chunk(tokens, logprobs, scores, finish, error)
        counters.slot_steps += 1
        counters.accepted += entry.accepted
        return Chunk(
            tokens, logprobs, (), finish, error, nodes=entry.nodes, accepted=entry.accepted
        )

    def measure(
        self,
        step: Step,
        times: target_pb2.StepTimes,
        at: float,
        tokens: int,
        planner: Planner,
        current: bool,
    ) -> None:
        """Counts a step whose result arrived `at`, and learns from its time if it followed another
        decode step without a pause."""
        counters = self._counters
        (last_at, last_kind), self._last = self._last, (at, step.kind)
        counters.steps += 1
        counters.waited_ns += times.waited
        counters.computed_ns += times.computed
        counters.published_ns += times.published
        counters.drafted_ns += times.drafted
        if step.kind != DECODE:
            counters.prefill_steps += 1
            counters.prefill_rows += sum(count for _, count in step.spans)
            return
        counters.decode_steps += 1
        counters.rows += sum(step.nodes_of)
        counters.drafted_steps += step.drafted > 0
        counters.drafted_slot_steps += step.drafted
        if last_kind != DECODE or not (self._lock_step or step.sent_at <= last_at):
            return
        seconds = at - max(last_at, step.sent_at)
        counters.step_took(seconds)
        if current:
            planner.measured(step, seconds * 1e3, tokens)


def _scores(
    step: Step, index: int, request: Request, entry: target_pb2.StepEntry
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of prompt tokens that a chunk adds to those delivered: after a preemption
    the first ones come again."""
    if not request.unscored:
        return ()
    first, count = step.spans[index]
    wanted = min(count, len(request.params.prompt_ids) - 1 - first)
    if len(entry.prompt_logprobs) != max(wanted, 0) or first > request.scored:
        raise ProtocolError(
            f"step {step.number}: {len(entry.prompt_logprobs)} prompt log-probabilities at {first},"
            f" after {request.scored} of {len(request.params.prompt_ids) - 1}"
        )
    rows = logprobs_of(entry.prompt_logprobs[request.scored - first :])
    request.scored += len(rows)
    return rows


def _stopped(request: Request) -> SlipstreamError:
    """Why the target cannot go on: with a grammar, because nothing is left to draw."""
    if request.params.grammar is None:
        return EngineFailed("the target could not go on")
    return request.params.dead_end(len(request.output))


def _failed(reason: str) -> Chunk:
    return Chunk(finish="error", error=EngineFailed(reason))
