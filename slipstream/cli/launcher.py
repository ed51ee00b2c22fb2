"""Three processes as one: started in order, watched, the draft restarted, all stopped together.

The target and the gateway must live; when one exits, the cell ends with the reason. The draft may
die: plans go on without it, it is started again on the same port after a growing pause, and the
gateway attaches it again. A draft that exits by itself before it was ever ready has a wrong flag or
checkpoint, which a restart would not cure.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.cli.console import Console
from slipstream.cli.process import Child, describe_status


class LaunchFailed(Exception):
    """The cell ended; the message says which process did what."""


@dataclass(frozen=True, slots=True)
class CellCommands:
    """Command lines of a cell's processes; `draft` is None when the cell has none."""

    target: Sequence[str]
    draft: Sequence[str] | None
    gateway: Sequence[str]

    def items(self) -> list[tuple[str, Sequence[str]]]:
        named = [("target", self.target), ("draft", self.draft), ("gateway", self.gateway)]
        return [(name, argv) for name, argv in named if argv is not None]


@dataclass(slots=True)
class RestartPolicy:
    """At most `most` restarts within any `window_s` seconds, each pause twice the one before.

    Invariant: `_restarts` holds the times of the restarts in the window, oldest first.
    """

    most: int = 5
    window_s: float = 60.0
    first_pause_s: float = 0.25
    longest_pause_s: float = 5.0
    _restarts: deque[float] = field(default_factory=deque)

    def pause(self, now: float) -> float | None:
        """Grants a restart: seconds to wait before it, or None when there were too many."""
        while self._restarts and now - self._restarts[0] > self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.most:
            return None
        pause = min(self.first_pause_s * 2.0 ** len(self._restarts), self.longest_pause_s)
        self._restarts.append(now)
        return pause


class Launcher:
    """Runs a cell: `start`, then `failure` or a signal, then `stop`; or `async with` around it.

    With `in_turn` the target starts when the draft is ready: on processors that both use, neither
    measures its steps while the other loads. The draft is the one that can refuse the pair or the
    tree at once.

    Attributes:
        gateway: the gateway's READY object, after `start`.
    """

    def __init__(
        self,
        commands: CellCommands,
        console: Console,
        *,
        restarts: RestartPolicy | None = None,
        in_turn: bool = False,
        grace_s: float = 10.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.gateway: dict[str, Any] = {}
        self._commands = dict(commands.items())
        self._console = console
        self._restarts = restarts or RestartPolicy()
        self._in_turn = in_turn
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._children: dict[str, Child] = {}
        self._ready: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[str] | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        """Starts draft and target, then the gateway; returns the gateway's READY object.

        Raises LaunchFailed when a process exits or is not ready in time; `stop` is still due then.
        """
        self._failure = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + self._start_timeout_s
        servers = [name for name in ("draft", "target") if name in self._commands]
        for name in servers:
            self._launch(name)
            if self._in_turn:
                await self._until_ready(name, deadline)
        for name in servers:
            await self._until_ready(name, deadline)
        self._launch("gateway")
        self.gateway = await self._until_ready("gateway", deadline)
        return self.gateway

    async def failure(self) -> str:
        """Waits until the cell cannot go on and says why."""
        assert self._failure is not None
        return await asyncio.shield(self._failure)

    async def stop(self, *, orderly: bool = True) -> None:
        """Ends every process: SIGTERM, and SIGKILL to what is still there after the grace.

        Orderly, the gateway goes first, so that running requests can finish.
        """
        self._stopping.set()
        servers = [name for name in self._tasks if name != "gateway"]
        waves = [["gateway"], servers] if orderly else [list(self._tasks)]
        for wave in waves:
            await self._end([name for name in wave if name in self._tasks])

    def kill(self) -> None:
        """SIGKILL to every process, for who does not want to wait; `stop` collects them."""
        self._stopping.set()
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    async def __aenter__(self) -> Launcher:
        try:
            await self.start()
        except BaseException:
            await self.stop(orderly=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def pid(self, name: str) -> int:
        """Process id of `name` now."""
        return self._children[name].pid

    def _launch(self, name: str) -> None:
        self._ready[name] = asyncio.get_running_loop().create_future()
        self._tasks[name] = asyncio.create_task(self._supervise(name))
        self._tasks[name].add_done_callback(self._report_crash)

    async def _until_ready(self, name: str, deadline: float) -> dict[str, Any]:
        assert self._failure is not None
        ready = self._ready[name]
        await asyncio.wait(
            (ready, self._failure),
            timeout=max(deadline - time.monotonic(), 0),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._failure.done():
            raise LaunchFailed(self._failure.result())
        if not ready.done():
            raise LaunchFailed(f"{name} was not ready within {self._start_timeout_s:g} s")
        return ready.result()

    async def _supervise(self, name: str) -> None:
        """One process's life, and for the draft its next ones."""
        while not self._stopping.is_set():
            try:
                child = await Child.start(
                    name, self._commands[name], lambda line: self._console.line(name, line)
                )
            except OSError as error:
                self._fail(f"{name} cannot be started: {error}")
                return
            self._children[name] = child
            if self._stopping.is_set():  # `stop` came too early to see this process
                child.signal(signal.SIGTERM)
            child.ready.add_done_callback(lambda ready: self._mark_ready(name, ready))
            status = await child.wait()
            if self._stopping.is_set():
                return
            pause = self._after_exit(name, child, status)
            if pause is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _mark_ready(self, name: str, ready: asyncio.Future[dict[str, Any]]) -> None:
        if ready.cancelled():
            return
        if self._ready[name].done():
            self._console.say(f"{name} is back")
        else:
            self._ready[name].set_result(ready.result())
            self._console.say(f"{name} is ready ({ready.result().get('grpc')})")

    def _after_exit(self, name: str, child: Child, status: int) -> float | None:
        """The pause before the next start, or None after a failure was set."""
        said = describe_status(status)
        was_ready = self._ready[name].done()
        if not was_ready and child.last_line:
            said = f"{said} before it was ready: {child.last_line}"
        if name != "draft" or (status > 0 and not was_ready):
            self._fail(f"{name} {said}")
            return None
        pause = self._restarts.pause(time.monotonic())
        if pause is None:
            self._fail(
                f"draft died more than {self._restarts.most} times within "
                f"{self._restarts.window_s:g} s; the last time it {said}"
            )
            return None
        self._console.say(f"draft {said}; starting it again in {pause:g} s")
        return pause

    def _fail(self, reason: str) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_result(reason)

    def _report_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"the launcher itself failed: {task.exception()!r}")

    async def _end(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._children:
                self._children[name].signal(signal.SIGTERM)
        tasks = {self._tasks[name]: name for name in names}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._grace_s)
        for task in late:
            self._console.say(f"{tasks[task]} did not end within {self._grace_s:g} s: killed")
            self._children[tasks[task]].signal(signal.SIGKILL)
        if late:
            await asyncio.wait(late)
