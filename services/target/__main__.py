"""`python -m services.target`: one target process."""

from __future__ import annotations

import os

# Read once, when torch loads its OpenMP runtime: an idle pool must not spin while the draft works.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import sys
from collections.abc import Sequence

from services.target.runner import TargetRunner
from services.target.server import serve
from services.target.settings import TargetSettings
from slipstream import log, serving
from slipstream.errors import ConfigError
from slipstream.settings import parse_or_exit


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit status."""
    settings = parse_or_exit(TargetSettings, sys.argv[1:] if argv is None else argv)
    log.setup(settings.log_level)

    def load() -> TargetRunner:
        from services.target.loading import load_runner  # torch is imported with it

        return load_runner(settings)

    try:
        return serving.run(
            serve(
                load,
                settings.host,
                settings.port,
                watchdog_ms=settings.watchdog_ms,
                handoff=settings.handoff,
                drain_s=settings.drain_s,
                step_limit_s=settings.step_limit_s,
            )
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
