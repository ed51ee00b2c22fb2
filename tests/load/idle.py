"""Whether the gateway has nothing left to do, from its /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

_PREFIX = "slipstream_"
_POLL_S = 0.05
_NAMES = {
    "slots": "slots",
    "free_slots": "free_slots",
    "pages": "pages",
    "free_pages": "free_pages",
    "running_slots": "running_slots",
    "queue_length": "queue_length",
    "cancelled": "scheduler_cancelled_total",
}


@dataclass(frozen=True, slots=True)
class State:
    """Slots, pages and queue as the gateway says; `cancelled`: requests given up so far."""

    slots: int
    free_slots: int
    pages: int
    free_pages: int
    running_slots: int
    queue_length: int
    cancelled: int

    @property
    def idle(self) -> bool:
        """Whether every slot and every page is free and nothing waits."""
        return (
            self.free_slots == self.slots
            and self.free_pages == self.pages
            and self.running_slots == self.queue_length == 0
        )

    def __str__(self) -> str:
        return (
            f"{self.free_slots} of {self.slots} slots and {self.free_pages} of {self.pages} pages"
            f" free, {self.queue_length} requests waiting"
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """How it ended: idle `seconds` after the first look, or not within the time given."""

    idle: bool
    seconds: float
    state: State


def parse(text: str) -> State:
    """The state in Prometheus's text format. Raises ValueError naming what is missing."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = float(value)
    missing = [name for name in _NAMES.values() if name not in found]
    if missing:
        raise ValueError(f"/metrics: no {_PREFIX}{missing[0]}")
    return State(**{field: int(found[name]) for field, name in _NAMES.items()})


def watch(
    read: Callable[[], State],
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Watched:
    """Looks again and again until the state is idle or the time is over."""
    began = clock()
    while True:
        state = read()
        passed = clock() - began
        if state.idle or passed >= within_s:
            return Watched(state.idle and passed <= within_s, passed, state)
        sleep(_POLL_S)


class Gateway:
    """The state of the gateway at `url`. Reading it raises httpx.HTTPError or ValueError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read(self) -> State:
        """The state now."""
        answer = httpx.get(f"{self._url}/metrics", trust_env=False, timeout=5.0)
        return parse(answer.raise_for_status().text)

    def watch(self, within_s: float) -> Watched:
        """Waits until it is idle, at most so long."""
        return watch(self.read, within_s)
