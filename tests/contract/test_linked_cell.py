"""A cell whose handoff stays on devices, both servers with their own runners on a CPU, under the
gateway's scheduler: the tokens of plain decoding."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gateway.request import Chunk, GenerateParams
from gateway.scheduler import Scheduler
from gateway.settings import SchedulerSettings
from services.target.server import TargetServer
from tests.fakes.linked import BLOCK, target_of
from tests.tiny import make_pair

pytestmark = pytest.mark.anyio

TOKENS = 5


@dataclass
class Answers:
    """What the scheduler delivered, by request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Chunk] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        with self.changed:
            for number, chunk in batch:
                self.tokens.setdefault(number, []).extend(chunk.tokens)
                if chunk.finish != "none":
                    self.ended[number] = chunk
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        """Until so many requests have ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ended) == count, 120)


@dataclass
class Cell:
    """Addresses of both servers."""

    target: str
    draft: str

    async def answers(
        self, asked: Sequence[GenerateParams], draft: bool = True, **more: Any
    ) -> tuple[list[list[int]], dict[str, int]]:
        """The tokens of every request, and the scheduler's counters."""
        settings = SchedulerSettings(self.target, self.draft if draft else None, pin_nodes=True)
        answers = Answers()
        scheduler = Scheduler(replace(settings, **more), answers)
        scheduler.start()
        try:
            await asyncio.to_thread(scheduler.wait_ready, 30)
            numbers = [scheduler.submit(one) for one in asked]
            await asyncio.to_thread(answers.wait, len(asked))
            totals = dict(scheduler.snapshot().totals)
        finally:
            await asyncio.to_thread(scheduler.stop, 1.0)
        assert all(chunk.finish == "length" for chunk in answers.ended.values()), answers.ended
        return [answers.tokens[number] for number in numbers], totals


@asynccontextmanager
async def cell_of(folder: Path) -> AsyncIterator[Cell]:
    pair = make_pair(folder, "llama", "dflash", block_size=BLOCK)
    draft = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.linked", str(folder),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    target = TargetServer(lambda: target_of(pair), handoff="cuda_ipc", watchdog_ms=60_000)
    try:
        assert draft.stdin is not None and draft.stdout is not None
        await target.start("127.0.0.1", 0)
        await target.wait_loaded()
        port = int(await asyncio.wait_for(draft.stdout.readline(), 60))
        yield Cell(f"127.0.0.1:{target.port}", f"127.0.0.1:{port}")
        assert not target.failure.done() and draft.returncode is None
        draft.stdin.close()
        assert await asyncio.wait_for(draft.wait(), 30) == 0
    finally:
        if draft.returncode is None:
            draft.kill()
            await draft.wait()
        await target.stop()


def asked_of(count: int, **more: Any) -> list[GenerateParams]:
    return [
        GenerateParams(tuple(range(20 + i, 30 + 9 * i)), max_tokens=TOKENS + i, **more)
        for i in range(count)
    ]


@pytest.mark.slow
async def test_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    async with cell_of(tmp_path) as cell:
        asked = [*asked_of(2), *asked_of(2, temperature=0.8, seed=5, top_p=0.9)]
        want, _ = await cell.answers(asked, draft=False)
        for more in (
            {"tree": "chain"},
            {"tree": "top2gap", "width": 3, "budget": 8, "pipeline_depth": 0},
        ):
            got, totals = await cell.answers(asked, **more)
            assert got == want, more
            assert totals["drafted_slot_steps"] > 0 and totals["rejected"] == 0, totals
