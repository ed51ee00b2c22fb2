"""What devices have finished, told by a thread: the engine's never waits for a device."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

log = logging.getLogger(__name__)

Words = npt.NDArray[np.int64]


class Mark:
    """A point of a stream that can be waited for; on a CPU it is passed at once."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._event = torch.cuda.Event(blocking=True) if cuda else None  # type: ignore[no-untyped-call]

    def put(self) -> None:
        """On the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Sleeps until the stream is there."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What comes on `stream` from now on waits for it."""
        if self._event is not None:
            stream.wait_event(self._event)


class Completions:
    """Actions that run on a thread of their own, in order, each once its mark is passed.

    Args:
        failed: told, on the thread, of what raised; no action runs afterwards.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._broken = False
        self._queue: queue.SimpleQueue[tuple[Mark | None, Callable[[], None]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draft-results", daemon=True)
        self._thread.start()

    def after(self, mark: Mark | None, action: Callable[[], None], always: bool = False) -> None:
        """`always`: also when something has failed, without waiting for the mark."""

        def guarded() -> None:
            if always or not self._broken:
                action()

        self._queue.put((mark, guarded))

    def drain(self, timeout: float) -> bool:
        """Waits for everything given so far; False when it took too long or something failed."""
        passed = threading.Event()
        self.after(None, passed.set, always=True)
        return passed.wait(timeout) and not self._broken

    def close(self) -> None:
        """Ends the thread once everything is done."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            mark, action = item
            try:
                if mark is not None and not self._broken:
                    mark.wait()
                action()
            except BaseException as error:
                log.exception("a draft step failed on its device")
                self._broken = True
                self._failed(error)


class ResultRing:
    """Copies of device results beside the stream that made them, and plans whose ends are awaited.

    Both have `count` places; whoever takes one that is in use sleeps until it is free, which does
    not happen while steps pass.

    Args:
        shape: of one result, int64.
        stream: for the copies; None on a CPU.
    """

    def __init__(
        self,
        count: int,
        shape: tuple[int, ...],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        cuda = device.type == "cuda"
        self._stream = stream
        self._copies = [
            torch.zeros(shape, dtype=torch.int64, pin_memory=cuda) for _ in range(count)
        ]
        self._ready, self._copied, self._ends = (
            [Mark(device) for _ in range(count)] for _ in range(3)
        )
        self._free = threading.Semaphore(count)
        self._plans = threading.Semaphore(count)
        self._next = self._next_end = 0
        for mark in (*self._ready, *self._copied, *self._ends):
            mark.put()  # it is made now, while nothing waits

    def begin_copy(self) -> None:
        """Before a result is made: the one that lies in its place was copied."""
        self._free.acquire()

    def copy(
        self, results: Tensor, completions: Completions, take: Callable[[Words], None]
    ) -> None:
        """Copies a result of the current stream; `take` gets the host's, to be kept no longer."""
        at, self._next = self._next, (self._next + 1) % len(self._copies)
        host, copied = self._copies[at], self._copied[at]
        self._ready[at].put()
        with self._on_stream(self._ready[at]):
            host.copy_(results, non_blocking=True)
            copied.put()
        completions.after(copied, lambda: take(host.numpy()))
        completions.after(None, self._free.release, always=True)

    def begin_plan(self, timeout: float | None = None) -> bool:
        """Sleeps while as many plans are on the stream as there are places; False: too long."""
        return self._plans.acquire(timeout=timeout)

    def end_plan(self, completions: Completions, passed: Callable[[], None]) -> None:
        """`passed` is called once the current stream is through with what is on it."""
        at, self._next_end = self._next_end, (self._next_end + 1) % len(self._ends)
        self._ends[at].put()
        completions.after(self._ends[at], passed)
        completions.after(None, self._plans.release, always=True)

    @contextmanager
    def _on_stream(self, ready: Mark) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        ready.hold(self._stream)
        with torch.cuda.stream(self._stream):
            yield
