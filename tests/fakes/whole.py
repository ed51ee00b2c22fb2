"""The gateway's process with its own scheduler, over a fake target and draft that it holds itself.

`python -m tests.fakes.whole FLAGS` takes the gateway's flags. With `--target` it uses that target
instead, and the draft that `--draft` names. SLIPSTREAM_FAKE_CAP is the most output tokens of an
answer, whatever was asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from gateway.checkpoint import Checkpoint
from gateway.request import Deliver, GenerateParams
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


class CappedScheduler(Scheduler):
    """Gives no answer more than `cap` tokens."""

    cap = sys.maxsize

    def submit(self, params: GenerateParams) -> int:
        """As in `Scheduler`."""
        params.validate(self.info)
        tokens = min(params.max_tokens, self.cap)
        least = min(params.min_tokens, tokens)
        return super().submit(replace(params, max_tokens=tokens, min_tokens=least))


async def main(argv: Sequence[str]) -> None:
    cap = int(os.environ.get("SLIPSTREAM_FAKE_CAP", sys.maxsize))
    async with AsyncExitStack() as stack:
        if "--target" not in argv:
            runner = FakeTargetRunner(
                vocab=VOCAB, max_model_len=WINDOW, eos_ids=(2,), grammars=True, paranoid=False
            )
            target = await stack.enter_async_context(serve_fake(runner))
            drafts = await stack.enter_async_context(
                draft.serve(draft.FakeDraftRunner(vocab=VOCAB))
            )
            argv = [
                *argv,
                f"--target=127.0.0.1:{target.port}",
                f"--draft=127.0.0.1:{drafts.port}",
            ]
        settings = parse_or_exit(GatewaySettings, argv)
        log.setup(settings.log_level)

        def make(deliver: Deliver) -> Scheduler:
            scheduler = CappedScheduler(settings.scheduler(), deliver)
            scheduler.cap = cap
            return scheduler

        folder: Path = resolve_folder(settings.tokenizer)
        await serve(settings, Checkpoint.load(folder), make)


if __name__ == "__main__":
    serving.run(main(sys.argv[1:]))
