"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Returns once `true` is; fails when it is not within the time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.002)
