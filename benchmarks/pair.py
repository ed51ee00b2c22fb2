"""Target and draft of the embedded pair in one process, driven without servers.

The real loading code makes both runners. The loop is the engine's in short: requests join as slots
become free, context rows go from one runner to the other in memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from services.draft.loading import load_runner as load_draft
from services.draft.runner import ContextRows, DraftContext, DraftEntry, Drafting
from services.draft.settings import DraftSettings
from services.target.loading import load_runner as load_target
from services.target.runner import (
    DecodeEntry,
    FeatureSpan,
    Finish,
    Logprob,
    PrefillEntry,
    SlotAdmit,
)
from services.target.settings import TargetSettings
from slipstream.params import SamplingParams
from slipstream.tree import TreeSpec

TARGET = "smollm2-135m-instruct"
SLOTS = 32
PAGE_SIZE = 16
MAX_LEN = 1024
SLOT_PAGES = -(-(MAX_LEN + 256) // PAGE_SIZE)
"""Room for the longest request and the scratch of its last tree."""

TARGET_SHARE, BOTH_SHARE = 0.4, 0.8
"""Parts of a GPU's memory. Both runners are in one process, to which a share is the whole of what
the process may hold: the draft, which comes second, has the target's beside its own."""


@dataclass(frozen=True)
class Request:
    """A prompt and how it is answered.

    Attributes:
        limit: new tokens at most; the end token among them.
        logprobs: the best so many of each token are kept; None: no logprobs.
    """

    id: str
    group: str
    prompt: list[int]
    limit: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None


@dataclass
class Row:
    """A request as the loop follows it; `drafted` are the steps that verified more than a node."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    done: bool = False

    @property
    def start(self) -> int:
        """Position of the last token, which is also the number of rows that both sides hold."""
        return len(self.request.prompt) + len(self.tokens) - 1


class Pair:
    """Both runners, loaded.

    Args:
        head: the draft head, whose features the target publishes.
        device: as for --device; `attention`: of both, decode and verify, and of prefill as it
            follows from it.

    Raises ConfigError as the servers do.
    """

    def __init__(self, head: str, device: str, dtype: str, attention: str) -> None:
        common: dict[str, Any] = {
            "model": TARGET, "draft": head, "device": device, "dtype": dtype,
            "attention_backend": attention, "slots": SLOTS, "page_size": PAGE_SIZE,
            "pages": SLOTS * SLOT_PAGES, "warmup": False,
        }  # fmt: skip
        shares = (TARGET_SHARE, BOTH_SHARE) if device != "cpu" else (None, None)
        self.target = load_target(
            TargetSettings(**common, max_model_len=MAX_LEN, memory_share=shares[0])
        )
        self.draft = load_draft(DraftSettings(**common, memory_share=shares[1]))

    @property
    def block_size(self) -> int:
        return self.draft.spec.block_size

    def run(
        self, requests: Sequence[Request], spec: TreeSpec | None, slots: int = SLOTS
    ) -> list[Row]:
        """Answers all requests, at most `slots` at once; None: without draft. Rows in order."""
        rows = [Row(request) for request in requests]
        context = None if spec is None else self.draft.open_context()
        loop = _Loop(self, context, spec, slots)
        try:
            loop.run(rows)
        finally:
            for slot in list(loop.live):
                loop.leave(slot)
            if context is not None:
                context.close()
        return rows


def unload() -> None:
    """Gives back the memory of pairs that nobody names any more; loading froze all that lives."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Loop:
    """Requests of one run. `live`: the rows by slot."""

    def __init__(
        self, pair: Pair, context: DraftContext | None, spec: TreeSpec | None, slots: int
    ) -> None:
        self._target, self._context, self._spec = pair.target, context, spec
        self._row_bytes = pair.draft.spec.row_bytes
        self._free = list(range(slots))
        self.live: dict[int, Row] = {}

    def run(self, rows: Sequence[Row]) -> None:
        waiting = list(rows)
        while waiting or self.live:
            joined = {}
            while waiting and self._free:
                slot = self._free.pop(0)
                joined[slot] = waiting.pop(0)
                self._admit(slot, joined[slot])
            for part in _parts(joined, self._target.spec.max_prefill_rows):
                self._prefill(part)
            self._leave_finished()
            if self.live:
                self._decode()
                self._leave_finished()

    def leave(self, slot: int) -> None:
        del self.live[slot]
        self._target.release(slot)
        if self._context is not None:
            self._context.release(slot)
        self._free.append(slot)

    def _leave_finished(self) -> None:
        for slot in [slot for slot, row in self.live.items() if row.done]:
            self.leave(slot)

    def _admit(self, slot: int, row: Row) -> None:
        request, sampling = row.request, row.request.sampling
        limit, stop = len(request.prompt) + request.limit, frozenset(self._target.spec.eos_ids)
        self._target.admit(
            slot,
            SlotAdmit(request.prompt, (), limit, 0, stop, sampling, request.logprobs, True),
        )
        if self._context is not None and self._spec is not None:
            drafting = Drafting(self._spec, sampling.temperature, sampling.seed, sampling.choice)
            self._context.admit(slot, drafting)
        self.live[slot] = row

    def _prefill(self, part: dict[int, Row]) -> None:
        entries = [
            PrefillEntry(slot, 0, len(row.request.prompt), True, _pages(slot))
            for slot, row in part.items()
        ]
        for row, result in zip(part.values(), self._target.prefill(entries), strict=True):
            row.tokens += result.tokens
            row.logprobs += result.logprobs
            row.done = result.finish is not Finish.NONE
        self._publish([(slot, 0, len(row.request.prompt)) for slot, row in part.items()])

    def _decode(self) -> None:
        live = self.live
        trees = {}
        if self._context is not None and self._spec is not None:
            wanted = [
                DraftEntry(slot, row.start, row.tokens[-1], self._spec.budget)
                for slot, row in live.items()
            ]
            trees = dict(zip(live, self._context.draft(wanted), strict=True))
        entries = []
        for slot, row in live.items():
            tree = trees.get(slot)
            nodes, proposed = (
                (1, None) if tree is None else (len(tree), (tree.tokens, tree.parents))
            )
            entries.append(
                DecodeEntry(slot, row.start, row.tokens[-1], nodes, proposed, _pages(slot))
            )
        published = []
        for entry, result in zip(entries, self._target.decode(entries), strict=True):
            row = live[entry.slot]
            row.tokens += result.tokens
            row.logprobs += result.logprobs
            row.steps += 1
            row.drafted += result.nodes > 1
            if result.finish is Finish.ERROR or not result.tokens:
                raise RuntimeError(f"{row.request.id}: a step gave {result}")
            row.done = result.finish is not Finish.NONE
            if not row.done:
                published.append((entry.slot, entry.start, len(result.tokens)))
        self._publish(published)

    def _publish(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Hands the context rows (slot, first, count) over."""
        if self._context is None or not spans:
            return
        raw = memoryview(self._target.features([FeatureSpan(*span) for span in spans])).cast("B")
        rows, at = [], 0
        for slot, first, count in spans:
            self._context.reserve(slot, first + count)
            end = at + count * self._row_bytes
            rows.append(ContextRows(slot, first, count, raw[at:end]))
            at = end
        self._context.write(rows)


def _pages(slot: int) -> range:
    """A slot's pages lie apart, as those of slots that grew side by side do."""
    return range(slot, SLOTS * SLOT_PAGES, SLOTS)


def _parts(rows: dict[int, Row], most: int) -> Iterator[dict[int, Row]]:
    """The requests in groups of at most `most` tokens of prompt."""
    part: dict[int, Row] = {}
    held = 0
    for slot, row in rows.items():
        count = len(row.request.prompt)
        if count > most:
            raise ValueError(f"{row.request.id}: {count} tokens of prompt, {most} at most")
        if part and held + count > most:
            yield part
            part, held = {}, 0
        part[slot] = row
        held += count
    if part:
        yield part


def taus(rows: Iterable[Row]) -> dict[str, float | None]:
    """(emitted tokens - 1) / verify steps, by group; None for a group without steps."""
    emitted: dict[str, int] = {}
    steps: dict[str, int] = {}
    for row in rows:
        group = row.request.group
        emitted[group] = emitted.get(group, 0) + len(row.tokens) - 1
        steps[group] = steps.get(group, 0) + row.steps
    return {g: round(emitted[g] / steps[g], 3) if steps[g] else None for g in emitted}
