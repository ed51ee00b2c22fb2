"""What a measurement was made on, read without torch."""

from __future__ import annotations

import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

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
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            allowed = min(allowed, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(allowed, 1)


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
