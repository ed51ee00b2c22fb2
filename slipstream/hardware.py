"""What a measurement was made on, read without torch."""

from __future__ import annotations

import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_CGROUP = Path("/sys/fs/cgroup")
_PACKAGES = ("slipstream", "torch", "transformers", "tokenizers", "grpcio", "httpx")


def cpu_name() -> str:
    """The processor's name, with the matrix extensions that decide the speed of bf16."""
    model, flags = _cpuinfo()
    extensions = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{model} ({', '.join(extensions)})" if extensions else model


def has_bf16() -> bool:
    """Whether the processor computes bf16 itself; emulated, it is slower than fp32."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo()[1])


def _cpuinfo() -> tuple[str, frozenset[str]]:
    model = platform.processor() or platform.machine()
    flags: frozenset[str] = frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return model, flags
    for line in text.splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "model name":
                model = value.strip()
            case "flags" | "Features":
                flags = frozenset(value.split())
    return model, flags


def cores() -> int:
    """Cores that this process may use: its affinity, within the container's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota, period = _cpu_quota()
    if quota > 0 and period > 0:
        allowed = min(allowed, math.ceil(quota / period))
    return max(allowed, 1)


def memory() -> int:
    """Bytes of memory that this process may use: the machine's, within the container's limit."""
    allowed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup("memory.max") or _cgroup("memory/memory.limit_in_bytes")
    return min(allowed, int(limit)) if limit.isdecimal() else allowed


def _cpu_quota() -> tuple[int, int]:
    """Microseconds of processor time in every so many, (-1, -1) where there is no limit."""
    words = _cgroup("cpu.max").split() or [
        _cgroup("cpu/cpu.cfs_quota_us"),
        _cgroup("cpu/cpu.cfs_period_us"),
    ]
    if len(words) == 2 and all(word.isdecimal() for word in words):
        return int(words[0]), int(words[1])
    return -1, -1


def _cgroup(name: str) -> str:
    """A control group's value as a container sees its own: version 2 or 1; "" without it."""
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""


def describe() -> dict[str, Any]:
    """Processor, cores, system and the versions of what matters, ready for JSON."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }
