"""The demonstration: a cell of three processes, one streamed answer, a comparison, a proof.

First with the default settings: an answer as it comes, then the bundled prompts one by one, each
with the draft and without. Then with fp32 servers and the tree pinned: all prompts at once, with
the draft and without, which must give the same answers. The last line is one JSON object:

tok_s_draft, tok_s_plain, ratio: output tokens per second of one stream, and their quotient.
tau: tokens per verify step, the bonus included, with the draft.
identical: whether all fp32 answers were the same with and without the draft.
bf16_same: where bf16 is the default, how many of `prompts` answers were the same there; a near-tie
    may turn when another number of rows is computed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import orjson

from slipstream import hardware
from slipstream.cli import prompts, report
from slipstream.cli.bench import converse, run_all, warm_up
from slipstream.cli.client import CHAT, Answer, Options, RequestFailed, ask, chat_body, client
from slipstream.cli.console import BOLD, RESET, Console, use_colour
from slipstream.cli.launcher import Launcher, LaunchFailed
from slipstream.cli.prompts import Conversation
from slipstream.cli.up import PROGRAMS, announce, base_url, launcher_for
from slipstream.cli.up_settings import UpSettings, check
from slipstream.errors import ConfigError
from slipstream.settings import parse

MAX_TOKENS = 96
PINNED = ("--dtype=float32", "--tree=top2gap", "--width=4", "--budget=32")
_READY_S = 60.0


def main() -> int:
    """Runs the demonstration; the exit status is 1 when something failed or an answer differed."""
    try:
        result = asyncio.run(_demo(prompts.load(prompts.BUNDLED)))
    except (ConfigError, LaunchFailed, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    print(orjson.dumps(result).decode(), flush=True)
    return 0 if result["identical"] else 1


async def _demo(rows: Sequence[Conversation]) -> dict[str, Any]:
    options = Options(max_tokens=MAX_TOKENS, temperature=0.0, seed=0)
    async with _cell(()) as http:
        await _show_one(http, rows[0], options)
        drafted, plain = await _compare(http, rows, options)
    async with _cell(PINNED) as http:
        same = await _prove(http, rows, options)
    speeds = [_tokens_per_second(answers) for answers in (drafted, plain)]
    result = {
        "tok_s_draft": round(speeds[0], 2),
        "tok_s_plain": round(speeds[1], 2),
        "ratio": round(speeds[0] / speeds[1], 3),
        "tau": round(report.tau(drafted) or 0.0, 3),
        "cpu": f"{hardware.cpu_name()}, {hardware.cores()} cores",
        "identical": same == len(rows),
        "prompts": len(rows),
    }
    if hardware.has_bf16():
        result["bf16_same"] = _same(drafted, plain)
    return result


@asynccontextmanager
async def _cell(flags: Sequence[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A running cell of the default pair on free ports, and a client of it."""
    settings = check(parse(UpSettings, ["--port=0", "--grpc-port=0", *flags]))
    launcher = await launcher_for(settings, PROGRAMS, Console())
    async with launcher:
        if not flags:
            announce(settings, launcher.gateway)
        async with client(base_url(launcher.gateway), connections=32) as http:
            await _until_served(http, launcher)
            yield http


async def _until_served(http: httpx.AsyncClient, launcher: Launcher) -> None:
    """Waits for the gateway to hold its target. Raises LaunchFailed when that does not happen."""
    failure = asyncio.create_task(launcher.failure())
    deadline = time.monotonic() + _READY_S
    try:
        while not await _is_ready(http):
            if failure.done():
                raise LaunchFailed(failure.result())
            if time.monotonic() > deadline:
                raise LaunchFailed(f"the gateway had no target within {_READY_S:g} s")
            await asyncio.sleep(0.1)
    finally:
        failure.cancel()


async def _is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def _show_one(http: httpx.AsyncClient, row: Conversation, options: Options) -> None:
    """Streams one answer to the terminal."""
    question = row.turns[0]
    _heading(question)
    body = chat_body([{"role": "user", "content": question}], options)
    answer = await ask(http, CHAT, body, lambda text: print(text, end="", flush=True))
    print(f"\n[{answer.tokens} tokens, {answer.steps} verify steps]\n", flush=True)


async def _compare(
    http: httpx.AsyncClient, rows: Sequence[Conversation], options: Options
) -> tuple[list[Answer], list[Answer]]:
    """Each row with the draft and then without, one at a time: noise of the machine hits both."""
    _heading(f"{len(rows)} prompts, one at a time, with the draft and without")
    without = replace(options, draft=False)
    await warm_up(http, 1, options)
    await warm_up(http, 1, without)
    drafted: list[Answer] = []
    plain: list[Answer] = []
    for row in rows:
        await converse(http, row, options, drafted)
        await converse(http, row, without, plain)
        speeds = [_tokens_per_second(answers[-1:]) for answers in (drafted, plain)]
        print(f"{row.name:8} draft {speeds[0]:6.1f} tok/s   plain {speeds[1]:6.1f}", flush=True)
    print()
    return drafted, plain


async def _prove(http: httpx.AsyncClient, rows: Sequence[Conversation], options: Options) -> int:
    """All rows at once, with the draft and without; returns how many answers are the same.

    Raises RequestFailed when a request failed, or when no tree was verified: that proves nothing.
    """
    _heading(f"{len(rows)} prompts at once in fp32, tree pinned, with the draft and without")
    await warm_up(http, 1, options)
    runs = []
    for draft in (True, False):
        run = await run_all(http, rows, len(rows), replace(options, draft=draft))
        if run.errors:
            raise RequestFailed(run.errors[0])
        runs.append(run.answers)
    if not any(nodes > 1 for answer in runs[0] for nodes in answer.nodes):
        raise RequestFailed("nothing was drafted: the comparison proves nothing")
    same = _same(*runs)
    print(f"{same} of {len(rows)} answers are the same\n", flush=True)
    return same


def _same(left: Sequence[Answer], right: Sequence[Answer]) -> int:
    """Pairs of answers that agree in text, length in tokens, and end."""
    pairs = zip(left, right, strict=True)
    return sum((a.text, a.tokens, a.finish) == (b.text, b.tokens, b.finish) for a, b in pairs)


def _tokens_per_second(answers: Sequence[Answer]) -> float:
    """Output tokens per second of one stream, prefill included."""
    return sum(a.tokens for a in answers) / sum(a.ended - a.sent for a in answers)


def _heading(text: str) -> None:
    print(f"{BOLD}{text}{RESET}" if use_colour(sys.stdout) else text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
