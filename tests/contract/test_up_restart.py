"""Servers that come back: each alone, or both with MPS where they share a GPU's faults."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from slipstream.cli import launcher
from slipstream.cli.console import Console
from slipstream.cli.launcher import CellCommands, Launcher, LaunchFailed
from slipstream.cli.mps import PrivateMps
from slipstream.cli.process import Child
from slipstream.cli.recovery import RestartPolicy
from tests.fakes import mps_control
from tests.fakes.child import WAIT_S, alive, fake, pids, starts, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    program = mps_control.install(folder)
    yield program
    for pid in mps_control.running(program):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """What the command takes for the system's temporary folder: one whose name is short."""
    with tempfile.TemporaryDirectory(prefix="up-") as folder:
        yield Path(folder)


class Cell:
    """A running cell of fakes, and what is known of its lives."""

    def __init__(self, launcher: Launcher, log: io.StringIO, folder: Path) -> None:
        self.launcher = launcher
        self.log = log
        self._folder = folder

    def starts(self, name: str) -> list[dict[str, object]]:
        return starts(self._folder / name)

    def kill(self, name: str) -> None:
        os.kill(self.launcher.pid(name), signal.SIGKILL)

    async def until(self, text: str, times: int = 1) -> None:
        await anyio.to_thread.run_sync(
            until, lambda: self.log.getvalue().count(text) >= times, f"{text}: {self.log}"
        )

    @property
    def lives(self) -> tuple[int, int, int]:
        target, draft, gateway = (len(self.starts(n)) for n in ("target", "draft", "gateway"))
        return target, draft, gateway


@asynccontextmanager
async def cell(
    folder: Path,
    mps: bool = True,
    needs_mps: bool = False,
    in_turn: bool = True,
    most: int = 5,
    **behave: str,
) -> AsyncIterator[Cell]:
    log = io.StringIO()
    argv = {n: fake(behave.get(n, ""), folder / n) for n in ("target", "draft", "gateway")}
    (folder / "mps").mkdir()
    launcher = Launcher(
        CellCommands(**argv, server_environment={"CUDA_VISIBLE_DEVICES": "GPU-a"}),
        Console(log),
        restarts=RestartPolicy(most=most, first_pause_s=0.01, longest_pause_s=0.02),
        mps=PrivateMps("GPU-a", root=folder / "mps", limit_s=2.0) if mps else None,
        needs_mps=needs_mps,
        in_turn=in_turn,
    )
    async with launcher:
        yield Cell(launcher, log, folder)
    assert not any(map(alive, pids(*(folder / name for name in argv))))
    assert not list((folder / "mps").iterdir())


@pytest.mark.parametrize(("name", "lives"), [("target", (2, 1, 1)), ("draft", (1, 2, 1))])
async def test_apart_each_comes_back_alone(
    tmp_path: Path, name: str, lives: tuple[int, int, int]
) -> None:
    async with cell(tmp_path, mps=False) as running:
        running.kill(name)
        await running.until(f"{name} is back")
        assert running.lives == lives
    assert f"{name} was killed by SIGKILL; starting it again in 0.01 s" in running.log.getvalue()


async def test_both_at_once_come_back_apart(tmp_path: Path) -> None:
    async with cell(tmp_path, mps=False) as running:
        running.kill("target")
        running.kill("draft")
        await running.until(" is back", 2)
        assert running.lives == (2, 2, 1)


async def test_servers_are_clients_of_the_daemon(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path) as running:
        [daemon] = mps_control.daemons(program)
        mine = {key: value for key, value in daemon.items() if key.startswith("CUDA_")}
        for name in ("target", "draft"):
            assert running.starts(name)[0]["cuda"] == mine
        assert running.starts("gateway")[0]["cuda"] == {}
        assert mps_control.running(program)
    assert not mps_control.running(program)


async def test_a_killed_draft_comes_back_alone(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path) as running:
        for count in (1, 2):
            running.kill("draft")
            await running.until("draft is back", count)
        assert running.lives == (1, 3, 1)
        assert len(mps_control.daemons(program)) == 1


@pytest.mark.parametrize("in_turn", [True, False])
async def test_a_dead_target_takes_all_along(tmp_path: Path, program: Path, in_turn: bool) -> None:
    async with cell(tmp_path, in_turn=in_turn) as running:
        running.kill("target")
        await running.until(" is back", 2)
        assert running.lives == (2, 2, 1)
        old, new = mps_control.daemons(program)
        assert mps_control.running(program) == new["pids"]
        target, draft = (running.starts(name)[1] for name in ("target", "draft"))
        for server in (target, draft):
            assert server["cuda"]["CUDA_MPS_PIPE_DIRECTORY"] == new["CUDA_MPS_PIPE_DIRECTORY"]  # type: ignore[index]
        if in_turn:
            assert running.log.getvalue().rindex("draft is back") > running.log.getvalue().rindex(
                "target is back"
            )
    assert "; both servers and MPS begin again in 0.01 s" in running.log.getvalue()


async def test_both_at_once_are_one_death(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path, most=1) as running:
        running.kill("draft")
        running.kill("target")
        await running.until(" is back", 2)
        await asyncio.sleep(0.1)
        assert running.lives in ((2, 2, 1), (2, 3, 1))
        assert len(mps_control.daemons(program)) == 2


async def test_an_error_of_cuda_in_the_draft_takes_all_along(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path, draft="die=0.5,cuda") as running:
        await running.until("target is back")
        await running.until("draft is back")
        assert len(mps_control.daemons(program)) >= 2
    assert "draft exited with status 3; both servers and MPS begin again" in running.log.getvalue()


async def test_a_draft_that_only_dies_does_not(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path, draft="die=0.5") as running:
        await running.until("draft is back")
        assert (running.lives[0], len(mps_control.daemons(program))) == (1, 1)


async def test_a_draft_that_cannot_come_back_takes_all_along(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path, draft="again=2", most=2) as running:
        running.kill("draft")
        reason = await running.launcher.failure()
        assert len(mps_control.daemons(program)) == 2
        assert running.lives[0] == 2
    assert reason == (
        "servers died more than 2 times within 600 s; at last draft exited with status 2 before "
        "it was ready: --model: it is broken"
    )


async def test_a_fault_seen_by_mps_takes_all_along(tmp_path: Path, program: Path) -> None:
    async with cell(tmp_path) as running:
        mps_control.behave(program, "fault")
        running.kill("draft")
        await running.until(" is back", 2)
        assert running.lives == (2, 2, 1)


async def test_one_that_comes_back_late_is_killed(tmp_path: Path) -> None:
    async with cell(tmp_path, mps=False) as running:
        running.launcher._start_timeout_s = 0.3
        running.launcher._commands["draft"] = fake("silent", tmp_path / "draft")
        running.kill("draft")
        await running.until("draft was not ready within 0.3 s: killed")
        await running.until("draft was killed by SIGKILL before it was ready")


async def test_a_process_that_no_signal_ends_is_not_waited_for(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a driver holds after a fault."""
    signalled = Child.signal
    async with cell(tmp_path) as running:
        monkeypatch.setattr(launcher, "_KILLED_S", 0.3)
        draft = running.launcher.pid("draft")
        monkeypatch.setattr(
            Child, "signal", lambda self, n: None if self.pid == draft else signalled(self, n)
        )
        running.kill("target")
        reason = await asyncio.wait_for(running.launcher.failure(), WAIT_S)
        assert reason == "draft did not end within 0.3 s of a SIGKILL"
        running.launcher._grace_s = 0.1
        await asyncio.wait_for(running.launcher.stop(), WAIT_S)
        assert "draft is left: no end within 0.3 s of a SIGKILL" in running.log.getvalue()
        os.killpg(draft, signal.SIGKILL)
        await asyncio.sleep(0.1)


async def test_without_mps_the_cell_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with cell(tmp_path) as running:
        assert running.starts("draft")[0]["cuda"] == {"CUDA_VISIBLE_DEVICES": "GPU-a"}
        running.kill("target")
        await running.until("target is back")
        assert running.lives == (2, 1, 1)
    said = "WARNING: no MPS (nvidia-cuda-mps-control is not on the PATH): the handoff on one GPU is"
    assert said in running.log.getvalue()


async def test_cuda_ipc_on_one_gpu_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        LaunchFailed, match="^--handoff: cuda_ipc on one GPU needs MPS: nvidia-cuda"
    ):
        async with cell(tmp_path, needs_mps=True):
            pass
    assert not starts(tmp_path / "draft")


async def test_a_failed_start_ends_the_daemon(tmp_path: Path, program: Path) -> None:
    with pytest.raises(LaunchFailed, match="^target exited with status 2"):
        async with cell(tmp_path, target="fail=2"):
            pass
    assert mps_control.daemons(program) and not mps_control.running(program)


@pytest.fixture
def up(tmp_path: Path, program: Path, temporary: Path) -> Callable[..., subprocess.Popen[str]]:
    """The whole command over fakes, both servers on one GPU that nobody can name."""
    model = tmp_path / "a-model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def start(*flags: str, **behave: str) -> subprocess.Popen[str]:
        table = {
            name: fake(behave.get(name, ""), tmp_path / name)
            for name in ("target", "draft", "gateway", "prepare")
        }
        code = "from slipstream.cli import up; raise SystemExit(up.main(%r, up.Programs(**%r)))"
        argv = [
            *(f"--target={model}", f"--draft={model}", "--port=0", "--grpc-port=0"),
            *("--device=cuda:0", "--target-memory-share=0.5", "--draft-memory-share=0.2", *flags),
        ]
        return subprocess.Popen(
            [sys.executable, "-c", code % (argv, table)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )

    return start


def test_a_signal_ends_the_daemon_too(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path, program: Path, temporary: Path
) -> None:
    process = up()
    until(lambda: starts(tmp_path / "gateway"), "started")
    assert mps_control.running(program)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, log
    assert not mps_control.running(program)
    assert not list(temporary.iterdir())
    assert starts(tmp_path / "target")[0]["cuda"]["CUDA_MPS_PIPE_DIRECTORY"]


def test_a_failure_ends_the_daemon_too(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path, program: Path
) -> None:
    process = up("--no-restart", draft="die=0.3")
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert log.splitlines()[-1] == "error: draft exited with status 3"
    assert mps_control.daemons(program) and not mps_control.running(program)


def test_what_a_killed_command_left_is_removed_by_the_next(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path, program: Path, temporary: Path
) -> None:
    process = up()
    until(lambda: starts(tmp_path / "gateway"), "started")
    process.kill()
    process.communicate()
    [left] = mps_control.daemons(program)
    [folder] = temporary.iterdir()
    assert mps_control.running(program) == left["pids"]
    daemon = PrivateMps(root=temporary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.cli.mps._YOUNG_S", 0.0)
        asyncio.run(_once(daemon))
    assert not folder.exists() and not mps_control.running(program)


async def _once(daemon: PrivateMps) -> None:
    await daemon.start()
    await daemon.stop()
