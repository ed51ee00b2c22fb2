"""A private MPS control daemon for the two servers of one GPU: started before them, ended after.

Two processes on one GPU run at the same time only as clients of one MPS server; else the driver
switches between them in time slices. The daemon has a folder of its own for its pipes and logs, so
that it meets no other daemon of the machine, and no setting of the card is changed.

The folder is locked while its owner lives. One that nobody holds is what a killed run left: the
next start ends the daemon in it, if it still runs, and removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

CONTROL = "nvidia-cuda-mps-control"

PREFIX = "slipstream-mps-"

_COMM = "nvidia-cuda-mps"  # control daemon and server alike: the kernel keeps 15 characters
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_YOUNG_S = 10.0  # a folder of this age may belong to a start that has not locked it yet
_POLL_S = 0.02
_LONGEST_ROOT = 60  # bytes; the name of a socket below it has at most 107


class MpsUnavailable(Exception):
    """No daemon of ours could be started here; the message says why."""


class _Said(NamedTuple):
    """What the control program wrote, and what was wrong; "": nothing."""

    text: str
    wrong: str = ""


class PrivateMps:
    """One daemon at a time: `start`, `stop`, and `start` again in a new folder.

    Args:
        gpu: UUID of the one GPU that the daemon serves. As its clients are to name the GPU in the
            same way, a number never means two things. "": all GPUs that a UUID in
            CUDA_VISIBLE_DEVICES leaves, or all there are, numbered for clients as without MPS.
        root: where folders are made; default: the system's place for temporary ones.
        limit_s: seconds that each of start, answer, and end may take.
    """

    def __init__(self, gpu: str = "", *, root: Path | None = None, limit_s: float = 10.0) -> None:
        self._gpu = gpu
        self._root = root or _temporary()
        self._limit_s = limit_s
        self._folder: Path | None = None
        self._lock = -1

    @property
    def folder(self) -> Path | None:
        """Where pipes and logs are, while a daemon is there."""
        return self._folder

    @property
    def environment(self) -> dict[str, str]:
        """What its clients need, beside the GPU's name; empty without a daemon."""
        return _places(self._folder) if self._folder is not None else {}

    async def start(self) -> None:
        """Starts a daemon that answers. Raises MpsUnavailable; nothing is left then."""
        if shutil.which(CONTROL) is None:
            raise MpsUnavailable(f"{CONTROL} is not on the PATH")
        try:
            await self._clean()
            self._make_folder()
        except OSError as error:
            self._remove_folder()
            raise MpsUnavailable(f"no folder for its pipes: {error}") from error
        try:
            await self._launch()
        except BaseException:
            await self.stop()
            raise

    async def healthy(self) -> bool:
        """Whether the daemon takes commands, and no server of it has seen a fault of the GPU."""
        if self._folder is None:
            return False
        servers = await self._ask(self._folder, "get_server_list")
        if servers.wrong:
            return False
        for pid in filter(str.isdecimal, servers.text.split()):
            if "FAULT" in (await self._ask(self._folder, f"get_server_status {pid}")).text:
                return False
        return True

    async def stop(self) -> None:
        """Ends the daemon and its servers, by force after the limit; removes the folder.

        For when the clients are gone: the daemon waits for them. Where it is cancelled, or there is
        no daemon, it may be called again.
        """
        if self._folder is not None:
            await self._end(self._folder)
            self._remove_folder()

    def kill(self) -> None:
        """SIGKILL to the daemon and its servers, for who does not want to wait; `stop` is due."""
        if self._folder is not None:
            _kill(self._folder)

    def _make_folder(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._root))  # 0700
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name in ("pipe", "log"):
            (self._folder / name).mkdir(mode=0o700)

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _launch(self) -> None:
        assert self._folder is not None
        said = await self._run(self._folder, ("-d",))
        if not said.wrong:
            said = await self._ask(self._folder, "get_server_list")
        if said.wrong:
            raise MpsUnavailable(f"{CONTROL}: {said.wrong}")

    async def _ask(self, folder: Path, command: str) -> _Said:
        """Gives the daemon in `folder` a command."""
        return await self._run(folder, (), command)

    async def _run(self, folder: Path, flags: tuple[str, ...], command: str = "") -> _Said:
        """Runs the control program.

        Its output goes to a file: a daemon keeps what it was given, and a pipe would stay open.
        """
        output = folder / "said"
        try:
            with output.open("wb") as file:
                process = await asyncio.create_subprocess_exec(
                    *(CONTROL, *flags),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    env=self._environ(folder),
                    start_new_session=True,
                )
        except OSError as error:
            return _Said("", str(error))
        try:
            async with asyncio.timeout(self._limit_s):
                await process.communicate(f"{command}\n".encode() if command else None)
        except TimeoutError:
            asked = " ".join((*flags, command)).strip()
            return _Said("", f"no end of `{asked}` within {self._limit_s:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        text = output.read_text(errors="replace").strip()
        if process.returncode == 0:
            return _Said(text)
        return _Said(text, text.rpartition("\n")[2] or f"exit status {process.returncode}")

    def _environ(self, folder: Path) -> dict[str, str]:
        """Variables of the daemon in `folder`."""
        environ = {**os.environ, **_places(folder)}
        inherited = environ.pop(_VISIBLE, "")
        visible = self._gpu or (inherited if inherited.startswith(("GPU-", "MIG-")) else "")
        return {**environ, _VISIBLE: visible} if visible else environ

    async def _end(self, folder: Path) -> None:
        """Ends daemon and servers of `folder`: by its own command, then by force."""
        if not _processes(folder) and not any((folder / "pipe").glob("*")):
            return
        said = await self._ask(folder, "quit")
        if not await _gone(folder, 0.0 if said.wrong else self._limit_s):
            _kill(folder)
            await _gone(folder, self._limit_s)

    async def _clean(self) -> None:
        """Removes the folders, and ends the daemons, of runs that are gone."""
        for folder in self._root.glob(f"{PREFIX}*"):
            lock = _claim(folder)
            if lock is None:
                continue
            try:
                await self._end(folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _places(folder: Path) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def _temporary() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= _LONGEST_ROOT else Path("/tmp")


def _claim(folder: Path) -> int | None:
    """A lock on a folder of this user's that nobody holds; None for any other."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    state = os.fstat(lock)
    if state.st_uid == os.getuid() and time.time() - state.st_ctime >= _YOUNG_S:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    os.close(lock)
    return None


def _processes(folder: Path) -> set[int]:
    """Daemon and servers of `folder`: by their name, and by the pipe folder they started with.

    Both are asked for: clients have the variable too. A process that has exited has no variables.
    """
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={_places(folder)['CUDA_MPS_PIPE_DIRECTORY']}".encode()
    found: set[int] = set()
    others: list[tuple[int, int]] = []  # pid, parent
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if (entry / "comm").read_text().strip() != _COMM:
                continue
            pid, environ = int(entry.name), (entry / "environ").read_bytes()
            if wanted in environ.split(b"\0"):
                found.add(pid)
            elif environ:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                others.append((pid, int(parent)))
    return found | {pid for pid, parent in others if parent in found}


def _kill(folder: Path) -> None:
    for pid in _processes(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


async def _gone(folder: Path, within_s: float) -> bool:
    """Whether daemon and servers of `folder` have ended, or do so in time."""
    deadline = time.monotonic() + within_s
    while _processes(folder):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def client_environment(gpu: str) -> dict[str, str]:
    """Variables by which a server has `gpu`, a UUID, as its only device, with MPS and without."""
    return {_VISIBLE: gpu} if gpu else {}
