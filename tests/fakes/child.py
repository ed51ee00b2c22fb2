"""A process for the launcher's tests: says READY, then behaves as told; ignores other flags.

`--behave` is a comma-separated list: `silent` (never READY), `fail=N` (exits with N before READY),
`die=S` (exits with status 3 after S seconds), `deaf` (ignores SIGTERM), `family` (starts a process
of its own). `--trace FILE` gets one JSON line per start: the pids, and the other flags.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--behave", default="")
    parser.add_argument("--trace")
    options, flags = parser.parse_known_args()
    behave = dict(word.partition("=")[::2] for word in options.behave.split(",") if word)

    if "fail" in behave:
        print("error: --model: it is broken", file=sys.stderr)
        return int(behave["fail"])
    if "deaf" in behave:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    pids = [os.getpid()]
    if "family" in behave:
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    if options.trace:
        with open(options.trace, "a") as trace:
            trace.write(json.dumps({"pids": pids, "flags": flags}) + "\n")
    print("12:00:00.000 WARNING fake: about to be ready", file=sys.stderr, flush=True)
    if "silent" not in behave:
        print('READY {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}', flush=True)
    time.sleep(float(behave.get("die") or 60))
    return 3


if __name__ == "__main__":
    sys.exit(main())
