"""A process for the launcher's tests: says READY, then behaves as told; ignores other flags.

`--behave` is a comma-separated list: `silent` (never READY), `fail=N` (exits with N before READY),
`die=S` (exits with status 3 after S seconds), `cuda` (says an error of CUDA before it dies), `deaf`
(ignores SIGTERM), `family` (starts a process of its own), `again=N` (every start after the first
exits with N before READY). `--trace FILE` gets one JSON line per start: the pids, the other flags,
the variables of CUDA, the time in ns.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 20.0


def fake(behave: str = "", trace: Path | None = None) -> tuple[str, ...]:
    """Command line of such a process."""
    argv = (sys.executable, "-S", str(Path(__file__).resolve()), f"--behave={behave}")
    return (*argv, f"--trace={trace}") if trace else argv


def starts(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def pids(*traces: Path) -> list[int]:
    return [pid for trace in traces for start in starts(trace) for pid in start["pids"]]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--behave", default="")
    parser.add_argument("--trace")
    options, flags = parser.parse_known_args()
    behave = dict(word.partition("=")[::2] for word in options.behave.split(",") if word)

    later = bool(options.trace and starts(Path(options.trace)))
    wrong = behave.get("fail") or (behave.get("again") if later else None)
    if wrong:
        print("error: --model: it is broken", file=sys.stderr)
        return int(wrong)
    if "deaf" in behave:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    pids = [os.getpid()]
    if "family" in behave:
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    if options.trace:
        with open(options.trace, "a") as trace:
            cuda = {k: v for k, v in os.environ.items() if k.startswith("CUDA_")}
            start = {"pids": pids, "flags": flags, "cuda": cuda, "at": time.monotonic_ns()}
            trace.write(json.dumps(start) + "\n")
    print("12:00:00.000 WARNING fake: about to be ready", file=sys.stderr, flush=True)
    if "silent" not in behave:
        print('READY {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}', flush=True)
    time.sleep(float(behave.get("die") or 60))
    if "cuda" in behave:
        print("torch.AcceleratorError: CUDA error: an illegal memory access", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
