"""`python -m slipstream.models.prepare NAME`: makes a target ready and prints its folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.errors import ConfigError
from slipstream.models.resolve import resolve_model


def main(argv: Sequence[str]) -> int:
    """Prints the folder of the model named in `argv`; 1 and a reason on stderr if there is none."""
    if len(argv) != 1:
        print("usage: python -m slipstream.models.prepare NAME", file=sys.stderr)
        return 2
    try:
        print(resolve_model(argv[0]), flush=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
