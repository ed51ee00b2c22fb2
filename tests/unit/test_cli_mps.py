"""The private MPS daemon: its folder, its environment, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli import mps
from slipstream.cli.mps import PREFIX, MpsUnavailable, PrivateMps, client_environment
from tests.fakes import mps_control

pytestmark = pytest.mark.anyio


def inside(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = mps_control.install(folder)
    yield program
    left = mps_control.running(program)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


async def test_a_daemon_of_ones_own(program: Path, root: Path) -> None:
    daemon = PrivateMps("GPU-abc", root=root)
    assert daemon.environment == {} and daemon.folder is None
    await daemon.start()
    folder = daemon.folder
    assert folder is not None and folder.parent == root
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [started] = mps_control.daemons(program)
    assert started["CUDA_VISIBLE_DEVICES"] == "GPU-abc"
    for name, value in daemon.environment.items():
        assert started[name] == value and value.startswith(str(folder))
    assert await daemon.healthy()
    await daemon.stop()
    assert not mps_control.running(program) and not inside(root)
    assert not await daemon.healthy()
    await daemon.stop()


async def test_a_second_life_has_a_new_folder(program: Path, root: Path) -> None:
    daemon = PrivateMps(root=root)
    folders = set()
    for _ in range(2):
        await daemon.start()
        folders.add(daemon.folder)
        await daemon.stop()
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("inherited", "seen"),
    [(None, None), ("3", None), ("0,1", None), ("GPU-x", "GPU-x"), ("MIG-1", "MIG-1")],
)
async def test_numbers_are_not_mapped_twice(
    program: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    inherited: str | None,
    seen: str | None,
) -> None:
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    daemon = PrivateMps(root=root)
    await daemon.start()
    assert mps_control.daemons(program)[0]["CUDA_VISIBLE_DEVICES"] == seen
    await daemon.stop()


def test_clients_name_the_gpu_as_the_daemon_does() -> None:
    assert client_environment("GPU-abc") == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}
    assert client_environment("") == {}


async def test_without_the_program(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(MpsUnavailable, match="^nvidia-cuda-mps-control is not on the PATH$"):
        await PrivateMps(root=root).start()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("refuse", "nvidia-cuda-mps-control: An instance of this daemon is already running"),
        ("mute", "nvidia-cuda-mps-control: no end of `get_server_list` within 2 s"),
    ],
)
async def test_a_daemon_that_does_not_come_up_leaves_nothing(
    program: Path, root: Path, words: str, said: str
) -> None:
    mps_control.behave(program, words)
    daemon = PrivateMps(root=root, limit_s=2.0)
    with pytest.raises(MpsUnavailable) as failed:
        await daemon.start()
    assert str(failed.value) == said
    assert not mps_control.running(program) and not inside(root)
    assert daemon.environment == {}


async def test_no_place_for_the_folder(program: Path, root: Path) -> None:
    with pytest.raises(MpsUnavailable, match="no folder for its pipes: "):
        await PrivateMps(root=root / "missing").start()


@pytest.mark.parametrize("words", ["deaf", "mute"])
async def test_the_deaf_are_killed(program: Path, root: Path, words: str) -> None:
    daemon = PrivateMps(root=root, limit_s=2.0)
    if words == "deaf":
        mps_control.behave(program, words)
    await daemon.start()
    mps_control.behave(program, words)
    await daemon.stop()
    assert not mps_control.running(program) and not inside(root)


async def test_a_kill_does_not_wait(program: Path, root: Path) -> None:
    mps_control.behave(program, "deaf")
    daemon = PrivateMps(root=root)
    await daemon.start()
    began = time.monotonic()
    daemon.kill()
    await daemon.stop()
    assert time.monotonic() - began < 5.0
    assert not mps_control.running(program) and not inside(root)


async def test_a_client_is_not_taken_for_the_daemon(program: Path, root: Path) -> None:
    mps_control.behave(program, "deaf")
    daemon = PrivateMps(root=root, limit_s=0.2)
    await daemon.start()
    environ = {**os.environ, **daemon.environment}
    client = await asyncio.create_subprocess_exec("sleep", "60", env=environ)
    try:
        await daemon.stop()
        assert client.returncode is None
    finally:
        client.kill()
        await client.wait()


async def test_a_faulted_server_is_not_healthy(program: Path, root: Path) -> None:
    daemon = PrivateMps(root=root)
    await daemon.start()
    mps_control.behave(program, "fault")
    assert not await daemon.healthy()
    mps_control.behave(program)
    assert await daemon.healthy()
    os.kill(mps_control.daemons(program)[0]["pids"][0], signal.SIGKILL)
    assert not await daemon.healthy()
    await daemon.stop()


async def test_what_a_killed_run_left_is_removed(
    program: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_YOUNG_S", 0.0)
    lost = PrivateMps(root=root)
    await lost.start()
    assert lost.folder is not None
    os.close(lost._lock)  # as the kernel does for a process that is killed
    (root / "another-folder").mkdir()
    living, stale = PrivateMps(root=root), lost.folder
    await living.start()
    assert not stale.exists()
    assert mps_control.running(program) == mps_control.daemons(program)[1]["pids"]
    third = PrivateMps(root=root)
    await third.start()
    assert await living.healthy()
    for daemon in (living, third):
        await daemon.stop()
    assert inside(root) == ["another-folder"]
    lost._lock = -1


async def test_a_folder_just_made_is_left_alone(program: Path, root: Path) -> None:
    (root / f"{PREFIX}new").mkdir()
    daemon = PrivateMps(root=root)
    await daemon.start()
    await daemon.stop()
    assert (root / f"{PREFIX}new").is_dir()
