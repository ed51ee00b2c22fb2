"""A target process with a profiler around some of its steps: SIGUSR1 begins, SIGUSR2 ends.

    python -m benchmarks.profiled_target --profile-out FILE <flags of services.target>

FILE becomes JSON, first {"state": "started"}, at the end with what `benchmarks.call_table` makes of
the trace. Until SIGUSR1 the process is a plain target.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.call_table import CallTable, report
from benchmarks.stack import save
from services.target.__main__ import main as serve

ENGINE = "target-engine"
"""Name of the thread that enqueues steps."""

_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Profiled:
    """The window, on a thread of its own that nothing of the target waits for."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._table = CallTable(ENGINE)
        self._steps = 0

    def begin(self) -> None:
        """Before any other thread is there: the signals are this one's."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=self._run, name="profiler", daemon=True).start()
        self._count_steps()

    def _count_steps(self) -> None:
        from services.target.steps import Steps

        begin = Steps.begin

        def counted(steps: Any, plan: Any) -> Any:
            self._steps += 1
            return begin(steps, plan)

        setattr(Steps, "begin", counted)  # noqa: B010

    def _run(self) -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            try:
                self._window()
            except BaseException as error:
                text = "".join(traceback.format_exception(error))
                save(self._out, {"state": "failed", "error": text})

    def _window(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._table.patch()
        profiler = profile(activities=activities)
        profiler.start()
        self._table.on = True
        first, began = self._steps, time.monotonic()
        save(self._out, {"state": "started"})
        signal.sigwait({signal.SIGUSR2})
        self._table.on = False
        steps, seconds = self._steps - first, time.monotonic() - began
        profiler.stop()
        trace = self._out.with_suffix(".trace.json")
        profiler.export_chrome_trace(str(trace))
        found = report(trace, self._table, steps)
        trace.unlink()
        save(self._out, {"state": "done", "seconds": round(seconds, 3), **found})


def profile_window(pid: int, out: Path, run: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    """Has the process `pid` profile itself while `run` runs; returns its report.

    What `run` raises is noted there: what was seen until then still counts. Raises RuntimeError
    when the profiler does not begin, or end, in time, or failed.
    """

    def wait(states: Sequence[str]) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if out.exists():
                said: dict[str, Any] = json.loads(out.read_text())
                if said["state"] in states:
                    return said
            time.sleep(0.05)
        raise RuntimeError(f"the profiler did not get to {states} within {timeout_s:g} s")

    out.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    said = wait(("started", "failed"))
    interrupted = ""
    if said["state"] == "started":
        try:
            run()
        except RuntimeError as error:
            interrupted = str(error)
        finally:
            os.kill(pid, signal.SIGUSR2)
        said = wait(("done", "failed"))
    if said["state"] == "failed":
        raise RuntimeError(f"the profiler failed: {said['error']}")
    return said | ({"interrupted": interrupted} if interrupted else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Serves as the target does; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["--profile-out"] or len(words) < 2:
        print("error: --profile-out FILE comes first", file=sys.stderr)
        return 2
    Profiled(Path(words[1])).begin()
    return serve(words[2:])


if __name__ == "__main__":
    sys.exit(main())
