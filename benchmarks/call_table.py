"""Which calls of CUDA a thread made, how often and how long, and what its GPU did between steps.

Two sources: the profiler's trace (CUPTI, every call of the runtime), and counters around what
Python itself calls, the handoff's calls of the driver and torch's waits, which are right also where
CUPTI sees nothing.
"""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

BLOCKING = re.compile(
    r"(cuda|cu)(Stream|Event|Device|Ctx)Synchronize|cudaThreadSynchronize"
    r"|cudaMemcpy(2D|3D|Peer|ToSymbol|FromSymbol)?|cudaMemset(2D|3D)?|cuMemcpy\w*(?<!Async)"
    r"|cuda(Malloc|MallocHost|MallocManaged|Free|FreeHost|HostAlloc|HostRegister|HostUnregister)"
    r"|cuMem(Alloc|Free|AllocHost|FreeHost|HostAlloc|HostRegister|HostUnregister)"
    r"|cudaGraph(Instantiate\w*|ExecDestroy|Upload)|cu(Module|Library)(Load|Unload)\w*"
    r"|cudaStream(Create|Destroy)\w*"
)
"""Calls that wait for a device, or may: their whole names, without a version."""

VERIFY_BEGINS, VERIFY_ENDS = "_take_proposal", "_publish_context"
"""Kernels: the first of a step that takes a proposal, and the last of any step."""

LONGEST_NAME = 160

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


class CallTable:
    """Counts calls made through Python, by thread; `on` switches it."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.on = False
        self._seen: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._patched = False

    def patch(self) -> None:
        """Once: puts counters around the driver's calls and torch's waits."""
        if self._patched:
            return
        self._patched = True
        import torch

        from slipstream.handoff.cuda_ipc.driver import Driver

        setattr(Driver, "call", self._around(Driver.call, None))  # noqa: B010
        for owner, name in (
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Event, "query"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda, "synchronize"),
        ):
            setattr(owner, name, self._around(getattr(owner, name), f"{owner.__name__}.{name}"))

    def _around(self, call: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """`call`, counted under `name`; None: under its first argument."""

        @wraps(call)
        def timed(*args: Any, **more: Any) -> Any:
            if not self.on:
                return call(*args, **more)
            began = time.perf_counter_ns()
            try:
                return call(*args, **more)
            finally:
                spent = time.perf_counter_ns() - began
                self._seen[threading.current_thread().name, name or str(args[1])].append(spent)

        return timed

    def rows(self, steps: int, engine: bool = True) -> list[dict[str, Any]]:
        """What the engine's thread called, or the others."""
        found: dict[str, list[float]] = defaultdict(list)
        for (thread, name), spent in list(self._seen.items()):
            if (thread == self.engine) == engine:
                found[name] += [ns / 1e3 for ns in spent]
        return table(found, steps)

    def thread_ids(self) -> set[int]:
        """What a trace may call the engine's thread: CUPTI cuts the pthread's id to 32 bits."""
        found: set[int] = set()
        for thread in threading.enumerate():
            if thread.name == self.engine and thread.ident is not None:
                low = thread.ident & 0xFFFFFFFF
                found |= {thread.native_id or 0, thread.ident, low, low - (1 << 32)}
        return found


def table(spent: dict[str, list[float]], steps: int) -> list[dict[str, Any]]:
    """Calls by name, the most time first; times in us."""
    rows = [
        {
            "name": name,
            "per_step": round(len(times) / max(steps, 1), 3),
            "calls": len(times),
            "mean_us": round(sum(times) / len(times), 2),
            "longest_us": round(max(times), 2),
            "blocking": bool(BLOCKING.fullmatch(plain(name))),
        }
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["mean_us"] * row["calls"])


def plain(name: str) -> str:
    """A call's name without version and stream variant."""
    return re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", name)


def report(trace: Path, calls: CallTable, steps: int) -> dict[str, Any]:
    """Everything that a window of `steps` steps says."""
    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    return {
        "steps": steps,
        "trace": read_trace(events, calls.thread_ids(), steps),
        "python": {
            "note": "around the driver's calls of the handoff and torch's waits; no CUPTI",
            "engine": calls.rows(steps),
            "others": calls.rows(steps, engine=False),
        },
    }


def read_trace(
    events: Sequence[dict[str, Any]], engine: Iterable[int], steps: int
) -> dict[str, Any]:
    """Calls of the engine's thread and gaps of the GPU from a Chrome trace (times in us).

    Args:
        engine: ids that the engine's thread may have; where none is seen, the thread that launched
            most graphs is taken for it.
    """
    by_thread: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    on_gpu = []
    for event in events:
        if event.get("cat") in _CALLS:
            by_thread[event["tid"]][event["name"]].append(float(event.get("dur", 0)))
        elif event.get("cat") in _ON_GPU:
            on_gpu.append((float(event["ts"]), float(event.get("dur", 0)), str(event["name"])))
    found: dict[str, Any] = {"gpu": gaps(on_gpu), "kernels": kernels(on_gpu, steps)}
    if not by_thread:
        found["calls"] = "CUPTI recorded no call of CUDA"
        return found

    def graphs(thread: Any) -> int:
        return len(by_thread[thread].get("cudaGraphLaunch", ()))

    named = [thread for thread in by_thread if thread in set(engine)]
    chosen = max(named or list(by_thread), key=graphs)
    rows = table(by_thread[chosen], steps)
    found |= {
        "engine_by": "id" if named else "most graph launches",
        "calls": rows,
        "blocking_per_step": round(sum(r["per_step"] for r in rows if r["blocking"]), 4),
        "longest_call_us": max(row["longest_us"] for row in rows),
        "other_threads": {
            str(thread): table(calls, steps)
            for thread, calls in by_thread.items()
            if thread != chosen
        },
    }
    return found


def kernels(work: Sequence[tuple[float, float, str]], steps: int) -> list[dict[str, Any]]:
    """Of (begin, duration, name) of all that the GPU did: the most time first, in us."""
    spent: dict[str, list[float]] = defaultdict(list)
    for _, duration, name in work:
        spent[name[:LONGEST_NAME]].append(duration)
    rows = [
        {
            "name": name,
            "per_step": round(len(times) / max(steps, 1), 3),
            "median_us": round(statistics.median(times), 2),
            "us": round(sum(times) / max(steps, 1), 2),
        }
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def gaps(work: Sequence[tuple[float, float, str]]) -> Any:
    """Of (begin, duration, name) of all that the GPU did for the process: the pauses between steps.

    A gap between verifies: from the last kernel of a step to the first of the next.
    """
    if not work:
        return "CUPTI recorded no work of the GPU"
    ordered = sorted(work)
    between, ended = list[float](), None
    busy, idle_from = 0.0, ordered[0][0]
    for begin, duration, name in ordered:
        if VERIFY_BEGINS in name and ended is not None:
            between.append(begin - ended)
            ended = None
        if VERIFY_ENDS in name:
            ended = begin + duration
        busy += max(0.0, begin + duration - max(begin, idle_from))
        idle_from = max(idle_from, begin + duration)
    whole = idle_from - ordered[0][0]
    ranked = sorted(between)
    return {
        "records": len(ordered),
        "busy": round(busy / whole, 4) if whole else None,
        "between_verifies_us": {
            "n": len(ranked),
            "p50": round(ranked[len(ranked) // 2], 2),
            "p90": round(ranked[int(0.9 * (len(ranked) - 1))], 2),
            "max": round(ranked[-1], 2),
        }
        if ranked
        else f"no kernel {VERIFY_BEGINS} after {VERIFY_ENDS}",
    }
