"""What `step_time` has found so far: its file, and the table on the screen."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.stack import save

NOTE = (
    "Random weights: next to nothing is accepted, a step commits one token; times do not depend on "
    "values. wall: the whole call. gpu: events on the runner's stream around its recorded pieces, "
    "busy their sum (a piece has its launch where nothing is queued), span from the first to the "
    "end of the last, gaps included. context: mean of the case, which grows by a token a step."
)


class Report:
    """The result file, written anew after every case, and the table on the screen."""

    def __init__(self, path: Path) -> None:
        self._path, self.began = path, time.perf_counter()
        self.result: dict[str, Any] = {"machine": {}, "note": NOTE, "failures": []}

    def case(
        self, section: str, name: str, work: Callable[..., dict[str, Any]], *args: Any
    ) -> None:
        """Runs a case and records what it returns, or why it failed."""
        try:
            found = work(*args)
        except Exception as error:  # the others may still be measured
            self.failed(name, error)
            return
        self.result.setdefault(section, []).append(found)
        self.save()
        wall, floor = found["wall"], found["floor"]
        line = f"{name:<32} {found['rows']:>5} rows {_times(wall['total'])}"
        if "gpu" in found:
            line += f"  gpu {_busy(found['gpu']):8.3f}"
        line += f"  floor {floor['ms']:8.3f} x {floor['ratio']:.2f}"
        parts = [f"{key} {part['median_ms']:.3f}" for key, part in wall.items() if key != "total"]
        print(line + ("  " + ", ".join(parts) if parts else ""), flush=True)

    def failed(self, name: str, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        self.result["failures"].append({"case": name.strip(), "traceback": text})
        print(f"{name:<32} FAILED: {error!r}\n{text}", flush=True)
        self.save()

    def save(self) -> None:
        self.result["seconds"] = round(time.perf_counter() - self.began, 1)
        save(self._path, self.result)


def _times(part: dict[str, float]) -> str:
    low, high = part["min_ms"], part["p90_ms"]
    return f"{part['median_ms']:8.3f} ms (min {low:8.3f}, p90 {high:8.3f})"


def _busy(gpu: dict[str, dict[str, float]]) -> float:
    return sum(part["median_ms"] for name, part in gpu.items() if name.endswith("busy"))
