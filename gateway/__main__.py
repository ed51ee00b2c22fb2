"""`python -m gateway`: the REST and gRPC doors on the main thread, the scheduler on its own."""

from __future__ import annotations

import os
import sys

# Before `tokenizers` is loaded: its own threads would compete with the scheduler's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Sequence

from gateway.scheduler import Scheduler
from gateway.server import run
from gateway.settings import GatewaySettings
from slipstream.settings import parse_or_exit


def main(argv: Sequence[str]) -> int:
    """Runs the gateway; the exit status: 0 after a signal, 2 when it cannot start."""
    settings = parse_or_exit(GatewaySettings, argv)
    return run(settings, lambda deliver: Scheduler(settings.scheduler(), deliver))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
