"""The runner with a real model: torch on one device, synchronous.

A step is: pack the rows, one forward, logits, draw and walk, commit. Only `_commit` changes what a
slot holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.target.grammar import Vocabulary, admitted
from services.target.kv_cache import KVCache, flat_slots
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    Finish,
    PrefillEntry,
    SlotAdmit,
    TargetSpec,
)
from services.target.sampler import Sampler, Verify, Walked, logprobs, prompt_logprobs, verify
from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.rows import RowBatch
from slipstream.models import CausalLM, ContextProjector
from slipstream.tree import Tree, ancestor_bits

LOGIT_ROWS = 1024
"""Rows of logits that are held at once: (rows, vocabulary) fp32."""


@dataclass(slots=True)
class _Slot:
    """What the runner keeps of a request; `ids` are the tokens known at admission.

    The tokens before `scored` are wanted with their `prompt_logprobs` best.
    """

    ids: Sequence[int]
    sampler: Sampler
    scored: int = 0
    prompt_logprobs: int = 0
    pages: Sequence[int] = ()
    kv_rows: int = 0
    feature_rows: int = 0

    @property
    def only_scored(self) -> bool:
        return self.sampler.limit == len(self.ids)


class ModelRunner:
    """`TargetRunner` over a `CausalLM` and, with a draft head, its `ContextProjector`."""

    def __init__(
        self,
        model: CausalLM,
        projector: ContextProjector | None,
        taps: Sequence[int],
        spec: TargetSpec,
        cache: KVCache,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`taps` are the layers whose outputs the projector takes; `cache` fits `spec`.

        `vocabulary` is there where `spec` says grammars.
        """
        self.spec = spec
        self._model = model
        self._projector = projector
        self._taps = tuple(taps) if projector is not None else ()
        self._cache = cache
        self._vocabulary = vocabulary
        self._slots: dict[int, _Slot] = {}

    def admit(self, slot: int, admit: SlotAdmit) -> None:
        sampler = Sampler.of(admit, admitted(self._vocabulary, admit))
        self._slots[slot] = _Slot(
            [*admit.prompt_ids, *admit.output_ids],
            sampler,
            scored=0 if admit.prompt_logprobs is None else len(admit.prompt_ids),
            prompt_logprobs=admit.prompt_logprobs or 0,
        )

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def lengths(self, slot: int) -> tuple[int, int]:
        held = self._slots[slot]
        return held.kv_rows, held.kv_rows if self._projector is None else held.feature_rows

    def features(self, spans: Sequence[FeatureSpan]) -> memoryview:
        size = self._cache.page_size
        index: list[int] = []
        for span in spans:
            positions = range(span.first, span.first + span.count)
            index += flat_slots(self._slots[span.slot].pages, positions, size)
        return self._cache.read_features(index)

    @torch.inference_mode()
    def prefill(self, entries: Sequence[PrefillEntry]) -> list[EntryResult]:
        ids: list[int] = []
        for entry in entries:
            slot = self._slots[entry.slot]
            slot.pages = entry.pages
            ids += slot.ids[entry.first : entry.first + entry.count]
        counts = [entry.count for entry in entries]
        batch = RowBatch.build(
            counts,
            [e.first for e in entries],
            [self._used(e.pages, e.first + e.count) for e in entries],
        )
        hidden, taps = self._forward(ids, batch)
        results = [
            self._score(entry, hidden[first : first + entry.count])
            for entry, first in zip(entries, batch.offsets, strict=False)
        ]
        lasts = [i for i, e in enumerate(entries) if e.last and not self._slots[e.slot].only_scored]
        if lasts:
            rows = torch.tensor([batch.offsets[i + 1] - 1 for i in lasts])
            requests = [self._first_token(entries[i], row) for row, i in enumerate(lasts)]
            for index, result, _ in self._draw(hidden[rows], requests):
                scores = results[lasts[index]].prompt_logprobs
                results[lasts[index]] = replace(result, nodes=0, prompt_logprobs=scores)
        self._commit_prefill(entries, taps)
        for index in lasts:
            self._slots[entries[index].slot].sampler.commit(results[index].tokens)
        return results

    @torch.inference_mode()
    def decode(self, entries: Sequence[DecodeEntry]) -> list[EntryResult]:
        ids: list[int] = []
        positions: list[int] = []
        requests: list[Verify] = []
        for entry in entries:
            slot = self._slots[entry.slot]
            slot.pages = entry.pages
            tree = entry.tree(self.spec.vocab_size)
            requests.append(Verify(slot.sampler, tree, entry.start, len(ids)))
            ids += tree.tokens
            positions += [entry.start + depth for depth in tree.depths]
        batch = RowBatch.build(
            [len(request.tree) for request in requests],
            [entry.start for entry in entries],
            [
                self._used(entry.pages, entry.start + len(request.tree))
                for entry, request in zip(entries, requests, strict=True)
            ],
            positions=positions,
            ancestors=_ancestors(requests),
        )
        hidden, taps = self._forward(ids, batch)
        results: list[EntryResult] = []
        walks: list[Walked] = []
        for _, result, walked in self._draw(hidden, requests):
            results.append(result)
            walks.append(walked)
        self._commit_decode(entries, requests, walks, taps)
        return results

    def _used(self, pages: Sequence[int], positions: int) -> Sequence[int]:
        """The pages that hold the first `positions` positions."""
        return pages[: -(-positions // self.spec.page_size)]

    def _forward(self, ids: list[int], batch: RowBatch) -> tuple[Tensor, Tensor | None]:
        """Hidden rows (T, H) after the final norm, and the tapped layers' (T, K * H)."""
        config = self._model.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_pages, v_pages = self._cache.layer(layer)
            write_kv(k_pages, v_pages, k, v, batch)
            return paged_attention(
                q, k_pages, v_pages, batch, scale=config.scale, window=config.windows[layer]
            )

        out = self._model.forward(torch.tensor(ids), batch.positions, attend, self._taps)
        return out.hidden, out.taps

    def _score(self, entry: PrefillEntry, hidden: Tensor) -> EntryResult:
        """What a chunk says of the prompt, given its hidden rows; the end of a scored request."""
        slot = self._slots[entry.slot]
        tokens = slot.ids[entry.first + 1 : min(entry.first + entry.count + 1, slot.scored)]
        scores = prompt_logprobs(
            lambda first, last: self._model.logits(hidden[first:last]),
            tokens,
            slot.prompt_logprobs,
        )
        over = entry.last and slot.only_scored
        return EntryResult(finish=Finish.LIMIT if over else Finish.NONE, prompt_logprobs=scores)

    def _first_token(self, entry: PrefillEntry, row: int) -> Verify:
        """The draw after the last row of a prompt: a tree that is only its root."""
        slot = self._slots[entry.slot]
        start = entry.first + entry.count - 1
        return Verify(slot.sampler, Tree([slot.ids[start]], [-1], [0]), start, row)

    def _draw(
        self, hidden: Tensor, requests: Sequence[Verify]
    ) -> Iterator[tuple[int, EntryResult, Walked]]:
        """Index, result and walk of every request; `hidden` has their rows in order."""
        for first, last in _slices(requests):
            begin, part = requests[first].first, requests[first:last]
            logits = self._model.logits(hidden[begin : part[-1].first + len(part[-1].tree)])
            for request in part:
                request.first -= begin
            for index, walked in enumerate(verify(logits, part)):
                request = part[index]
                result = EntryResult(
                    walked.tokens,
                    walked.finish,
                    logprobs(logits, request, walked),
                    len(request.tree),
                    walked.accepted,
                )
                request.first += begin
                yield first + index, result, walked

    def _commit_prefill(self, entries: Sequence[PrefillEntry], taps: Tensor | None) -> None:
        target: list[int] = []
        for entry in entries:
            end = entry.first + entry.count
            target += flat_slots(entry.pages, range(entry.first, end), self.spec.page_size)
            self._slots[entry.slot].kv_rows = end
        if taps is not None:
            self._write_features(taps, target)
            for entry in entries:
                self._slots[entry.slot].feature_rows = entry.first + entry.count

    def _commit_decode(
        self,
        entries: Sequence[DecodeEntry],
        requests: Sequence[Verify],
        walks: Sequence[Walked],
        taps: Tensor | None,
    ) -> None:
        """Moves every accepted path's KV together and keeps its features and tokens."""
        size = self.spec.page_size
        source: list[int] = []
        target: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for entry, request, walked in zip(entries, requests, walks, strict=True):
            start, path, count = entry.start, walked.path, len(walked.path)
            moved = [i for i in range(count) if path[i] != i]
            source += flat_slots(entry.pages, [start + path[i] for i in moved], size)
            target += flat_slots(entry.pages, [start + i for i in moved], size)
            rows += [request.first + node for node in path]
            places += flat_slots(entry.pages, range(start, start + count), size)
        self._cache.move(source, target)
        if taps is not None and rows:
            kept = taps if len(rows) == len(taps) else taps[torch.tensor(rows)]
            self._write_features(kept, places)
        for entry, walked in zip(entries, walks, strict=True):
            slot = self._slots[entry.slot]
            slot.sampler.commit(walked.tokens)
            slot.kv_rows = entry.start + len(walked.tokens)
            slot.feature_rows = slot.kv_rows if taps is not None else 0

    def _write_features(self, taps: Tensor, places: Sequence[int]) -> None:
        assert self._projector is not None
        self._cache.write_features(self._projector(taps), places)


def _ancestors(requests: Sequence[Verify]) -> list[int] | None:
    """What each row sees of its own entry; None when every tree is a chain."""
    if all(request.tree.is_chain for request in requests):
        return None
    return [bits for request in requests for bits in ancestor_bits(request.tree.parents)]


def _slices(requests: Sequence[Verify]) -> Iterator[tuple[int, int]]:
    """Runs of requests of at most LOGIT_ROWS rows together, one at least."""
    first = rows = 0
    for index, request in enumerate(requests):
        if rows and rows + len(request.tree) > LOGIT_ROWS:
            yield first, index
            first, rows = index, 0
        rows += len(request.tree)
    if rows:
        yield first, len(requests)
