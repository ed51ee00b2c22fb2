"""Which kernels a step runs, how often, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.call_table import LONGEST_NAME

STEPS, WARM = 5, 3


def profile(step: Callable[[], object], on_gpu: bool) -> dict[str, Any]:
    """Kernels (on a CPU: operators) by time, of the mean of STEPS steps.

    Raises RuntimeError when the profiler saw nothing.
    """
    for _ in range(WARM):
        step()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch_profile(activities=[activity]) as found:
        for _ in range(STEPS):
            step()
    table = []
    for event in found.key_averages():
        if on_gpu and event.device_type.name != "CUDA":
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        table.append(
            {
                "name": event.key[:LONGEST_NAME],
                "calls": round(event.count / STEPS, 2),
                "us": round(spent / STEPS, 2),
            }
        )
    if not table:
        raise RuntimeError("the profiler saw no kernel")
    table.sort(key=lambda row: -row["us"])
    return {
        "steps": STEPS,
        "calls": round(sum(row["calls"] for row in table), 2),
        "us": round(sum(row["us"] for row in table), 2),
        "kernels": table,
    }
