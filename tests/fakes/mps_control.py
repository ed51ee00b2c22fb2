"""Stands in for nvidia-cuda-mps-control: `-d` leaves a daemon and one server, else takes commands.

`install` puts it on a PATH. What is written to the file `behave` beside the program is obeyed,
words apart by commas: `refuse` (no daemon is started), `mute` (commands get no answer), `deaf`
(neither `quit` nor SIGTERM ends the daemon), `fault` (the server has seen a fault). The file
`trace` there gets a JSON line per daemon.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

NAME = "nvidia-cuda-mps-control"


def install(folder: Path) -> Path:
    """The program in `folder`, which is to be on the PATH."""
    program = folder / NAME
    program.write_text(f"#!{sys.executable} -S\n{Path(__file__).read_text()}")
    program.chmod(0o755)
    return program


def behave(program: Path, words: str = "") -> None:
    (program.parent / "behave").write_text(words)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def running(program: Path) -> list[int]:
    """Every daemon and server that still is."""
    return [pid for daemon in daemons(program) for pid in daemon["pids"] if alive(pid)]


def daemons(program: Path) -> list[dict[str, Any]]:
    """Every daemon that was started, oldest first: pids and variables."""
    trace = program.parent / "trace"
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def main() -> int:
    home, pipe = Path(__file__).parent, Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    words = (home / "behave").read_text().split(",") if (home / "behave").exists() else []
    if sys.argv[1:] == ["-d"]:
        if "refuse" in words:
            print("An instance of this daemon is already running")
            return 1
        _daemon(home, pipe, words)
        return 0
    if "mute" in words:
        time.sleep(60)
    try:
        daemon, server = map(int, (pipe / "control").read_text().split())
    except OSError:
        daemon = server = 0
    if not alive(daemon):
        print("Cannot find MPS control daemon process")
        return 1
    for line in sys.stdin:
        if line == "get_server_list\n":
            print(server)
        elif line == f"get_server_status {server}\n":
            print("FAULT" if "fault" in words else "ACTIVE")
        elif line == "quit\n" and "deaf" not in words:
            os.kill(server, signal.SIGTERM)
            os.kill(daemon, signal.SIGTERM)
    return 0


def _daemon(home: Path, pipe: Path, words: list[str]) -> None:
    """Returns in the caller; the daemon and its server sleep until they are killed."""
    ready, say = os.pipe()
    if os.fork():
        os.read(ready, 1)
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in words else signal.SIG_DFL)
    server = os.fork()
    if server:
        pids = [os.getpid(), server]
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        with (home / "trace").open("a") as trace:
            trace.write(json.dumps({"pids": pids, **{n: os.environ.get(n) for n in names}}) + "\n")
        (pipe / "control").write_text(" ".join(map(str, pids)))
        os.write(say, b"x")
    time.sleep(60)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
