"""One child process: read line by line, known to be ready, never outliving the launcher.

A child says that it is ready by one line on stdout, `READY {json}`. All else that it writes is log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

READY = "READY "
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_LINE = 1 << 20  # bytes; a longer line is shown in pieces
_DRAIN_S = 1.0  # how long the pipes of an exited child are still read

OnLine = Callable[[str], None]


def die_with_parent() -> Callable[[], None] | None:
    """A function to run between fork and exec, after which the launcher's death kills the child.

    Linux only; elsewhere None. The kernel watches the thread that forks: fork in the main thread.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # died before the line above
            os._exit(1)

    return arm


class Child:
    """A running child, in a group of its own: the terminal's Ctrl-C reaches the launcher only.

    Attributes:
        name: its name in the log.
        ready: the JSON object of the READY line; cancelled when the child exits without one.
        last_line: the last line it wrote that was not empty, for the reason of an exit; without
            the word "error: " that opens a message of ours.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: OnLine) -> None:
        self.name = name
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.last_line = ""
        self._process = process
        self._on_line = on_line
        self._stdout: deque[str] = deque(maxlen=100)
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._stdout_line)),
            asyncio.create_task(self._read(process.stderr, self._log)),
        ]

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], on_line: OnLine, env: Mapping[str, str] | None = None
    ) -> Child:
        """Starts `argv`. Raises OSError when it cannot be executed."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        return cls(name, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def stdout_lines(self) -> list[str]:
        """The last lines on stdout, oldest first."""
        return list(self._stdout)

    async def wait(self) -> int:
        """Waits for the exit and for the output before it; the status is negative for a signal."""
        status = await self._process.wait()
        self.signal(signal.SIGKILL)  # what the child itself had started, and left
        await asyncio.wait(self._readers, timeout=_DRAIN_S)
        for reader in self._readers:
            reader.cancel()
        if not self.ready.done():
            self.ready.cancel()
        return status

    def signal(self, number: int) -> None:
        """Sends `number` to the child's whole group; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self, stream: asyncio.StreamReader, take: OnLine) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                take(_decode(line))
        if rest:
            take(_decode(rest))

    def _stdout_line(self, line: str) -> None:
        self._stdout.append(line)
        if line.startswith(READY) and not self.ready.done():
            with contextlib.suppress(json.JSONDecodeError):
                said = json.loads(line.removeprefix(READY))
                if isinstance(said, dict):
                    self.ready.set_result(said)
                    return
        self._log(line)

    def _log(self, line: str) -> None:
        if line.strip():
            self.last_line = line.strip().removeprefix("error: ")
            self._on_line(line)


def _decode(line: bytes) -> str:
    """Text of a line; of a progress bar that rewrites itself, its last state."""
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]


def describe_status(status: int) -> str:
    """`status` of an exited process in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
