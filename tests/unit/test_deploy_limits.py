"""Cores and memory within a container's limits, from control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import hardware


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "memory").mkdir()
    return tmp_path


def test_no_limit_where_there_are_no_control_groups(cgroup: Path) -> None:
    assert hardware.cores() == 8
    assert hardware.memory() > 1 << 28


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 2), ("max 100000", 8)])
def test_quota_of_version_2(cgroup: Path, text: str, cores: int) -> None:
    (cgroup / "cpu.max").write_text(text + "\n")
    assert hardware.cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 8), ("1000", 1)])
def test_quota_of_version_1(cgroup: Path, quota: str, cores: int) -> None:
    (cgroup / "cpu/cpu.cfs_quota_us").write_text(quota + "\n")
    (cgroup / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert hardware.cores() == cores


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_limit(cgroup: Path, name: str) -> None:
    whole = hardware.memory()
    (cgroup / name).write_text("134217728\n")
    assert hardware.memory() == 128 << 20
    (cgroup / name).write_text("9223372036854771712\n")  # version 1 without a limit
    assert hardware.memory() == whole


def test_version_2_without_a_limit_says_max(cgroup: Path) -> None:
    whole = hardware.memory()
    (cgroup / "memory.max").write_text("max\n")
    assert hardware.memory() == whole
