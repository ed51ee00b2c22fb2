"""`python -m gateway`: the REST and gRPC doors on the main thread, the scheduler on its own."""

from __future__ import annotations

import os
import sys

# Before `tokenizers` is loaded: its own threads would compete with the scheduler's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import asyncio
from collections.abc import Sequence

import uvloop

from gateway.scheduler import Scheduler
from gateway.server import serve
from gateway.settings import GatewaySettings
from gateway.template import ChatTemplate
from gateway.tokenizer import Tokenizer, resolve_folder
from slipstream import log
from slipstream.errors import ConfigError
from slipstream.settings import parse_or_exit

SWITCH_INTERVAL_S = 0.0005
"""The longest that Python code on one thread keeps the scheduler's thread waiting."""


def main(argv: Sequence[str]) -> int:
    """Runs the gateway; the exit status: 0 after a signal, 2 when it cannot start."""
    settings = parse_or_exit(GatewaySettings, argv)
    log.setup(settings.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        folder = resolve_folder(settings.tokenizer)
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                serve(
                    settings,
                    tokenizer,
                    template,
                    lambda deliver: Scheduler(settings.scheduler(), deliver),
                )
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
