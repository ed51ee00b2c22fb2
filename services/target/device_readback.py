"""What the host reads of a finished step, through pinned buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.target.kv_cache import KVCache
from services.target.runner import EntryResult, Finish, Logprob
from slipstream.kernels.commit import gather_rows
from slipstream.kernels.draw import Draws
from slipstream.kernels.walk import (
    FINISH_LIMIT,
    FINISH_NONE,
    FINISH_OVER,
    FINISH_STOP,
    HEADER,
    Walks,
)
from slipstream.layers.staging import Readback, Upload

_FINISH = {
    FINISH_NONE: Finish.NONE,
    FINISH_STOP: Finish.STOP,
    FINISH_LIMIT: Finish.LIMIT,
    FINISH_OVER: Finish.NONE,  # it was said when the request ended
}


class StepReadback:
    """Tokens of a step, and logprobs where somebody wants them."""

    def __init__(self, walks: Walks, draws: Draws, device: torch.device) -> None:
        self._walks, self._draws = walks, draws

        def buffer(like: torch.Tensor) -> Readback:
            return Readback(tuple(like.shape), like.dtype, device)

        self._result, self._path = buffer(walks.result), buffer(walks.path)
        self._logprobs, self._top_ids = buffer(draws.logprobs), buffer(draws.top_ids)
        self._top_values = buffer(draws.top_values)

    def read(self, rows: Sequence[int], wanted: Sequence[int | None]) -> list[EntryResult]:
        """Waits for the step; `rows` and `wanted` logprobs are those of its entries."""
        count, total = len(rows), sum(rows)
        self._result.start(self._walks.result[:count])
        logprobs = any(want is not None for want in wanted)
        if logprobs:
            self._path.start(self._walks.path[:count])
            self._logprobs.start(self._draws.logprobs[:total])
            self._top_ids.start(self._draws.top_ids[:total])
            self._top_values.start(self._draws.top_values[:total])
        done = self._result.wait()[:count]
        results: list[EntryResult] = []
        first = 0
        for index, want in enumerate(wanted):
            emitted, finish, accepted, used = done[index, :HEADER].tolist()
            tokens = done[index, HEADER : HEADER + emitted].tolist()
            found = self._read_logprobs(index, first, emitted, want) if want is not None else []
            results.append(EntryResult(tokens, _FINISH[finish], found, used, accepted))
            first += rows[index]
        return results

    def _read_logprobs(self, index: int, first: int, emitted: int, want: int) -> list[Logprob]:
        """Of the tokens of entry `index`, whose rows begin at `first`: one per row of its path."""
        own, ids, values = self._logprobs.wait(), self._top_ids.wait(), self._top_values.wait()
        found = []
        for node in self._path.wait()[index, :emitted].tolist():
            row = first + node
            best = zip(ids[row, :want].tolist(), values[row, :want].tolist(), strict=True)
            found.append(Logprob(float(own[row]), [(v, p) for v, p in best if v >= 0]))
        return found


class ScoreReadback:
    """Log-probabilities of a prefill's rows."""

    def __init__(self, scores: Draws, device: torch.device) -> None:
        self._sources = (scores.logprobs, scores.top_ids, scores.top_values)
        self._copies = [
            Readback(tuple(source.shape), source.dtype, device) for source in self._sources
        ]

    def start(self, rows: int) -> None:
        """Starts the copy of the first `rows` rows."""
        for source, copy in zip(self._sources, self._copies, strict=True):
            copy.start(source[:rows])

    def read(self, first: int, count: int, want: int) -> list[Logprob]:
        """Of `count` rows from `first` on, whose slot wants `want` best tokens."""
        own, ids, values = (copy.wait()[first : first + count] for copy in self._copies)
        best = zip(ids[:, :want].tolist(), values[:, :want].tolist(), strict=True)
        tops = [[(v, p) for v, p in zip(*row, strict=True) if v >= 0] for row in best]
        return [Logprob(*row) for row in zip(own.tolist(), tops, strict=True)]


class FeatureReadback:
    """Feature rows of any pages as bytes."""

    def __init__(self, cache: KVCache, most: int, device: torch.device) -> None:
        """`most` rows are read at once; more take several rounds."""
        self._cache, self._most = cache, most
        width, dtype = cache.features.shape[1], cache.features.dtype
        self._index = Upload((most,), torch.int32, device)
        self._rows = torch.zeros(most, width, dtype=dtype, device=device)
        self._out = Readback((most, width), dtype, device)

    def read(self, index: Sequence[int]) -> memoryview:
        """The rows of flat slots `index`, raw; valid until the next call."""
        if len(index) <= self._most:
            return self._part(index)
        # Each part is copied before the ring comes round to its buffer again.
        firsts = range(0, len(index), self._most)
        parts = [bytes(self._part(index[first : first + self._most])) for first in firsts]
        return memoryview(b"".join(parts))

    def _part(self, index: Sequence[int]) -> memoryview:
        count = len(index)
        self._index.host()[:count] = index
        gather_rows(self._cache.features, self._index.send(count), count, self._rows)
        self._out.start(self._rows[:count])
        raw = np.ascontiguousarray(self._out.wait()[:count])
        return raw.view(np.uint8).reshape(-1).data
