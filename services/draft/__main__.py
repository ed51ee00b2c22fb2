"""`python -m services.draft`: one draft process."""

from __future__ import annotations

import os

# Read once, when torch loads its OpenMP runtime: an idle pool must not spin while the target works.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import sys
from collections.abc import Sequence

from services.draft.runner import DraftRunner
from services.draft.server import serve
from services.draft.settings import DraftSettings
from slipstream import log, serving
from slipstream.errors import ConfigError
from slipstream.settings import parse_or_exit


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit status."""
    settings = parse_or_exit(DraftSettings, sys.argv[1:] if argv is None else argv)
    log.setup(settings.log_level)

    def load() -> DraftRunner:
        from services.draft.loading import load_runner  # torch is imported with it

        return load_runner(settings)

    try:
        return serving.run(
            serve(
                load,
                settings.host,
                settings.port,
                tree=settings.tree_spec,
                max_sessions=settings.max_sessions,
                handoff_address=settings.handoff_address,
                warm=settings.warmup,
                step_limit_s=settings.step_limit_s,
            )
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
