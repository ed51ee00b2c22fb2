"""Messages of one session by step, from the loop that receives to the engine thread that waits."""

from __future__ import annotations

import threading
import time
from typing import Generic, Protocol, TypeVar


class Stepped(Protocol):
    """Anything that belongs to a step."""

    @property
    def step(self) -> int: ...


M = TypeVar("M", bound=Stepped)

CAPACITY = 4096
"""Messages that may wait; a peer that sends more without being asked breaks the protocol."""


class Mailbox(Generic[M]):
    """One writer, one waiting thread.

    After `close` the messages that had come are still handed out; then waits return None at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[int, M] = {}
        self._floor = 0
        self._reason: str | None = None

    @property
    def closed(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Why it was closed; empty while open."""
        return self._reason or ""

    def put(self, message: M) -> bool:
        """Keeps the first message of each step not yet passed; False when too many wait."""
        with self._changed:
            if self.closed or message.step < self._floor or message.step in self._messages:
                return True
            if len(self._messages) >= CAPACITY:
                return False
            self._messages[message.step] = message
            self._changed.notify_all()
            return True

    def close(self, reason: str) -> None:
        """Releases every wait; the first reason stands."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
                self._changed.notify_all()

    def drop_below(self, step: int) -> None:
        """The messages before that of `step` will not be asked for."""
        with self._changed:
            self._drop_below(step)

    def _drop_below(self, step: int) -> None:
        if step > self._floor:
            self._floor = step
            for old in [s for s in self._messages if s < step]:
                del self._messages[old]

    def take(self, step: int, timeout: float | None = None) -> M | None:
        """Waits for the message of `step` and drops those before it.

        Returns None when the mailbox closed without it; raises TimeoutError after `timeout` s.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._drop_below(step)
            while True:
                message = self._messages.pop(step, None)
                if message is not None:
                    self._floor = step + 1
                    return message
                if self.closed:
                    return None
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._changed.wait(left)
