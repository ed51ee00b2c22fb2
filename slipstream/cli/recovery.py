"""When a server that died comes back, and whether the other one and MPS begin again with it."""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.cli.process import Child, describe_status

_CUDA_ERROR = re.compile(r"\bCUDA error\b|\bCUDA_ERROR_|\bcudaError")


class Exit(NamedTuple):
    """How one life of a process ended.

    Attributes:
        status: its exit status, negative for a signal.
        cuda_error: whether it had named an error of CUDA.
    """

    child: Child
    status: int
    cuda_error: bool

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def was_ready(self) -> bool:
        return self.child.ready.done() and not self.child.ready.cancelled()

    @property
    def faulted(self) -> bool:
        """Whether it ended by an error of its GPU, as far as can be seen: nobody killed it."""
        return self.cuda_error and self.status not in (-signal.SIGKILL, -signal.SIGTERM)

    def __str__(self) -> str:
        said = describe_status(self.status)
        if not self.was_ready and self.child.last_line:
            said = f"{said} before it was ready: {self.child.last_line}"
        return f"{self.name} {said}"


def names_cuda_error(line: str) -> bool:
    """Whether a line of a log names an error of CUDA."""
    return _CUDA_ERROR.search(line) is not None


def ends_both(exit: Exit) -> bool:
    """Whether the death of one MPS client is to be taken for the other's as well.

    A fault of the GPU ends every client, but each learns of it only at its next call; and the MPS
    server takes no new client until all old ones have left it. So a draft that came back and could
    not start says the same. Without its target a draft has nothing that would be worth keeping.
    """
    return exit.name == "target" or exit.faulted or not exit.was_ready


@dataclass(slots=True)
class RestartPolicy:
    """At most `most` restarts within any `window_s` seconds, each pause twice the one before.

    The window is long enough for starts that take a minute each. Where one server's death brings
    the other's within `follow_s` seconds, as a kill under MPS may, the two count as one.

    Invariant: `_restarts` holds the times of the restarts in the window, oldest first.
    """

    most: int = 5
    window_s: float = 600.0
    first_pause_s: float = 0.25
    longest_pause_s: float = 5.0
    follow_s: float = 5.0
    _first: str | None = None  # whose death the last restart was for; None: another's counted too
    _restarts: deque[float] = field(default_factory=deque)

    def pause(self, now: float, name: str = "") -> float | None:
        """Grants `name` a restart: seconds to wait before it, or None when there were too many."""
        if self._first not in (None, name) and now - self._restarts[-1] <= self.follow_s:
            self._first = None
            return self.first_pause_s
        while self._restarts and now - self._restarts[0] > self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.most:
            return None
        pause = min(self.first_pause_s * 2.0 ** len(self._restarts), self.longest_pause_s)
        self._restarts.append(now)
        self._first = name
        return pause
