"""Three processes as one: started in order, watched, servers restarted, all stopped together.

The gateway must live: it owns the requests. A server may die. Without its draft plans go on, and
the gateway attaches the next one; without its target requests wait in the gateway for the next one.
Each comes back on its own port after a growing pause, and too many deaths end the cell. A process
that exits by itself before it was ever ready has a wrong flag or checkpoint, which a restart would
not cure.

Two servers that share a GPU through MPS share its faults: there a target that died, or a draft that
did so by an error of CUDA, takes the other server and the MPS daemon along. A draft that was killed
comes back alone, as long as target and MPS are well.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.cli.console import Console
from slipstream.cli.mps import MpsUnavailable, PrivateMps
from slipstream.cli.process import Child
from slipstream.cli.recovery import Exit, RestartPolicy, ends_both, names_cuda_error

SERVERS = ("draft", "target")

_POLL_S = 0.1
_KILLED_S = 60.0  # from SIGKILL until a process that a driver holds is given up


class LaunchFailed(Exception):
    """The cell ended; the message says which process did what."""


@dataclass(frozen=True, slots=True)
class CellCommands:
    """Command lines of a cell's processes; `draft` is None when the cell has none.

    Attributes:
        server_environment: variables that both servers get beside those of the launcher.
    """

    target: Sequence[str]
    draft: Sequence[str] | None
    gateway: Sequence[str]
    server_environment: Mapping[str, str] = field(default_factory=dict)

    def items(self) -> list[tuple[str, Sequence[str]]]:
        named = [("target", self.target), ("draft", self.draft), ("gateway", self.gateway)]
        return [(name, argv) for name, argv in named if argv is not None]


class Launcher:
    """Runs a cell: `start`, then `failure` or a signal, then `stop`; or `async with` around it.

    With `in_turn` the target starts when the draft is ready: on processors that both use, neither
    measures its steps while the other loads. The draft is the one that can refuse the pair or the
    tree at once. When both come back the target is first: requests wait for it.

    Args:
        restarted: the servers that come back; the death of another process ends the cell.
        mps: the daemon of the GPU that both servers share.
        needs_mps: whether the cell ends where that cannot be started; else it goes on without.

    Attributes:
        gateway: the gateway's READY object, after `start`.
    """

    def __init__(
        self,
        commands: CellCommands,
        console: Console,
        *,
        restarts: RestartPolicy | None = None,
        restarted: Collection[str] = SERVERS,
        mps: PrivateMps | None = None,
        needs_mps: bool = False,
        in_turn: bool = False,
        grace_s: float = 10.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.gateway: dict[str, Any] = {}
        self._commands = dict(commands.items())
        self._environment = dict(commands.server_environment)
        self._console = console
        self._restarts = restarts or RestartPolicy()
        self._restarted = frozenset(restarted)
        self._mps = mps
        self._needs_mps = needs_mps
        self._in_turn = in_turn
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._children: dict[str, Child] = {}  # the present or last life of each
        self._ready: dict[str, asyncio.Future[dict[str, Any]]] = {}  # of its first life
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._after_target: list[str] = []  # started when the target is back
        self._tending: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[str] | None = None
        self._stopping = False
        self._stopped = False

    async def start(self) -> dict[str, Any]:
        """Starts draft and target, then the gateway; returns the gateway's READY object.

        Raises LaunchFailed when a process exits or is not ready in time; `stop` is still due then.
        """
        self._failure = asyncio.get_running_loop().create_future()
        self._tending = asyncio.create_task(self._tend())
        self._tending.add_done_callback(self._report_crash)
        await self._start_mps()
        if self._failure.done():
            raise LaunchFailed(self._failure.result())
        deadline = time.monotonic() + self._start_timeout_s
        servers = [name for name in SERVERS if name in self._commands]
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

        Orderly, the gateway goes first, so that running requests can finish. MPS is the last to go.
        Nothing happens when it is called again.
        """
        self._stopping = True
        if self._stopped:
            return
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        servers = [name for name in self._lives if name != "gateway"]
        waves = [["gateway"], servers] if orderly else [list(self._lives)]
        for wave in waves:
            await self._end([name for name in wave if name in self._lives])
        if self._mps is not None:
            await self._mps.stop()
        self._stopped = True

    def kill(self) -> None:
        """SIGKILL to every process, for who does not want to wait; `stop` collects them."""
        self._stopping = True
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        if self._mps is not None:
            self._mps.kill()

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

    def ready(self, name: str) -> dict[str, Any]:
        """The READY object of the first life of `name`; a server comes back at that address."""
        return self._ready[name].result()

    def running(self, name: str) -> bool:
        """Whether a life of `name` is there that has said it is ready."""
        child = self._children.get(name)
        return child is not None and child.running and child.ready.done()

    async def _start_mps(self) -> None:
        """Starts the daemon; without one the cell goes on if it may, else it fails."""
        if self._mps is None:
            return
        try:
            await self._mps.start()
        except MpsUnavailable as error:
            self._mps = None
            if self._needs_mps:
                self._fail(f"--handoff: cuda_ipc on one GPU needs MPS: {error}")
            else:
                self._console.say(f"WARNING: no MPS ({error}): the handoff on one GPU is grpc")
        else:
            self._console.say(f"MPS is up, its logs are in {self._mps.folder}")

    def _launch(self, name: str) -> None:
        if name not in self._ready:
            self._ready[name] = asyncio.get_running_loop().create_future()
        self._lives[name] = asyncio.create_task(self._live(name))
        self._lives[name].add_done_callback(self._report_crash)

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

    async def _live(self, name: str) -> None:
        """One life of a process, from its start to what is known of its end."""
        cuda_error = False

        def show(line: str) -> None:
            nonlocal cuda_error
            cuda_error = cuda_error or names_cuda_error(line)
            self._console.line(name, line)

        environment = dict(self._environment) if name in SERVERS else {}
        if name in SERVERS and self._mps is not None:
            environment |= self._mps.environment
        try:
            child = await Child.start(name, self._commands[name], show, environment)
        except OSError as error:
            self._fail(f"{name} cannot be started: {error}")
            return
        self._children[name] = child
        if self._stopping:  # `stop` came too early to see this process
            child.signal(signal.SIGTERM)
        child.ready.add_done_callback(lambda _: self._mark_ready(name, child))
        overdue = asyncio.get_running_loop().call_later(
            self._start_timeout_s, self._give_up, name, child
        )
        status = await child.wait()
        overdue.cancel()
        self._exits.put_nowait(Exit(child, status, cuda_error))

    def _mark_ready(self, name: str, child: Child) -> None:
        if child.ready.cancelled() or self._children.get(name) is not child:
            return
        if self._ready[name].done():
            self._console.say(f"{name} is back")
        else:
            self._ready[name].set_result(child.ready.result())
            self._console.say(f"{name} is ready ({child.ready.result().get('grpc')})")
        if name == "target":
            while self._after_target and not self._stopping:
                self._launch(self._after_target.pop())

    def _give_up(self, name: str, child: Child) -> None:
        """Kills a process that came back, but not in time; `start` sees to the first start."""
        if self._ready[name].done() and not child.ready.done():
            self._console.say(f"{name} was not ready within {self._start_timeout_s:g} s: killed")
            child.signal(signal.SIGKILL)

    async def _tend(self) -> None:
        """Restarts servers that died, until the cell cannot go on."""
        while True:
            ended = await self._exits.get()
            if self._children.get(ended.name) is not ended.child:
                continue  # its next life was begun together with the other server's
            pause = self._allowed(ended)
            if pause is None:
                return
            both = self._share_faults and ends_both(ended)
            what = "both servers and MPS begin again" if both else "starting it again"
            self._console.say(f"{ended}; {what} in {pause:g} s")
            await asyncio.sleep(pause)
            if both or (self._share_faults and not await self._others_are_well()):
                await self._renew()
            else:
                self._launch(ended.name)

    def _allowed(self, ended: Exit) -> float | None:
        """The pause before the next start, or None after a failure was set."""
        early = not self._ready[ended.name].done()
        hopeless = early and (ended.status > 0 or ended.name == "target")
        if ended.name not in self._restarted or hopeless:
            self._fail(str(ended))
            return None
        pause = self._restarts.pause(time.monotonic(), ended.name)
        if pause is None:
            self._fail(
                f"servers died more than {self._restarts.most} times within "
                f"{self._restarts.window_s:g} s; at last {ended}"
            )
        return pause

    @property
    def _share_faults(self) -> bool:
        """Whether both servers run, or did, as clients of one MPS daemon."""
        servers = [name for name in SERVERS if name in self._commands]
        started = all(name in self._ready and self._ready[name].done() for name in servers)
        return self._mps is not None and started

    async def _others_are_well(self) -> bool:
        """Whether target and MPS can take a new draft."""
        assert self._mps is not None
        target = self._children.get("target")
        return target is not None and target.running and await self._mps.healthy()

    async def _renew(self) -> None:
        """Ends both servers and MPS, and starts them again: MPS, target, draft."""
        servers = [name for name in SERVERS if name in self._lives]
        self._after_target.clear()
        lives = [self._lives[name] for name in servers]
        deadline = time.monotonic() + _KILLED_S
        while not all(life.done() for life in lives):
            if time.monotonic() > deadline:
                stuck = [name for name, life in zip(servers, lives, strict=True) if not life.done()]
                self._fail(f"{' and '.join(stuck)} did not end within {_KILLED_S:g} s of a SIGKILL")
                return
            for name in servers:
                if name in self._children and self._children[name].running:
                    self._children[name].signal(signal.SIGKILL)
            await asyncio.wait(lives, timeout=_POLL_S)
        for name in servers:
            self._children.pop(name, None)
        if self._mps is not None:
            await self._mps.stop()
            await self._start_mps()
        if self._failure is not None and self._failure.done():
            return
        self._after_target = [name for name in servers if name != "target"]
        self._launch("target")
        while self._after_target and not self._in_turn:
            self._launch(self._after_target.pop())

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
        tasks = {self._lives[name]: name for name in names}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._grace_s)
        for task in late:
            self._console.say(f"{tasks[task]} did not end within {self._grace_s:g} s: killed")
            if tasks[task] in self._children:
                self._children[tasks[task]].signal(signal.SIGKILL)
        if late:
            _, stuck = await asyncio.wait(late, timeout=_KILLED_S)
            for task in stuck:
                self._console.say(
                    f"{tasks[task]} is left: no end within {_KILLED_S:g} s of a SIGKILL"
                )
                task.cancel()
