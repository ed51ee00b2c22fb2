"""What the host reads of a finished step, through pinned buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from services.target.kv_cache import KVCache
from services.target.runner import DecodeEntry, EntryResult, Finish, Logprob
from slipstream.handoff.layout import RING
from slipstream.kernels.commit import gather_rows
from slipstream.kernels.draw import Draws
from slipstream.kernels.handoff import DONE
from slipstream.kernels.intake import TreeRows
from slipstream.kernels.walk import (
    FINISH_LIMIT,
    FINISH_NONE,
    FINISH_OVER,
    FINISH_STOP,
    HEADER,
    Walks,
)
from slipstream.layers.staging import Copied, Host, Readback, Upload

_FINISH = {
    FINISH_NONE: Finish.NONE,
    FINISH_STOP: Finish.STOP,
    FINISH_LIMIT: Finish.LIMIT,
    FINISH_OVER: Finish.NONE,  # it was said when the request ended
}


class StepCopy:
    """The tokens of a step on their way to the host, and logprobs where somebody wants them."""

    def __init__(
        self,
        rows: Sequence[int],
        wanted: Sequence[int | None],
        result: Copied,
        logprobs: Sequence[Copied],
    ) -> None:
        """`rows` and `wanted` logprobs of the step's entries; `logprobs`: of path, own, ids and
        values; or nothing."""
        self._rows, self._wanted = rows, wanted
        self._result, self._logprobs = result, logprobs
        self._found: list[EntryResult] | None = None

    def wait(self) -> None:
        """Until all of it is there. Any thread."""
        if self._found is None:
            self._result.read()
            for copy in self._logprobs:
                copy.read()

    def read(self) -> list[EntryResult]:
        """One result for each entry; waits."""
        if self._found is None:
            self._found = self._read()
        return self._found

    def _read(self) -> list[EntryResult]:
        done = self._result.read()[: len(self._rows)]
        tables = [copy.read() for copy in self._logprobs]
        results: list[EntryResult] = []
        first = 0
        for index, want in enumerate(self._wanted):
            emitted, finish, accepted, used = done[index, :HEADER].tolist()
            tokens = done[index, HEADER : HEADER + emitted].tolist()
            found: list[Logprob] = []
            if want is not None:
                path, own, ids, values = tables
                rows = [first + node for node in path[index, :emitted].tolist()]
                found = [_logprob(own, ids, values, row, want) for row in rows]
            results.append(EntryResult(tokens, _FINISH[finish], found, used, accepted))
            first += self._rows[index]
        return results


class StepReadback:
    """Copies of what steps committed. Made on a stream of their own: they hold nothing up."""

    def __init__(self, walks: Walks, draws: Draws, device: torch.device) -> None:
        self._walks, self._draws = walks, draws

        def buffer(like: torch.Tensor) -> Readback:
            return Readback(tuple(like.shape), like.dtype, device, RING)

        self._result, self._path = buffer(walks.result), buffer(walks.path)
        self._logprobs, self._top_ids = buffer(draws.logprobs), buffer(draws.top_ids)
        self._top_values = buffer(draws.top_values)
        self._started: deque[StepCopy] = deque()

    def start(self, rows: Sequence[int], wanted: Sequence[int | None]) -> StepCopy:
        """Starts them on the current stream.

        A step of many parts may start more than there are buffers for: the oldest copy is then
        waited for and read before its buffer is written again.
        """
        while len(self._started) >= RING:
            self._started.popleft().read()
        count, total = len(rows), sum(rows)
        result = self._result.start(self._walks.result[:count])
        logprobs: Sequence[Copied] = ()
        if any(want is not None for want in wanted):
            logprobs = (
                self._path.start(self._walks.path[:count]),
                self._logprobs.start(self._draws.logprobs[:total]),
                self._top_ids.start(self._draws.top_ids[:total]),
                self._top_values.start(self._draws.top_values[:total]),
            )
        copy = StepCopy(rows, wanted, result, logprobs)
        self._started.append(copy)
        return copy


def _logprob(own: Host, ids: Host, values: Host, row: int, want: int) -> Logprob:
    best = zip(ids[row, :want].tolist(), values[row, :want].tolist(), strict=True)
    return Logprob(float(own[row]), [(v, p) for v, p in best if v >= 0])


class ScoreCopy:
    """Log-probabilities of a prefill's rows on their way to the host."""

    def __init__(self, copies: Sequence[Copied]) -> None:
        self._copies = copies

    def wait(self) -> None:
        """Until all of it is there."""
        for copy in self._copies:
            copy.read()

    def read(self, first: int, count: int, want: int) -> list[Logprob]:
        """Of `count` rows from `first` on, whose slot wants `want` best tokens; waits."""
        own, ids, values = (copy.read() for copy in self._copies)
        return [_logprob(own, ids, values, row, want) for row in range(first, first + count)]


class ScoreReadback:
    """Copies of `ScoreCopy`."""

    def __init__(self, scores: Draws, device: torch.device) -> None:
        self._sources = (scores.logprobs, scores.top_ids, scores.top_values)
        self._copies = [
            Readback(tuple(source.shape), source.dtype, device, RING) for source in self._sources
        ]

    def start(self, rows: int) -> ScoreCopy:
        """Starts those of the first `rows` rows on the current stream."""
        pairs = zip(self._sources, self._copies, strict=True)
        return ScoreCopy([copy.start(source[:rows]) for source, copy in pairs])


class StampReadback:
    """Copies of a step's stamps."""

    def __init__(self, stamps: torch.Tensor, device: torch.device) -> None:
        self._source = stamps[DONE:]
        self._copies = Readback(tuple(self._source.shape), stamps.dtype, device, RING)

    def start(self) -> Copied:
        """Starts one on the current stream."""
        return self._copies.start(self._source)


class ProposalReadback:
    """The repaired trees of a step, for who must know them before its tokens are drawn."""

    def __init__(self, trees: TreeRows, device: torch.device) -> None:
        def buffer(like: torch.Tensor) -> Readback:
            return Readback(tuple(like.shape), like.dtype, device)

        self._trees = trees
        self._used, self._ids = buffer(trees.used), buffer(trees.ids)
        self._parents = buffer(trees.parents)
        self._started: Sequence[Copied] = ()

    def start(self, rows: int, entries: int) -> None:
        """Starts the copies on the current stream."""
        self._started = (
            self._used.start(self._trees.used[:entries]),
            self._ids.start(self._trees.ids[:rows]),
            self._parents.start(self._trees.parents[:rows]),
        )

    def read(self, entries: Sequence[DecodeEntry]) -> Sequence[DecodeEntry]:
        """The entries, those that are linked with what was proposed; waits if there are any."""
        if not any(entry.linked for entry in entries):
            return entries
        used, ids, parents = (copy.read() for copy in self._started)
        found, row = list[DecodeEntry](), 0
        for entry, count in zip(entries, used[: len(entries)].tolist(), strict=True):
            if entry.linked:
                span = slice(row, row + count)
                proposed = ids[span].tolist(), parents[span].tolist()
                found.append(replace(entry, proposed=proposed))
            else:
                found.append(entry)
            row += entry.rows
        return found


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
        copied = self._out.start(self._rows[:count])
        raw = np.ascontiguousarray(copied.read()[:count])
        return raw.view(np.uint8).reshape(-1).data
