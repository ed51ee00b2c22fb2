"""The `slipstream` command: up, bench, chat, version.

Each subcommand is imported when it is asked for, and none imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import slipstream

_USAGE = """\
usage: slipstream COMMAND [options]

  up       start target, draft and gateway as one, with one log
  bench    measure a running gateway: throughput, latency, acceptance
  chat     talk to a running gateway
  version  print the version

`slipstream COMMAND --help` lists a command's options.
"""
_COMMANDS = ("up", "bench", "chat")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words[:1]:
        case ["version" | "--version" | "-V"]:
            print(f"slipstream {slipstream.__version__}")
            return 0
        case ["help" | "--help" | "-h"]:
            print(_USAGE, end="")
            return 0
        case [name] if name in _COMMANDS:
            command = import_module(f"slipstream.cli.{name}")
            return int(command.main(words[1:]))
        case [name]:
            print(f"error: no command {name!r}\n\n{_USAGE}", end="", file=sys.stderr)
        case _:
            print(_USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
