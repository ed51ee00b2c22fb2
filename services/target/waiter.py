"""A thread that waits for steps on their way, so that the engine's own never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from services.target.runner import Flight


class Waiter:
    """Waits for one flight after the other, in the order given.

    `said` is called on its thread after each; with the error that came instead, after which it
    waits for nothing more.
    """

    def __init__(self, said: Callable[[BaseException | None], None]) -> None:
        self._said = said
        self._given: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._through: dict[int, Flight] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="target-results", daemon=True)
        self._thread.start()

    def follow(self, flight: Flight) -> None:
        """The next one."""
        self._given.put(flight)

    def through(self, flight: Flight | None) -> bool:
        """Whether its results are there; says so once."""
        with self._changed:
            return flight is None or self._through.pop(id(flight), None) is not None

    def wait(self, flight: Flight) -> None:
        """Until its results are there. Raises what came instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or id(flight) in self._through)
            if self._through.pop(id(flight), None) is None and self._error is not None:
                raise self._error

    def stop(self) -> None:
        """Ends the thread."""
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (flight := self._given.get()) is not None:
            error: BaseException | None = None
            try:
                flight.wait()
            except BaseException as raised:
                error = raised
            with self._changed:
                self._error = error
                if error is None:
                    self._through[id(flight)] = flight
                self._changed.notify_all()
            self._said(error)
            if error is not None:
                return
