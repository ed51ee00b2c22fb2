"""What the host keeps of a request on a device, and of a step that is on its way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.target.device_readback import ScoreCopy, StepCopy
from services.target.grammar import Matcher
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    Finish,
    PrefillEntry,
    SlotAdmit,
    Stamps,
)
from slipstream.layers.staging import Copied


@dataclass(slots=True)
class Held:
    """A slot's request on the host.

    `ids` are the tokens known at admission; `pages` is its block table as the last call gave it, of
    which the device has the first `uploaded`; the tokens before `scored` are wanted with their
    `prompt_logprobs` best.
    """

    ids: Sequence[int]
    logprobs: int | None
    only_scored: bool
    scored: int
    prompt_logprobs: int
    matcher: Matcher | None
    pages: Sequence[int] = ()
    uploaded: int = 0
    feature_rows: int = 0

    @classmethod
    def of(cls, admit: SlotAdmit, matcher: Matcher | None) -> Held:
        return cls(
            [*admit.prompt_ids, *admit.output_ids],
            admit.logprobs,
            admit.only_scored,
            0 if admit.prompt_logprobs is None else len(admit.prompt_ids),
            admit.prompt_logprobs or 0,
            matcher,
        )

    def scores(self, entry: PrefillEntry) -> int:
        """How many rows of a chunk score a token, from its first on."""
        return max(0, min(entry.count, self.scored - 1 - entry.first))

    def took(self, result: EntryResult) -> EntryResult:
        """The result of a draw; where the grammar left nothing to draw, it says so."""
        if self.matcher is None:
            return result
        if not result.tokens and result.finish is Finish.NONE:
            return replace(result, finish=Finish.ERROR)
        self.matcher.advance(result.tokens)
        return result


@dataclass(frozen=True, slots=True)
class DecodeFlight:
    """A decode step on its way."""

    entries: Sequence[DecodeEntry]
    held: Sequence[Held]
    copies: Sequence[StepCopy]
    stamped: Copied

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()
        self.stamped.read()

    def results(self) -> list[EntryResult]:
        found = [result for copy in self.copies for result in copy.read()]
        for held, result in zip(self.held, found, strict=True):
            held.feature_rows += len(result.tokens)
        return [held.took(result) for held, result in zip(self.held, found, strict=True)]

    def stamps(self) -> Stamps:
        return Stamps(*self.stamped.read().tolist())


@dataclass(frozen=True, slots=True)
class PrefillFlight:
    """A prefill step on its way.

    `scored`: rows of each entry that score a token; `over`: it ends without an answer; `lasts`: the
    entries that drew a first token.
    """

    entries: Sequence[PrefillEntry]
    held: Sequence[Held]
    scored: Sequence[int]
    over: Sequence[bool]
    lasts: Sequence[int]
    firsts: StepCopy | None
    scores: ScoreCopy | None
    stamped: Copied

    def wait(self) -> None:
        for copy in (self.firsts, self.scores):
            if copy is not None:
                copy.wait()
        self.stamped.read()

    def results(self) -> list[EntryResult]:
        self.stamped.read()
        results = [EntryResult(finish=Finish.LIMIT if end else Finish.NONE) for end in self.over]
        if self.firsts is not None:
            for index, drawn in zip(self.lasts, self.firsts.read(), strict=True):
                first = EntryResult(drawn.tokens, drawn.finish, drawn.logprobs)
                results[index] = self.held[index].took(first)
        row = 0
        for index, (entry, held) in enumerate(zip(self.entries, self.held, strict=True)):
            held.feature_rows = entry.first + entry.count
            if self.scores is not None and self.scored[index]:
                scores = self.scores.read(row, self.scored[index], held.prompt_logprobs)
                results[index] = replace(results[index], prompt_logprobs=scores)
            row += entry.count
        return results

    def stamps(self) -> Stamps:
        return Stamps(*self.stamped.read().tolist())
