"""A cell as `slipstream up` runs one, on a thread of the benchmark's own process.

The launcher is that of the command, so that servers which die come back as they do there; only how
often they may is the benchmark's choice.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.cli.console import Console
from slipstream.cli.launcher import Launcher
from slipstream.cli.recovery import RestartPolicy
from slipstream.cli.up import PROGRAMS, Programs, base_url, launcher_for
from slipstream.cli.up_settings import UpSettings, check
from slipstream.settings import parse

SERVERS = ("target", "draft")

IDLE_PROGRAM = "import time; print('READY {}', flush=True); time.sleep(1e6)"
"""Stands for the gateway where the benchmark itself drives the servers."""

_WRONG = re.compile(r"\| \S+ (ERROR|CRITICAL)\b|Traceback \(most recent")
_SESSION = re.compile(r"session \d+ is connected over (\w+) from step")


@dataclass(frozen=True)
class Where:
    """Devices of target and draft."""

    target: str
    draft: str

    @property
    def cpu(self) -> bool:
        return "cpu" in (self.target, self.draft)

    @property
    def shared(self) -> bool:
        """Whether both are on one GPU, under MPS."""
        return not self.cpu and self.target == self.draft

    @property
    def options(self) -> list[str]:
        """For `slipstream up`."""
        found = ["--target-device", self.target, "--draft-device", self.draft]
        return [*found, "--threads", "1"] if self.cpu else found

    def __str__(self) -> str:
        if self.cpu:
            return "CPU"
        return "one GPU, MPS" if self.shared else "two GPUs"


class Cell:
    """A running cell; `start` and `close` are for the main thread.

    Attributes:
        log: the file with what all processes say.
        url: of the REST API.
    """

    def __init__(
        self,
        options: Sequence[str],
        log: Path,
        *,
        restarts: RestartPolicy | None = None,
        gateway: bool = True,
    ) -> None:
        """`gateway`: whether there is one; else the servers wait for whoever comes."""
        self.log = log
        self.url = ""
        self._options = ("--port", "0", "--grpc-port", "0", *options)
        self._restarts = restarts
        self._programs: Programs = PROGRAMS
        if not gateway:
            self._programs = replace(PROGRAMS, gateway=(sys.executable, "-c", IDLE_PROGRAM))
        self._launcher: Launcher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._wrong = ""
        self._thread = threading.Thread(target=self._run, name="cell", daemon=True)

    def start(self, timeout_s: float) -> Cell:
        """Returns once everything is ready. Raises RuntimeError with what the log ends with."""
        self._thread.start()
        if not self._up.wait(timeout_s) or self._wrong:
            why = self._wrong or f"not ready within {timeout_s:g} s"
            self.close()
            raise RuntimeError(f"the cell: {why}; its log ends with: {self.tail()}")
        return self

    def close(self) -> None:
        """Ends every process. Idempotent."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(60)
        if self._thread.is_alive() and self._launcher is not None:
            self._launcher.kill()
            self._thread.join(30)

    @property
    def alive(self) -> bool:
        """Whether the launcher has not given up."""
        return self._thread.is_alive() and not self._wrong

    @property
    def wrong(self) -> str:
        """Why the cell ended by itself; empty if it did not."""
        return self._wrong

    def pid(self, name: str) -> int:
        """Process id of the present life of `name`, 0 when there is none."""
        assert self._launcher is not None
        return self._launcher.pid(name) if self._launcher.running(name) else 0

    def address(self, name: str) -> str:
        """host:port of a server."""
        assert self._launcher is not None
        return str(self._launcher.ready(name)["grpc"])

    def kill(self, name: str, number: int) -> float:
        """Sends a signal to the present life of `name`; returns the monotonic time."""
        pid = self.pid(name)
        if not pid:
            raise RuntimeError(f"{name} does not run")
        os.kill(pid, number)
        return time.monotonic()

    def until_back(self, name: str, old: int, timeout_s: float) -> float | None:
        """Waits for a ready life of `name` other than `old`; seconds it took, None: too long."""
        began = time.monotonic()
        while time.monotonic() < began + timeout_s:
            if not self.alive:
                raise RuntimeError(f"the cell ended: {self._wrong}")
            if self.pid(name) not in (0, old):
                return time.monotonic() - began
            time.sleep(0.01)
        return None

    def lines(self, after: int = 0) -> list[str]:
        """The log's lines from line `after` on."""
        if not self.log.exists():
            return []
        return self.log.read_text(errors="replace").splitlines()[after:]

    def wrong_lines(self, after: int = 0) -> list[str]:
        """Lines that say an error."""
        return [line for line in self.lines(after) if _WRONG.search(line)]

    def transports(self, after: int = 0) -> list[str]:
        """How the sessions since line `after` were connected, as the draft says."""
        found = (_SESSION.search(line) for line in self.lines(after))
        return [match.group(1) for match in found if match]

    def tail(self, count: int = 8) -> str:
        return " / ".join(self.lines()[-count:])

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._wrong = self._wrong or f"{type(error).__name__}: {error}"
        finally:
            self._up.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        settings = check(parse(UpSettings, self._options))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as stream:
            console = Console(stream, colour=False)
            launcher = await launcher_for(settings, self._programs, console, self._restarts)
            self._launcher = launcher
            try:
                ready = await _first(launcher.start(), self._stop.wait())
                if not isinstance(ready, dict):
                    return
                self.url = base_url(ready) if "http" in ready else ""
                self._up.set()
                reason = await _first(launcher.failure(), self._stop.wait())
                if isinstance(reason, str):
                    self._wrong = reason
            finally:
                await launcher.stop(orderly=not self._wrong)


async def _first(work: Coroutine[Any, Any, Any], stop: Coroutine[Any, Any, Any]) -> Any:
    """What the first of the two gives; the other is cancelled."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextmanager
def stopped_like_an_error() -> Iterator[None]:
    """SIGTERM becomes SystemExit, so that `finally` ends the children."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
