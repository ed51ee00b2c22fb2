"""How long do running streams wait for a token while a long prompt arrives?

Eight streams run on the embedded pair; prompts of about 6,000 tokens arrive, one after the other.
The worst time between two messages of a stream meanwhile is compared with 2 x (one chunk + one
step), all measured in the same run: a chunk is the time to the first token of such a prompt when
nothing else runs, over its chunks; a step is the median time between two messages of the streams
just before. Later chunks attend to more and take longer than the mean one; this is not allowed for.

    python -m benchmarks.long_prompt --out benchmarks/results/long_prompt.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.speed import scrape
from benchmarks.stack import Stack, machine, save, stack
from slipstream import channels
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

STREAMS = 8
PROMPT = 6144  # tokens
WINDOW = 6400
STREAM_TOKENS = 4000  # more than a run takes
CALM_S = 4.0
CHUNK_VARIABLE = "SLIPSTREAM_GATEWAY_MAX_PREFILL_CHUNK"
OWN_CHUNK = 512  # prompt rows that a target on a CPU takes at once


@dataclass
class Times:
    """When the messages of one request came, on `time.perf_counter`."""

    sent: float = 0.0
    came: list[float] = field(default_factory=list)
    tokens: int = 0

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between neighbours, of every gap that some of this time lies in."""
        pairs = zip(self.came, self.came[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > since and earlier < until]


def request(ids: Sequence[int], tokens: int) -> gateway_pb2.GenerateRequest:
    made = gateway_pb2.GenerateRequest(max_tokens=tokens, temperature=0, ignore_eos=True)
    made.token_ids.ids.extend(ids)
    return made


async def follow(stub: Any, asked: gateway_pb2.GenerateRequest, times: Times) -> None:
    """One request to its end, or until it is cancelled."""
    times.sent = time.perf_counter()
    async for message in stub.Generate(asked):
        if message.token_ids:
            times.came.append(time.perf_counter())
            times.tokens += len(message.token_ids)


def prompt(rows: random.Random, count: int) -> list[int]:
    return [rows.randrange(1000, 40000) for _ in range(count)]


@asynccontextmanager
async def streams(stub: Any, rows: random.Random) -> AsyncIterator[list[Times]]:
    """Eight streams that run on, each past its first token; cancelled at exit."""
    found = [Times() for _ in range(STREAMS)]
    running = [
        asyncio.create_task(follow(stub, request(prompt(rows, 20), STREAM_TOKENS), times))
        for times in found
    ]
    try:
        while not all(times.came for times in found):
            await asyncio.sleep(0.05)
            for task in running:
                if task.done():
                    task.result()
        yield found
        ended = sum(task.done() for task in running)
        if ended:
            raise RuntimeError(f"{ended} streams ended before the measurement did")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def alone(running: Stack, stub: Any, rows: random.Random) -> dict[str, float]:
    """A long prompt on an idle stack: seconds to its first token, and what a chunk takes."""
    before, times = scrape(running), Times()
    await follow(stub, request(prompt(rows, PROMPT), 1), times)
    after = scrape(running)
    chunks = after["prefill_steps"] - before["prefill_steps"]
    return {
        "first_token_s": times.came[0] - times.sent,
        "chunks": chunks,
        "chunk_ms": 1e3 * (times.came[0] - times.sent) / chunks,
        "target_ms_per_chunk": 1e3 * (after["computed"] - before["computed"]) / chunks,
    }


def milliseconds(gaps: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e3 * gap for gap in gaps)
    return {
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(0.99 * len(ordered))], 1),
        "worst": round(ordered[-1], 1),
    }


async def arrivals(
    running: Stack, stub: Any, rows: random.Random, count: int, chunk_ms: float
) -> list[dict[str, Any]]:
    """Long prompts among the streams, one after the other, a calm time before each."""
    found = []
    async with streams(stub, rows) as others:
        for _ in range(count):
            calm = time.perf_counter()
            await asyncio.sleep(CALM_S)
            now, before, long = time.perf_counter(), scrape(running), Times()
            await follow(stub, request(prompt(rows, PROMPT), 4), long)
            first, after = long.came[0], scrape(running)
            await asyncio.sleep(0.5)
            calm_gaps = [gap for times in others for gap in times.gaps(calm, now)]
            gaps = [gap for times in others for gap in times.gaps(now, first)]
            bound = 2 * (chunk_ms + 1e3 * statistics.median(calm_gaps))
            found.append(
                {
                    "bound_ms": round(bound, 1),
                    "worst_over_bound": round(1e3 * max(gaps) / bound, 3),
                    "gaps_over_bound": sum(1e3 * gap > bound for gap in gaps),
                    "first_token_s": round(first - long.sent, 2),
                    "prefill_steps": int(after["prefill_steps"] - before["prefill_steps"]),
                    "calm_gap_ms": milliseconds(calm_gaps),
                    "gap_ms": milliseconds(gaps),
                    "gaps": len(gaps),
                }
            )
    return found


async def measure(running: Stack, count: int) -> dict[str, Any]:
    """One stack: a chunk alone, then arrivals, each against its bound."""
    rows = random.Random(11)
    async with AsyncExitStack() as cleanup:
        channel = await cleanup.enter_async_context(
            grpc.aio.insecure_channel(
                f"127.0.0.1:{running.grpc_port}", options=channels.client_options()
            )
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await follow(stub, request(prompt(rows, 600), 24), Times())
        chunks = [await alone(running, stub, rows) for _ in range(2)]
        chunk = min(one["chunk_ms"] for one in chunks)
        found = await arrivals(running, stub, rows, count, chunk)
        chunks.append(await alone(running, stub, rows))
    return {
        "chunk_ms": round(chunk, 1),
        "alone": [{key: round(value, 3) for key, value in one.items()} for one in chunks],
        "arrivals": found,
        "kept": sum(one["worst_over_bound"] <= 1 for one in found),
    }


def show(chunk: str, result: dict[str, Any]) -> None:
    for one in result["arrivals"]:
        print(
            f"chunk {chunk}: worst gap {one['gap_ms']['worst']} ms (p99 {one['gap_ms']['p99']}), "
            f"bound 2 x ({result['chunk_ms']} + {one['calm_gap_ms']['median']}) = "
            f"{one['bound_ms']} ms, {one['worst_over_bound']} of it; "
            f"worst without the prompt {one['calm_gap_ms']['worst']} ms",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", default="0,256,64", help="rows; 0: as it is")
    parser.add_argument("--arrivals", type=int, default=3)
    parser.add_argument("--up", default="", help='further options of up: --up="--draft none"')
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"prompt_tokens": PROMPT, "streams": STREAMS, "chunks": {}}
    for rows in map(int, args.chunks.split(",")):
        os.environ.pop(CHUNK_VARIABLE, None)
        if rows:
            os.environ[CHUNK_VARIABLE] = str(rows)
        name = str(rows) if rows else f"as it is ({OWN_CHUNK})"
        options = ["--slots", str(STREAMS + 1), "--max-model-len", str(WINDOW)]
        with stack(*options, *shlex.split(args.up)) as running:
            result["chunks"][name] = asyncio.run(measure(running, args.arrivals))
        show(name, result["chunks"][name])
        if args.out is not None:
            save(args.out, result | {"machine": machine()})
    kept = all(one["kept"] == args.arrivals for one in result["chunks"].values())
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
