"""The runner on a GPU: it says what to do, and learns what came of it when all is done.

A decode step is one copy in, three recorded pieces of work and one copy out
(`services.target.device_step`). What the host keeps of a slot is what it was told at admission;
lengths and sampling state are the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.target.device_masks import step_masks
from services.target.device_readback import FeatureReadback, ScoreReadback, StepReadback
from services.target.device_slots import DeviceSlots, SamplerClass
from services.target.device_step import DeviceStep
from services.target.grammar import Matcher, Vocabulary, admitted
from services.target.kv_cache import KVCache, flat_slots
from services.target.prefill import PrefillAttention
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    Finish,
    PrefillEntry,
    SlotAdmit,
    TargetSpec,
)
from services.target.step_input import TABLE_UPDATES, TableUpdate
from slipstream.params import SamplingParams


@dataclass(slots=True)
class _Held:
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
    def of(cls, admit: SlotAdmit, matcher: Matcher | None) -> _Held:
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


class DeviceRunner:
    """`TargetRunner` over a `DeviceStep`; its calls come from one thread."""

    def __init__(
        self,
        spec: TargetSpec,
        step: DeviceStep,
        slots: DeviceSlots,
        cache: KVCache,
        prefill: PrefillAttention | None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`prefill`: attention of prefill steps that are not recorded; None: the step's own.

        `vocabulary` is there where `spec` says grammars.
        """
        self.spec = spec
        self._step, self._slots, self._cache, self._prefill = step, slots, cache, prefill
        self._vocabulary = vocabulary
        self._pool = vocabulary.pool() if vocabulary is not None else None
        self._held: dict[int, _Held] = {}
        self._results = StepReadback(step.walks, step.draws, step.device)
        self._scores = ScoreReadback(step.scores, step.device)
        self._features = FeatureReadback(cache, spec.max_prefill_rows, step.device)

    def warm_up(self) -> None:
        """Runs what is not recorded: prefill pieces, first and further chunks, and the copies."""
        most = min(self.spec.max_model_len - 1, self.spec.pages * self.spec.page_size)
        for size in self._step.prefill_buckets:
            for shares in {1, min(size, len(self._slots.start))}:
                count = min(size, most) // shares
                if count > 0 and shares * -(-count // self.spec.page_size) <= self.spec.pages:
                    self._warm_prefill(shares, count, first=0)
                    self._warm_prefill(shares, count // 2, first=count - count // 2)

    def _warm_prefill(self, shares: int, count: int, first: int) -> None:
        """A prefill of `count` rows from position `first` on of as many slots as `shares`."""
        spec, held = self.spec, -(-(first + count) // self.spec.page_size)
        ids = [(7 * i + 11) % spec.vocab_size for i in range(first + count)]
        sampling = SamplingParams(logit_bias={0: 1.0}, presence_penalty=1.0)
        request = SlotAdmit(ids, (), len(ids) + 1, 0, frozenset((0,)), sampling, 1, False, 1)
        entries = [
            PrefillEntry(slot, first, count, True, range(slot * held, (slot + 1) * held))
            for slot in range(shares)
            if count > 0
        ]
        for entry in entries:
            self.admit(entry.slot, request)
        if entries:
            self.prefill(entries)
        if entries and spec.feature_width:
            self.features([FeatureSpan(e.slot, e.first, e.count) for e in entries])
        for entry in entries:
            self.release(entry.slot)

    def admit(self, slot: int, admit: SlotAdmit) -> None:
        matcher = admitted(self._vocabulary, admit)
        with self._step.graphs.on_stream():
            self._slots.admit(slot, admit)
        self._held[slot] = _Held.of(admit, matcher)

    def release(self, slot: int) -> None:
        del self._held[slot]
        self._slots.release(slot)

    def lengths(self, slot: int) -> tuple[int, int]:
        with self._step.graphs.on_stream():
            rows = int(self._slots.start[slot])
        return rows, self._held[slot].feature_rows if self.spec.feature_width else rows

    @torch.inference_mode()
    def prefill(self, entries: Sequence[PrefillEntry]) -> list[EntryResult]:
        step = self._step
        held = [self._held[entry.slot] for entry in entries]
        scored = [h.scores(entry) for h, entry in zip(held, entries, strict=True)]
        with step.graphs.on_stream():
            known = [self._held[e.slot].ids[e.first : e.first + e.count] for e in entries]
            step.input.send_prefill(
                [e.slot for e in entries],
                [e.first for e in entries],
                [e.count for e in entries],
                [token for ids in known for token in ids],
                self._new_pages(entries),
                _scored_rows(entries, held, scored) if any(scored) else (),
            )
            rows = sum(entry.count for entry in entries)
            attend = None
            if self._prefill is not None and rows > step.sizes.recorded_prefill_rows:
                attend = self._prefill.plan(entries, step.prefill_bucket(rows))
            step.prefill(rows, attend)
            if any(scored):
                step.score(rows)
                self._scores.start(rows)
            over = [entry.last and h.only_scored for entry, h in zip(entries, held, strict=True)]
            results = [EntryResult(finish=Finish.LIMIT if end else Finish.NONE) for end in over]
            lasts = [i for i, entry in enumerate(entries) if entry.last and not over[i]]
            if lasts:
                for index, result in zip(lasts, self._first_tokens(entries, lasts), strict=True):
                    results[index] = result
        first = 0
        for index, (entry, h) in enumerate(zip(entries, held, strict=True)):
            h.feature_rows = entry.first + entry.count
            if scored[index]:
                scores = self._scores.read(first, scored[index], h.prompt_logprobs)
                results[index] = replace(results[index], prompt_logprobs=scores)
            first += entry.count
        return results

    def _first_tokens(
        self, entries: Sequence[PrefillEntry], lasts: Sequence[int]
    ) -> list[EntryResult]:
        """Draws the token after each of the entries `lasts`."""
        ends = np.cumsum([entry.count for entry in entries])
        part = [entries[index] for index in lasts]
        held = [self._held[entry.slot] for entry in part]
        starts = [entry.first + entry.count - 1 for entry in part]
        anchors = [h.ids[at] for h, at in zip(held, starts, strict=True)]
        picked = [int(ends[index]) - 1 for index in lasts]
        self._step.input.send_first([e.slot for e in part], starts, anchors, picked)
        masks = {i: h.matcher.allowed() for i, h in enumerate(held) if h.matcher is not None}
        if masks:
            self._step.masks.send(masks, len(part))
        self._step.first(len(part), self._kind([e.slot for e in part], starts))
        results = self._results.read([1] * len(part), [h.logprobs for h in held])
        found = [EntryResult(r.tokens, r.finish, r.logprobs) for r in results]
        return [h.took(result) for h, result in zip(held, found, strict=True)]

    @torch.inference_mode()
    def decode(self, entries: Sequence[DecodeEntry]) -> list[EntryResult]:
        step, results = self._step, list[EntryResult]()
        with step.graphs.on_stream():
            for part in _parts(entries, step.sizes.decode_rows):
                rows = [entry.rows for entry in part]
                held = [self._held[entry.slot] for entry in part]
                step.input.send_decode(part, self._new_pages(part))
                tree = not all(_is_chain(entry) for entry in part)
                kind = self._kind([e.slot for e in part], [e.start for e in part])
                step.verify(sum(rows), tree)
                matchers = [h.matcher for h in held]
                if any(matchers):
                    masks = step_masks(part, matchers, self.spec.vocab_size, self._pool)
                    step.masks.send(masks, sum(rows))
                step.finish(sum(rows), tree, kind)
                found = self._results.read(rows, [h.logprobs for h in held])
                results += [h.took(result) for h, result in zip(held, found, strict=True)]
        for entry, result in zip(entries, results, strict=True):
            self._held[entry.slot].feature_rows = entry.start + len(result.tokens)
        return results

    def features(self, spans: Sequence[FeatureSpan]) -> memoryview:
        index: list[int] = []
        for span in spans:
            positions = range(span.first, span.first + span.count)
            index += flat_slots(self._held[span.slot].pages, positions, self._cache.page_size)
        with self._step.graphs.on_stream():
            return self._features.read(index)

    def _kind(self, slots: Sequence[int], starts: Sequence[int]) -> SamplerClass:
        """The class that serves all of the slots."""
        classes = {
            self._slots.sampler_class(slot, start + 1)
            for slot, start in zip(slots, starts, strict=True)
        }
        return "full" if "full" in classes else "greedy"

    def _new_pages(
        self, entries: Sequence[PrefillEntry] | Sequence[DecodeEntry]
    ) -> list[TableUpdate]:
        """Pages that the device does not have yet; what one copy cannot carry is sent before."""
        updates: list[TableUpdate] = []
        for entry in entries:
            held = self._held[entry.slot]
            held.pages = entry.pages
            fresh = range(held.uploaded, len(entry.pages))
            updates += [(entry.slot, index, entry.pages[index]) for index in fresh]
            held.uploaded = len(entry.pages)
        while len(updates) > TABLE_UPDATES:
            self._step.input.send_updates(updates[:TABLE_UPDATES])
            self._step.update_tables()
            del updates[:TABLE_UPDATES]
        return updates


def _scored_rows(
    entries: Sequence[PrefillEntry], held: Sequence[_Held], scored: Sequence[int]
) -> list[tuple[int, int]]:
    """Of each row of a prefill, the token that it scores and how many best ones are wanted."""
    rows: list[tuple[int, int]] = []
    for entry, h, count in zip(entries, held, scored, strict=True):
        tokens = h.ids[entry.first + 1 : entry.first + 1 + count]
        rows += [(token, h.prompt_logprobs) for token in tokens]
        rows += [(0, -1)] * (entry.count - count)
    return rows


def _is_chain(entry: DecodeEntry) -> bool:
    """Whether what was proposed has no branch, or is nothing."""
    if entry.proposed is None:
        return True
    parents = entry.proposed[1]
    return all(parent == node - 1 for node, parent in enumerate(parents))


def _parts(entries: Sequence[DecodeEntry], most: int) -> Iterator[Sequence[DecodeEntry]]:
    """The entries in runs of at most `most` rows together."""
    first = rows = 0
    for index, entry in enumerate(entries):
        if rows + entry.rows > most:
            yield entries[first:index]
            first, rows = index, 0
        rows += entry.rows
    if rows:
        yield entries[first:]
