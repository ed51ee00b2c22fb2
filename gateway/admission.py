"""Who waits, in order of first arrival, and when free slots are refilled."""

from __future__ import annotations

import heapq

from gateway.request import Request


class WaitingQueue:
    """Requests without a slot, oldest arrival first; a preempted one returns to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Adds a request in the order of its arrival."""
        heapq.heappush(self._heap, (request.id, request))
        self._count += 1

    def head(self) -> Request | None:
        """The oldest waiting request."""
        while self._heap and self._heap[0][1].ended:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Takes the head away."""
        request = self.head()
        assert request is not None, "pop of an empty queue"
        heapq.heappop(self._heap)
        self._count -= 1
        return request

    def forget(self) -> None:
        """A waiting request ended (its `ended` is set): it no longer counts."""
        self._count -= 1

    def clear(self) -> list[Request]:
        """Takes everything away, oldest first."""
        requests = [request for _, request in sorted(self._heap, key=lambda item: item[0])]
        self._heap.clear()
        self._count = 0
        return [request for request in requests if not request.ended]


def free_slots_wanted(slots: int) -> int:
    """Free slots a refill waits for when all are in use: 2/3/4/4 for 8/16/32/64."""
    for least, wanted in ((32, 4), (16, 3), (8, 2)):
        if slots >= least:
            return wanted
    return 1


class Refill:
    """The bounded refill rule: prefill interrupts decoding for several requests at a time.

    A prefill that serves one slot costs the others as much as one that serves four, so at full load
    a refill waits until a few slots are free, but never longer than `wait_s` from the moment that
    the queue's head had a slot to take.
    """

    def __init__(self, slots: int, min_free_slots: int, wait_s: float) -> None:
        self._wanted = min(min_free_slots or free_slots_wanted(slots), slots)
        self._wait_s = wait_s
        self.deadline: float | None = None
        """When the wait ends; None while nothing waits for it."""

    def open(self, free: int, now: float) -> bool:
        """Whether a request that waits may take one of `free` slots."""
        if free == 0:
            self.deadline = None
            return False
        if free >= self._wanted:
            return True
        if self.deadline is None:
            self.deadline = now + self._wait_s
        return now >= self.deadline

    def done(self) -> None:
        """Nothing waits for a slot any longer."""
        self.deadline = None
