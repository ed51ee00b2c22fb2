"""`slipstream bench`: measures a running gateway from outside, by its REST stream."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream import hardware
from slipstream.cli import prompts, report
from slipstream.cli.client import (
    CHAT,
    COMPLETIONS,
    Answer,
    Options,
    RequestFailed,
    ask,
    chat_body,
    client,
    completion_body,
    model_name,
)
from slipstream.cli.prompts import Conversation, Endpoint
from slipstream.errors import ConfigError
from slipstream.settings import ProcessSettings, parse

WARMUP = "Name the {} largest rivers of an invented continent and say one thing about each."
"""Asked before measuring; of no prompt set."""

_WARMUP_TOKENS = 32


class BenchSettings(ProcessSettings):
    """Measures a running gateway: throughput, latency, and what drafting did.

    Warm-up requests, on prompts of their own, come first and are not counted.
    """

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_BENCH_", cli_prog_name="slipstream bench", cli_hide_none_type=True
    )

    url: str = Field("http://127.0.0.1:8000", description="the gateway")
    prompts: Path = Field(
        prompts.BUNDLED,
        description="JSON lines with prompt, turns, messages or prompt_ids; default: ten bundled",
    )
    concurrency: str = Field("1", description="streams at once, one run for each: 1,8")
    max_tokens: int = Field(256, ge=1, description="output tokens of an answer at most")
    limit: int | None = Field(None, ge=1, description="use only the first so many prompts")
    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy")
    seed: int = Field(0, description="seed of every request")
    draft: bool = Field(True, description="--no-draft asks for plain decoding")
    endpoint: Endpoint = Field(
        "auto", description="chat, completions, or auto: completions for prompt_ids only"
    )
    model: str | None = Field(None, description="default: the served one")
    timeout_s: float = Field(600.0, gt=0, description="seconds without a chunk until an error")
    out: Path | None = Field(None, description="write the JSON here too")

    @field_validator("concurrency")
    @classmethod
    def _numbers(cls, value: str) -> str:
        for word in value.split(","):
            if not word.strip().isdecimal() or int(word) < 1:
                raise ValueError("want numbers of at least 1, with commas between them")
        return value

    @property
    def streams(self) -> list[int]:
        """The concurrency of each run."""
        return [int(word) for word in self.concurrency.split(",")]


OnDone = Callable[[], None]


def main(argv: Sequence[str]) -> int:
    """Runs the measurement; the exit status is 1 when a request failed, 2 for bad options."""
    console = Console(stderr=True)
    try:
        settings = parse(BenchSettings, argv)
        rows = prompts.load(settings.prompts, settings.endpoint, settings.limit)
        if settings.out is not None and not settings.out.parent.is_dir():
            raise ConfigError(f"--out: no folder {settings.out.parent}")
        result = asyncio.run(_measure(settings, rows, console))
    except (ConfigError, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2).decode()
    if settings.out is not None:
        settings.out.write_text(text + "\n")
    tables = Console()
    tables.print(report.throughput_table(result["runs"]))
    if any(run["steps"] for run in result["runs"]):
        tables.print(report.acceptance_table(result["runs"]))
    print(text)
    return 1 if any(run["errors"] for run in result["runs"]) else 0


async def run_all(
    http: httpx.AsyncClient,
    rows: Sequence[Conversation],
    concurrency: int,
    options: Options,
    on_done: OnDone | None = None,
) -> report.Run:
    """Asks every row, `concurrency` at a time, each as soon as there is room.

    Answers are in the order of the rows; of a row with several turns, of the turns.
    """
    queue = iter(enumerate(rows))
    answers: list[list[Answer]] = [[] for _ in rows]
    errors: list[str] = []

    async def work() -> None:
        for index, row in queue:
            try:
                await converse(http, row, options, answers[index])
            except RequestFailed as error:
                errors.append(str(error))
            if on_done is not None:
                on_done()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(concurrency, len(rows)))))
    seconds = time.perf_counter() - began
    return report.Run(concurrency, seconds, [a for row in answers for a in row], errors)


async def converse(
    http: httpx.AsyncClient, row: Conversation, options: Options, answers: list[Answer]
) -> None:
    """Appends the answers to `row`: one, or one per turn. Raises RequestFailed."""
    if row.prompt is not None:
        answers.append(await ask(http, COMPLETIONS, completion_body(row.prompt, options)))
        return
    messages = list(row.messages)
    for turn in row.turns:
        messages.append({"role": "user", "content": turn})
        answer = await ask(http, CHAT, chat_body(messages, options))
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})


async def warm_up(
    http: httpx.AsyncClient, streams: int, options: Options, measured: Sequence[Conversation] = ()
) -> int:
    """Short requests, `streams` at once, on prompts that `measured` does not have.

    Returns their number. Raises RequestFailed when one fails: measuring would be pointless.
    """
    taken = {text for row in measured for text in row.texts}
    texts = (WARMUP.format(number) for number in range(2, 2 + 2 * streams))
    rows = [Conversation("warm-up", turns=[text]) for text in texts if text not in taken]
    run = await run_all(http, rows, streams, replace(options, max_tokens=_WARMUP_TOKENS))
    if run.errors:
        raise RequestFailed(run.errors[0])
    return len(rows)


async def _measure(
    settings: BenchSettings, rows: Sequence[Conversation], console: Console
) -> dict[str, Any]:
    streams = settings.streams
    runs = []
    async with client(settings.url, max(streams), settings.timeout_s) as http:
        options = Options(
            model=settings.model or await model_name(http),
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            draft=settings.draft,
        )
        warmed = await warm_up(http, max(streams), options, rows)
        console.print(f"{warmed} warm-up requests, on prompts outside the measured set")
        with _progress(console) as progress:
            for number in streams:
                task = progress.add_task(f"{number} streams", total=len(rows))
                done = partial(progress.advance, task)
                runs.append((await run_all(http, rows, number, options, done)).summary())
    return {
        "url": settings.url,
        "model": options.model,
        "prompts": settings.prompts.name,
        "rows": len(rows),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "draft": options.draft,
        "endpoint": settings.endpoint,
        "warm_up": f"{warmed} requests on prompts outside the measured set",
        "client": hardware.describe(),
        "runs": runs,
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
