"""The REST door under the same shapes of load: streamed completions, their events parsed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx

from slipstream.cli.client import (
    COMPLETIONS,
    Options,
    RequestFailed,
    ask,
    client,
    completion_body,
    model_name,
)
from slipstream.cli.prompts import Conversation
from tests.load.runs import Call, Load, Outcome


async def run(url: str, load: Load, rows: Sequence[Conversation]) -> Outcome:
    """The whole run. Raises RequestFailed when the gateway cannot be reached at its start."""
    calls: list[Call] = []
    async with client(url, load.streams) as http:
        model = await model_name(http)
        options = Options(model=model, max_tokens=load.tokens, temperature=0.0)

        async def call(number: int) -> None:
            calls.append(await one(http, load, rows[number % len(rows)], options))

        began = time.perf_counter()
        await drive(load, call)
        seconds = time.perf_counter() - began
    return Outcome("rest", load, seconds, calls)


async def one(http: httpx.AsyncClient, load: Load, row: Conversation, options: Options) -> Call:
    """One request, to its last token or to the deadline."""
    assert row.prompt is not None
    body = {**completion_body(row.prompt, options), "ignore_eos": True}
    deadline = None if load.deadline_ms is None else load.deadline_ms / 1e3
    began = time.perf_counter()
    try:
        async with asyncio.timeout(deadline):
            answer = await ask(http, COMPLETIONS, body)
    except TimeoutError:
        return Call("cut", _ms(began))
    except RequestFailed as error:
        return Call(str(error), _ms(began))
    first = None if answer.ttft is None else 1e3 * answer.ttft
    return Call("ok", 1e3 * (answer.ended - answer.sent), answer.tokens, first)


async def drive(load: Load, call: Callable[[int], Awaitable[None]]) -> None:
    """Makes the calls of `load`, as many at once as the present stage has streams."""
    numbers = itertools.count() if load.ramp else iter(range(load.requests))
    over = False

    async def stream() -> None:
        for number in numbers:
            if over:
                return
            await call(number)

    streams: list[asyncio.Task[None]] = []
    for level in load.levels:
        streams += [asyncio.create_task(stream()) for _ in range(level - len(streams))]
        await asyncio.wait(streams, timeout=load.stage_s)
    over = load.ramp is not None
    await asyncio.gather(*streams)


def _ms(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)
