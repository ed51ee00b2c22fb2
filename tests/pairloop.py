"""A target runner and a draft context driven directly: the decoding loop without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.draft.loading import load_runner as load_draft
from services.draft.runner import ContextRows, DraftEntry, Drafting
from services.draft.settings import DraftSettings
from services.target.loading import load_runner as load_target
from services.target.runner import (
    DecodeEntry,
    FeatureSpan,
    Finish,
    PrefillEntry,
    SlotAdmit,
)
from services.target.settings import TargetSettings
from slipstream.params import SamplingParams
from slipstream.tree import TreeSpec
from tests.tiny import Pair

PAGES_PER_SLOT = 12
PAGE_SIZE = 8


@dataclass
class Row:
    """One request as the loop follows it."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    steps: int = 0
    done: bool = False

    @property
    def start(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1


class PairLoop:
    """Both runners of a tiny pair, in fp32."""

    def __init__(self, pair: Pair, slots: int, spec: TreeSpec | None) -> None:
        common = {"model": str(pair.target), "dtype": "float32", "slots": slots}
        pages = {"pages": slots * PAGES_PER_SLOT, "page_size": PAGE_SIZE}
        self.target = load_target(
            TargetSettings(**common, **pages, draft=str(pair.draft), warmup=False)
        )
        self.draft = load_draft(DraftSettings(**common, **pages, draft=str(pair.draft)))
        self.context = self.draft.open_context()
        self.spec = spec

    def run(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], count: int
    ) -> list[Row]:
        """`count` tokens for every prompt, all prompts in one batch."""
        rows = [Row(p, s) for p, s in zip(prompts, sampling, strict=True)]
        for slot, row in enumerate(rows):
            limit = len(row.prompt) + count
            admit = SlotAdmit(row.prompt, (), limit, 0, frozenset(), row.sampling, None, True)
            self.target.admit(slot, admit)
            if self.spec is not None:
                drafting = Drafting(
                    self.spec, row.sampling.temperature, row.sampling.seed, row.sampling.choice
                )
                self.context.admit(slot, drafting)
        self._prefill(rows)
        while any(not row.done for row in rows):
            self._decode(rows)
        for slot in range(len(rows)):
            self.target.release(slot)
            if self.spec is not None:
                self.context.release(slot)
        return rows

    def _pages(self, slot: int) -> list[int]:
        return list(range(slot * PAGES_PER_SLOT, (slot + 1) * PAGES_PER_SLOT))

    def _prefill(self, rows: list[Row]) -> None:
        entries = [
            PrefillEntry(slot, 0, len(row.prompt), True, self._pages(slot))
            for slot, row in enumerate(rows)
        ]
        for slot, result in enumerate(self.target.prefill(entries)):
            rows[slot].tokens += result.tokens
            rows[slot].done = result.finish is not Finish.NONE
            self._publish(slot, 0, len(rows[slot].prompt))

    def _publish(self, slot: int, first: int, count: int) -> None:
        if self.spec is not None and count:
            raw = memoryview(self.target.features([FeatureSpan(slot, first, count)]))
            self.context.reserve(slot, first + count)
            self.context.write([ContextRows(slot, first, count, raw.cast("B"))])

    def _decode(self, rows: list[Row]) -> None:
        live = [slot for slot, row in enumerate(rows) if not row.done]
        trees = {}
        if self.spec is not None:
            wanted = [
                DraftEntry(slot, rows[slot].start, rows[slot].tokens[-1], self.spec.budget)
                for slot in live
            ]
            trees = dict(zip(live, self.context.draft(wanted), strict=True))
        entries = [
            DecodeEntry(
                slot,
                rows[slot].start,
                rows[slot].tokens[-1],
                len(trees[slot]) if slot in trees else 1,
                (trees[slot].tokens, trees[slot].parents) if slot in trees else None,
                self._pages(slot),
            )
            for slot in live
        ]
        for slot, result in zip(live, self.target.decode(entries), strict=True):
            row, first = rows[slot], rows[slot].start
            row.tokens += result.tokens
            row.accepted += result.accepted
            row.steps += 1
            row.done = result.finish is not Finish.NONE
            self._publish(slot, first, len(result.tokens))
