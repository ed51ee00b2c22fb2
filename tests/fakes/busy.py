"""Time that passes as in torch's kernels: a core works, the interpreter lock is free."""

from __future__ import annotations

import hashlib
import time

_CHUNK = bytes(32 << 10)  # some 20 us of SHA-256 with the lock released


def busy(seconds: float) -> None:
    """Works for `seconds` without holding the interpreter lock."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        hashlib.sha256(_CHUNK)
