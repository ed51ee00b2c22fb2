"""What a gateway counts, and what processes hold: descriptors, mappings, memory, segments."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_PREFIX = "slipstream_"
_COUNTED = {
    "drafted": "scheduler_drafted_slot_steps_total",
    "accepted": "scheduler_accepted_total",
    "tokens": "scheduler_tokens_total",
    "sessions": "scheduler_sessions_total",
    "replayed": "scheduler_replayed_total",
    "recoveries": "scheduler_recoveries_total",
    "failed": "scheduler_failed_total",
    "cancelled": "scheduler_cancelled_total",
    "attached": "draft_attached",
    "ready": "ready",
    "slots": "slots",
    "free_slots": "free_slots",
    "pages": "pages",
    "free_pages": "free_pages",
    "waiting": "queue_length",
}

_MAPPED = re.compile(r"/dev/shm/(slipstream-\S+)")

Counts = dict[str, float]


def counts(url: str) -> Counts:
    """The gateway's numbers now. Raises OSError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = float(value)
    return {name: found[key] for name, key in _COUNTED.items() if key in found}


def until_idle(url: str, timeout_s: float) -> Counts:
    """The numbers once every slot and page is free, or after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = counts(url)
        free = now["free_slots"] == now["slots"] and now["free_pages"] == now["pages"]
        if (free and now["waiting"] == 0) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


@dataclass
class Sampler:
    """Looks at a gateway again and again, on a thread, while its block runs."""

    url: str
    every_s: float = 0.1
    seen: list[tuple[float, Counts]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._over.wait(self.every_s):
            try:
                self.seen.append((time.monotonic(), counts(self.url)))
            except (OSError, ValueError):
                continue

    def drafting_again(self, since: float) -> float | None:
        """Seconds from `since` to the first look at which a later session had drafted."""
        before = [now for at, now in self.seen if at <= since]
        sessions = before[-1]["sessions"] if before else 0.0
        base: float | None = None
        for at, now in self.seen:
            if at > since and now["sessions"] > sessions:
                if base is not None and now["drafted"] > base:
                    return at - since
                base = now["drafted"] if base is None else base
        return None


@dataclass(frozen=True)
class Held:
    """What one process holds; memory in KiB."""

    fds: int
    maps: int
    threads: int
    rss: int
    gpu: int

    @classmethod
    def of(cls, pid: int, gpu: dict[int, int]) -> Held:
        """Raises OSError when there is no such process."""
        proc = Path("/proc") / str(pid)
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        return cls(
            len(os.listdir(proc / "fd")),
            (proc / "maps").read_text().count("\n"),
            int(status["Threads"]),
            int(status["VmRSS"].split()[0]),
            gpu.get(pid, 0),
        )


@dataclass(frozen=True)
class Sight:
    """All processes at one moment.

    Attributes:
        at: the count that growth is stated by, attaches or seconds.
        segments: see `segments`.
        devices: KiB used of each GPU, by whomever.
    """

    at: float
    held: dict[str, Held]
    segments: int
    devices: list[int]

    def values(self) -> dict[str, float]:
        """Every number under its name."""
        found: dict[str, float] = {"segments": self.segments}
        for name, held in self.held.items():
            found |= {f"{name} {key}": value for key, value in vars(held).items()}
        return found | {f"gpu{n} used": used for n, used in enumerate(self.devices)}


def look(at: float, pids: dict[str, int]) -> Sight:
    """What the processes hold now; those that are gone are left out."""
    gpu, devices = gpu_memory()
    held: dict[str, Held] = {}
    for name, pid in pids.items():
        try:
            held[name] = Held.of(pid, gpu)
        except OSError:
            continue
    return Sight(at, held, segments(pids.values()), devices)


def segments(pids: Iterable[int]) -> int:
    """Segments that one of the processes maps, and those whose owner is gone."""
    mapped: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            mapped |= set(_MAPPED.findall((Path("/proc") / str(pid) / "maps").read_text()))
    found = 0
    for path in Path("/dev/shm").glob("slipstream-*"):
        found += path.name in mapped or _ownerless(path)
    return found


def _ownerless(path: Path) -> bool:
    """Whether nobody holds the lock that the owner of a segment holds."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def gpu_memory() -> tuple[dict[int, int], list[int]]:
    """KiB of each process, where the driver tells, and of each GPU; nothing without a GPU."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        by_pid: dict[int, int] = {}
        devices: list[int] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            devices.append(pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 10)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                used = (process.usedGpuMemory or 0) >> 10
                by_pid[process.pid] = by_pid.get(process.pid, 0) + used
        return by_pid, devices
    except Exception:  # no such package, or no GPU
        return {}, _smi()


def _smi() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 10 for line in done.stdout.split() if line.isdecimal()]


LIMITS: dict[str, tuple[float, float]] = {
    "fds": (0.01, 3),
    "maps": (0.02, 6),
    "threads": (0.01, 3),
    "rss": (4.0, 4096),
    "gpu": (0.0, 2048),
    "used": (0.0, 4096),
    "segments": (0.0, 0),
}
"""Most growth that is none: per count, and in all, whichever is more. Memory in KiB; a heap moves
by a few pages while nothing is lost."""


def growth(
    sights: Sequence[Sight], factor: float = 1.0, rss: float = 0.0
) -> dict[str, dict[str, Any]]:
    """First and last value of every number, its slope by least squares, and whether it is flat.

    `factor` widens the limits; `rss` is the one in all of that memory, if it is more.
    """
    if len(sights) < 2:
        return {}
    rows = [sight.values() for sight in sights]
    span = sights[-1].at - sights[0].at
    found: dict[str, dict[str, Any]] = {}
    for name in rows[0]:
        pairs = [(s.at, row[name]) for s, row in zip(sights, rows, strict=True) if name in row]
        kind = name.rpartition(" ")[2]
        per, whole = LIMITS[kind]
        whole = max(whole, rss) if kind == "rss" else whole
        first, last = pairs[0][1], pairs[-1][1]
        most = max(per * span, whole) * factor
        found[name] = {
            "first": first, "last": last, "slope": slope(pairs), "flat": last - first <= most,
        }  # fmt: skip
    return found


def slope(pairs: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    count = len(pairs)
    x, y = sum(a for a, _ in pairs) / count, sum(b for _, b in pairs) / count
    wide = sum((a - x) ** 2 for a, _ in pairs)
    return round(sum((a - x) * (b - y) for a, b in pairs) / wide, 5) if wide else 0.0


def eventually(true: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it is true within the time."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
