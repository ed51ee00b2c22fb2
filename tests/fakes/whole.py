"""The gateway's process with its own scheduler, over a fake target and draft that it holds itself.

`python -m tests.fakes.whole FLAGS` takes the gateway's flags but `--target` and `--draft`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from gateway.checkpoint import Checkpoint
from gateway.scheduler import Scheduler
from gateway.server import serve
from gateway.settings import GatewaySettings
from gateway.tokenizer import resolve_folder
from slipstream import log, serving
from slipstream.settings import parse_or_exit
from tests.fakes import draft
from tests.fakes.target import FakeTargetRunner, serve_fake

VOCAB = 320
WINDOW = 256


async def main(argv: Sequence[str]) -> None:
    runner = FakeTargetRunner(
        vocab=VOCAB, max_model_len=WINDOW, eos_ids=(2,), grammars=True, paranoid=False
    )
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serve_fake(runner))
        drafts = await stack.enter_async_context(draft.serve(draft.FakeDraftRunner(vocab=VOCAB)))
        servers = [f"--target=127.0.0.1:{target.port}", f"--draft=127.0.0.1:{drafts.port}"]
        settings = parse_or_exit(GatewaySettings, [*argv, *servers])
        log.setup(settings.log_level)
        folder: Path = resolve_folder(settings.tokenizer)
        await serve(
            settings,
            Checkpoint.load(folder),
            lambda deliver: Scheduler(settings.scheduler(), deliver),
        )


if __name__ == "__main__":
    serving.run(main(sys.argv[1:]))
