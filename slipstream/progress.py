"""How far a long start-up is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with what is done and how much there is."""

WIDTH = 30
LINE_S = 5.0
"""Seconds between two lines in a log."""


def progress(
    what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """Shows `what` on `stream` (default: stderr) if that is a terminal, else in the log."""
    out = stream or sys.stderr
    began = last = clock()

    def show(done: int, total: int) -> None:
        nonlocal last
        now, end = clock(), done >= total
        if out.isatty():
            filled = WIDTH * done // max(total, 1)
            bar = "#" * filled + "." * (WIDTH - filled)
            out.write(f"\r{what} [{bar}] {done}/{total}, {now - began:.0f} s" + "\n" * end)
            out.flush()
        elif end or now - last >= LINE_S:
            last = now
            log.info("%s: %d of %d, %.0f s", what, done, total, now - began)

    return show
