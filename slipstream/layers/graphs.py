"""CUDA graphs: work that is launched once, recorded, and replayed with one call from then on.

Nobody else knows that there are graphs: what `capture` returns is called like the function that it
was given. Without graphs (on a CPU, or switched off) it is that function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

from slipstream.progress import Progress

Work = Callable[[], None]

K = TypeVar("K", bound=Hashable)


class Graphs:
    """Captures work of one stream; all graphs share one pool of memory.

    Sharing is sound because replays run one after the other on `stream` and nothing passes from one
    graph to the next except through buffers that were allocated outside of them.

    Attributes:
        stream: what `on_stream` makes current; None on a CPU.
        results: a stream for copies to the host, which then hold nothing up; None on a CPU.
        captured: graphs made so far.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.results = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.captured = 0
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes `stream` current: for captures, replays and everything between them."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def off_stream(self) -> Iterator[None]:
        """Makes `results` current; what is put there comes after what `stream` has so far.

        What is put on `stream` later does not wait for it: see `rejoin`.
        """
        if self.stream is None or self.results is None:
            yield
            return
        self.results.wait_stream(self.stream)
        with torch.cuda.device(self.device), torch.cuda.stream(self.results):
            yield

    def rejoin(self) -> None:
        """What is put on `stream` from now on comes after what `results` has so far."""
        if self.stream is not None and self.results is not None:
            self.stream.wait_stream(self.results)

    def capture(self, work: Work) -> Work:
        """Runs `work` once, which loads and compiles all it needs, then records it.

        On a CPU there is nothing to load, and `work` is what is returned.

        `work` must read and write fixed addresses, and must not look at what it computes.
        """
        if self.stream is None:
            return work
        with self.on_stream():
            work()
            if not self.enabled:
                return work
            assert self.stream is not None
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Of this thread's calls alone: another's look at an event would end a capture for all.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                work()
            self.captured += 1
            graph.replay()  # the first replay uploads it
            self.stream.synchronize()
        return graph.replay

    def record(self, pieces: Mapping[K, Work], progress: Progress) -> dict[K, Work]:
        """Captures every piece of work, in order; `progress` is told of each."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)  # the buffers were filled on another stream
        recorded: dict[K, Work] = {}
        for key, work in pieces.items():
            recorded[key] = self.capture(work)
            progress(len(recorded), len(pieces))
        return recorded


def buckets(most: int, steps: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Sizes that work is padded to: powers of two and their half-way points from 32 on, and `most`.

    `steps` are sizes that must be among them; larger ones than `most` are left out.
    """
    sizes = {most, *(step for step in steps if step < most)}
    size = 1
    while size < most:
        sizes.add(size)
        if size >= 32 and size * 3 // 2 < most:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes))


def bucket_of(sizes: tuple[int, ...], count: int) -> int:
    """The smallest of `sizes` (ascending) that holds `count`. Raises ValueError when none does."""
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} is more than the largest bucket, {sizes[-1]}")
