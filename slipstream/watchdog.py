"""Ends a process whose engine stands still, so that whoever keeps it starts it again.

For a kernel that never ends, a driver that does not return, a lock that nobody gives back: what no
peer can see while this process still answers its gRPC.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

STATUS = 70
"""Exit status of a process that was ended."""

_TICK_S = 1.0

Places = Mapping[str, str]
"""Who is at work, and at what: each value is another one once there was progress."""


class Watchdog:
    """A thread that looks once a second.

    Args:
        places: who is at work now; whoever waits for work is not named.
        limit_s: how long one may be at the same; 0: for any time, and nobody looks.
        end: called with the reason, once; ends the process without any of its clean-up, which could
            wait for the same thing.
    """

    def __init__(
        self,
        places: Callable[[], Places],
        limit_s: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._places = places
        self._limit_s = limit_s
        self._end = end or _end
        self._tick_s = min(_TICK_S, limit_s / 4)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins to look; not for engines that load or warm up."""
        if self._limit_s:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Looks no more."""
        self._stopped.set()

    def _watch(self) -> None:
        stood: dict[str, tuple[str, float]] = {}
        before = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            # If this process stood still as a whole, its engine could not go on either.
            passed, before = min(now - before, 2 * self._tick_s), now
            last, stood = stood, {}
            for who, at in dict(self._places()).items():
                was, seconds = last.get(who, ("", 0.0))
                stood[who] = (at, seconds + passed if was == at else 0.0)
                if stood[who][1] > self._limit_s:
                    self._end(f"{who}: at {at} for more than {self._limit_s:g} s")
                    return


def _end(reason: str) -> None:
    log.critical("this process stands still and is ended: %s", reason)
    faulthandler.dump_traceback()
    os._exit(STATUS)
