"""The runner on a GPU: it says what to do, and learns what came of it when all is done.

A decode step is one copy in, three recorded pieces of work and one copy out
(`services.target.device_step`). What the host keeps of a slot is what it was told at admission;
lengths and sampling state are the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.target.device_flight import DecodeFlight, Held, PrefillFlight
from services.target.device_masks import step_masks
from services.target.device_readback import (
    FeatureReadback,
    ProposalReadback,
    ScoreReadback,
    StampReadback,
    StepReadback,
)
from services.target.device_slots import DeviceSlots, SamplerClass
from services.target.device_step import DeviceStep
from services.target.grammar import Vocabulary, admitted
from services.target.kv_cache import KVCache, flat_slots
from services.target.prefill import PrefillAttention
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    Link,
    PrefillEntry,
    SlotAdmit,
    TargetSpec,
)
from services.target.step_input import TABLE_UPDATES, TableUpdate
from slipstream.layers.kernel_gaps import KernelGaps
from slipstream.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc import Export


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
        shared: Export | None = None,
    ) -> None:
        """`prefill`: attention of prefill steps that are not recorded; None: the step's own.

        `vocabulary` is there where `spec` says grammars; `shared`: what a draft may map.
        """
        self.spec = spec
        self._step, self._slots, self._cache, self._prefill = step, slots, cache, prefill
        self._vocabulary = vocabulary
        self._pool = vocabulary.pool() if vocabulary is not None else None
        self._held: dict[int, Held] = {}
        self.shared = shared
        self._results = StepReadback(step.walks, step.draws, step.device)
        self._stamps = StampReadback(step.stamps, step.device)
        self._proposals = ProposalReadback(step.trees, step.device)
        self._scores = ScoreReadback(step.scores, step.device)
        self._features = FeatureReadback(cache, spec.max_prefill_rows, step.device)
        self._gaps: KernelGaps | None = None

    def warm_up(self) -> None:
        """Runs what is not recorded: prefill pieces, first and further chunks, and the copies.

        The last thing is what `at_rest` does later.
        """
        most = min(self.spec.max_model_len - 1, self.spec.pages * self.spec.page_size)
        for size in self._step.prefill_buckets:
            for shares in {1, min(size, len(self._slots.start))}:
                count = min(size, most) // shares
                if count > 0 and shares * -(-count // self.spec.page_size) <= self.spec.pages:
                    self._warm_prefill(shares, count, first=0)
                    self._warm_prefill(shares, count // 2, first=count - count // 2)
        if self._step.graphs.enabled:
            self._gaps = KernelGaps(self._step.graphs)

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
        self._held[slot] = Held.of(admit, matcher)

    def release(self, slot: int) -> None:
        del self._held[slot]
        self._slots.release(slot)

    def lengths(self, slot: int) -> tuple[int, int]:
        with self._step.graphs.on_stream():
            rows = int(self._slots.start[slot])
        return rows, self._held[slot].feature_rows if self.spec.feature_width else rows

    def prefill(self, entries: Sequence[PrefillEntry]) -> list[EntryResult]:
        return list(self.start_prefill(entries, None).results())

    def decode(self, entries: Sequence[DecodeEntry]) -> list[EntryResult]:
        return list(self.start_decode(entries, None).results())

    @torch.inference_mode()
    def start_prefill(self, entries: Sequence[PrefillEntry], link: Link | None) -> PrefillFlight:
        step = self._step
        held = [self._held[entry.slot] for entry in entries]
        scored = [h.scores(entry) for h, entry in zip(held, entries, strict=True)]
        rows = sum(entry.count for entry in entries)
        over = [entry.last and h.only_scored for entry, h in zip(entries, held, strict=True)]
        lasts = [i for i, entry in enumerate(entries) if entry.last and not over[i]]
        firsts = scores = None
        with step.graphs.on_stream():
            self._send_prefill(entries, held, scored)
            step.link.send(link)
            _await(link)
            attend = None
            if self._prefill is not None and rows > step.sizes.recorded_prefill_rows:
                attend = self._prefill.plan(entries, step.prefill_bucket(rows))
            step.prefill(rows, attend)
            step.graphs.rejoin()  # what the step before had for the host is about to be overwritten
            if any(scored):
                step.score(rows)
            if lasts:
                self._draw_firsts(entries, lasts)
            step.publish()
            if link is not None:
                link.end.publish(link.step)
            with step.graphs.off_stream():
                if any(scored):
                    scores = self._scores.start(rows)
                if lasts:
                    firsts = self._results.start(
                        [1] * len(lasts), [held[i].logprobs for i in lasts]
                    )
                stamps = self._stamps.start()
        return PrefillFlight(entries, held, scored, over, lasts, firsts, scores, stamps)

    def _send_prefill(
        self, entries: Sequence[PrefillEntry], held: Sequence[Held], scored: Sequence[int]
    ) -> None:
        known = [h.ids[e.first : e.first + e.count] for h, e in zip(held, entries, strict=True)]
        self._step.input.send_prefill(
            [e.slot for e in entries],
            [e.first for e in entries],
            [e.count for e in entries],
            [token for ids in known for token in ids],
            self._new_pages(entries),
            _scored_rows(entries, held, scored) if any(scored) else (),
        )

    def _draw_firsts(self, entries: Sequence[PrefillEntry], lasts: Sequence[int]) -> None:
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

    @torch.inference_mode()
    def start_decode(self, entries: Sequence[DecodeEntry], link: Link | None) -> DecodeFlight:
        step, parts, copies = self._step, list(_parts(entries, self._step.sizes.decode_rows)), []
        held = [self._held[entry.slot] for entry in entries]
        with step.graphs.on_stream():
            if not parts:
                step.link.send(link)
                _await(link)
                step.mark()
                step.graphs.rejoin()
                step.publish()
            first = 0
            for part in parts:
                own = held[first : first + len(part)]
                step.input.send_decode(part, self._new_pages(part))
                step.link.send(link, first, last=part is parts[-1])
                if first == 0:
                    _await(link)
                self._run_part(part, own)
                if part is parts[-1] and link is not None:
                    link.end.publish(link.step)
                with step.graphs.off_stream():
                    rows = [entry.rows for entry in part]
                    copies.append(self._results.start(rows, [h.logprobs for h in own]))
                first += len(part)
            if not parts and link is not None:
                link.end.publish(link.step)
            with step.graphs.off_stream():
                stamps = self._stamps.start()
        return DecodeFlight(entries, held, copies, stamps)

    def _run_part(self, part: Sequence[DecodeEntry], held: Sequence[Held]) -> None:
        step, rows = self._step, sum(entry.rows for entry in part)
        tree = any(entry.branches for entry in part if entry.linked) or not all(
            _is_chain(entry) for entry in part
        )
        kind = self._kind([e.slot for e in part], [e.start for e in part])
        matchers = [h.matcher for h in held]
        matched = any(matcher is not None for matcher in matchers)
        step.intake(rows, tree)
        if matched and any(entry.linked for entry in part):
            with step.graphs.off_stream():
                self._proposals.start(rows, len(part))
        step.forward(rows, tree)
        if matched:
            part = self._proposals.read(part)
            step.masks.send(step_masks(part, matchers, self.spec.vocab_size, self._pool), rows)
        step.graphs.rejoin()
        step.finish(rows, tree, kind)

    def rewind(self, slot: int, rows: int) -> None:
        with self._step.graphs.on_stream():
            self._slots.rewind(slot, rows)

    def rewind_all(self) -> None:
        with self._step.graphs.on_stream():
            self._slots.rewind_all()

    def at_rest(self) -> bool:
        return self._gaps is None or self._gaps.keep()

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


def _await(link: Link | None) -> None:
    """The stream waits for what the step needs of the draft."""
    if link is None:
        return
    if link.awaits:
        link.end.await_proposal(link.step)
    else:
        link.end.await_room(link.step)


def _scored_rows(
    entries: Sequence[PrefillEntry], held: Sequence[Held], scored: Sequence[int]
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
