"""Whether another process of this node is still there."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path


class Peer:
    """A process that mapped one of our segments, watched through a pidfd.

    A number alone could name another process: the peer may count in another PID namespace. So the
    process must show the segment among its mappings; else it is unknown and never seen to be gone.
    """

    def __init__(self, pid: int, segment: str, settle_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self._gone_at: float | None = None
        self._fd = _open(pid, segment)

    def gone(self) -> bool:
        """Whether it ended, at least `settle_s` ago: its GPU work may end a little later."""
        if self._gone_at is None:
            if self._fd is None or not _ended(self._fd):
                return False
            self._gone_at = time.monotonic()
        return time.monotonic() - self._gone_at >= self._settle_s

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _ended(fd: int) -> bool:
    """Whether the process of a pidfd did."""
    poll = select.poll()  # `select.select` takes no descriptor above 1,023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _open(pid: int, segment: str) -> int | None:
    if pid <= 0:
        return None
    try:
        fd = os.pidfd_open(pid)
    except (OSError, OverflowError):  # a peer may name any number
        return None
    mapped = False
    try:
        # As bytes: a path among the mappings may be of any encoding.
        mapped = segment.encode() in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:  # it has ended, or is another user's
        pass
    if mapped:
        return fd
    os.close(fd)
    return None
