"""`slipstream up` over fake processes: start, restart, reasons of an end, and no orphans."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.cli.console import Console
from slipstream.cli.launcher import CellCommands, Launcher, LaunchFailed
from slipstream.cli.recovery import RestartPolicy
from tests.fakes.child import WAIT_S, alive, fake, pids, starts, until


def launcher(
    target: str = "", draft: str | None = "", gateway: str = "", **options: Any
) -> tuple[Launcher, io.StringIO]:
    log = io.StringIO()
    most = int(options.pop("most", 5))
    commands = CellCommands(fake(target), None if draft is None else fake(draft), fake(gateway))
    policy = RestartPolicy(most=most, first_pause_s=0.01, longest_pause_s=0.02)
    return Launcher(commands, Console(log), restarts=policy, **options), log


@pytest.mark.anyio
async def test_a_cell_starts_and_stops() -> None:
    cell, log = launcher()
    async with cell:
        assert cell.gateway["http"] == "127.0.0.1:2"
        running = [cell.pid(name) for name in ("target", "draft", "gateway")]
        assert all(map(alive, running))
    assert not any(map(alive, running))
    assert "target  | 12:00:00.000 WARNING fake: about to be ready" in log.getvalue()
    assert "READY" not in log.getvalue()


@pytest.mark.anyio
async def test_a_dead_draft_comes_back_with_the_same_flags(tmp_path: Path) -> None:
    trace = tmp_path / "draft"
    commands = CellCommands(fake(), (*fake("", trace), "--port=7"), fake())
    log = io.StringIO()
    policy = RestartPolicy(first_pause_s=0.01)
    async with Launcher(commands, Console(log), restarts=policy) as cell:
        os.kill(cell.pid("draft"), signal.SIGKILL)
        await anyio.to_thread.run_sync(until, lambda: "draft is back" in log.getvalue(), "back")
    assert [start["flags"] for start in starts(trace)] == [["--port=7"]] * 2
    assert "draft was killed by SIGKILL; starting it again in 0.01 s" in log.getvalue()


@pytest.mark.anyio
async def test_a_draft_that_keeps_dying_ends_the_cell(tmp_path: Path) -> None:
    trace = tmp_path / "draft"
    policy = RestartPolicy(most=2, first_pause_s=0.01)
    commands = CellCommands(fake(), fake("die=0.01", trace), fake())
    cell = Launcher(commands, Console(io.StringIO()), restarts=policy)
    try:
        await cell.start()
        reason = await cell.failure()
    except LaunchFailed as failed:
        reason = str(failed)
    finally:
        await cell.stop(orderly=False)
    assert reason == (
        "servers died more than 2 times within 600 s; at last draft exited with status 3"
    )
    assert len(starts(trace)) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
async def test_what_is_not_restarted_ends_the_cell(name: str) -> None:
    others = {"target", "draft"} - {name}
    cell, _ = launcher(restarted=others)
    async with cell:
        os.kill(cell.pid(name), signal.SIGKILL)
        assert await cell.failure() == f"{name} was killed by SIGKILL"


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
async def test_a_failed_start_says_what_the_process_said(name: str) -> None:
    cell, _ = launcher(**{name: "fail=2"})
    said = f"{name} exited with status 2 before it was ready: --model: it is broken"
    with pytest.raises(LaunchFailed, match=f"^{said}$"):
        async with cell:
            pass


@pytest.mark.anyio
async def test_a_start_has_a_deadline() -> None:
    cell, _ = launcher(target="silent", start_timeout_s=1.0)
    with pytest.raises(LaunchFailed, match="^target was not ready within 1 s$"):
        async with cell:
            pass


@pytest.mark.anyio
async def test_in_turn_the_target_waits_for_the_draft(tmp_path: Path) -> None:
    trace = tmp_path / "target"
    commands = CellCommands(fake("", trace), fake("silent"), fake())
    cell = Launcher(commands, Console(io.StringIO()), in_turn=True, start_timeout_s=0.5)
    with pytest.raises(LaunchFailed, match="^draft was not ready"):
        async with cell:
            pass
    assert not starts(trace)


@pytest.mark.anyio
async def test_the_deaf_are_killed_after_the_grace() -> None:
    cell, log = launcher(draft="deaf", grace_s=0.3)
    async with cell:
        pid = cell.pid("draft")
    assert not alive(pid)
    assert "draft did not end within 0.3 s: killed" in log.getvalue()


def test_restarts_are_counted_in_a_window() -> None:
    policy = RestartPolicy(most=3, window_s=60.0, first_pause_s=1.0, longest_pause_s=3.0)
    assert [policy.pause(now) for now in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0, None]
    assert policy.pause(60.5) == 3.0  # the first one left the window
    assert policy.pause(60.6) is None


def test_a_death_that_brings_another_counts_once() -> None:
    policy = RestartPolicy(2, window_s=600.0, first_pause_s=0.5)
    assert policy.pause(0.0, "draft") == 0.5
    assert policy.pause(0.3, "target") == 0.5  # it went with the draft
    assert policy.pause(0.6, "draft") == 1.0  # another matter
    assert policy.pause(100.0, "target") is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def up(tmp_path: Path, model: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs the whole command over fakes that trace into `tmp_path`."""
    running: list[subprocess.Popen[str]] = []

    def start(*flags: str, **behave: str) -> subprocess.Popen[str]:
        table = {
            name: fake(behave.get(name, ""), tmp_path / name)
            for name in ("target", "draft", "gateway", "prepare")
        }
        code = "from slipstream.cli import up; raise SystemExit(up.main(%r, up.Programs(**%r)))"
        argv = [f"--target={model}", f"--draft={model}", "--port=0", "--grpc-port=0", *flags]
        process = subprocess.Popen(
            [sys.executable, "-c", code % (argv, table)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    process = up("--width=3", "--dtype=float32")
    assert process.stdout is not None
    shown = iter(process.stdout.readline, "")
    assert any("http://127.0.0.1:2/v1" in line for line in shown)
    assert any("curl" in line for line in shown)
    process.send_signal(number)
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, log
    assert not any(map(alive, pids(*map(tmp_path.joinpath, ("target", "draft", "gateway")))))
    assert "\x1b[" not in log
    assert "up      | draft is ready" in log
    [gateway] = starts(tmp_path / "gateway")
    assert "--pin-nodes" in gateway["flags"]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_stops_all_unless_nohup_has_it_ignored(
    up: Callable[..., subprocess.Popen[str]], ignored: bool
) -> None:
    own = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        process = up()  # it inherits that
    finally:
        signal.signal(signal.SIGHUP, own)
    assert process.stdout is not None
    assert any("curl" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGHUP)
    if ignored:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, log


def test_a_second_signal_does_not_wait(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = up("--drain-s=60", target="deaf", gateway="deaf")
    until(lambda: starts(tmp_path / "gateway"), "started")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert not any(map(alive, pids(tmp_path / "target", tmp_path / "gateway")))


def test_a_signal_while_the_model_is_prepared(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = up("--target=owner/name", prepare="silent,deaf")
    until(lambda: starts(tmp_path / "prepare"), "started")
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=WAIT_S)
    assert (process.returncode, "Traceback" in log) == (0, False)
    assert not any(map(alive, pids(tmp_path / "prepare")))
    assert not starts(tmp_path / "target")


def test_a_failure_is_the_last_word(up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up(gateway="die=0.2")
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert log.splitlines()[-1] == "error: gateway exited with status 3"


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_killing_up_leaves_no_orphan(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = up(target="deaf", draft="deaf", gateway="deaf")
    traces = [tmp_path / name for name in ("target", "draft", "gateway")]
    until(lambda: all(map(starts, traces)), "started")
    process.kill()
    until(lambda: not any(map(alive, pids(*traces))), "gone")


@pytest.mark.anyio
async def test_what_a_child_started_goes_with_it(tmp_path: Path) -> None:
    trace = tmp_path / "target"
    commands = CellCommands(fake("family", trace), None, fake())
    async with Launcher(commands, Console(io.StringIO())):
        assert all(map(alive, pids(trace)))
    until(lambda: not any(map(alive, pids(trace))), "gone")
