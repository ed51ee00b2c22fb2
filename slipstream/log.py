"""Log lines of one process: time, level, logger, message; key=value where a line carries data."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


def setup(level: str = "info") -> None:
    """Sends the process's log to stderr at `level` (debug, info, warning, error)."""
    logging.basicConfig(
        level=level.upper(), format=FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
