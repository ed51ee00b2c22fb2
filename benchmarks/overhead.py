"""What does the gateway cost: processor time per token, and time that a request waits for it?

Fakes that answer at once are target and draft, as in `gateway_rate`. Three questions:

- load: 64 streams at once, through gRPC and through REST: the gateway's processor time per token,
  and where it goes (py-spy on every thread): scheduler, detokenizer, the doors, gRPC's own threads.
- latency: one request at a time, alternating between the doors: until its first token and until
  its end; what REST adds to gRPC. Connections are open before the clock starts.
- prompts: processor time per prompt token of text over that of the same prompts as token ids.

Threads that run no Python are gRPC's. The client decodes little and shares the cores; its own time
is in the latency, and grpc.aio takes more of it than a bare socket.

    python -m benchmarks.overhead --tokenizer FOLDER --out benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from benchmarks.gateway_rate import (
    GENERATE,
    STREAMS,
    Case,
    Profiler,
    Served,
    Spent,
    cell,
    cpu_seconds,
    load,
    prompt,
    run_once,
    start_profiler,
)
from benchmarks.plan_latency import long_prompt
from benchmarks.stack import machine, save
from slipstream import channels
from slipstream.v1 import gateway_pb2

NODES = 16
EVENT_LOOP, SCHEDULER, READERS = "event loop", "scheduler", "readers of step results"
NATIVE = "gRPC's threads"
ROOTS = ("__main__.py", "server.py", "app.py")  # below everything on the event loop
PARTS = {
    "stream.py": "detokenizer",
    "tokenizer.py": "detokenizer",
    "frames.py": "SSE encoding",
    "responses.py": "SSE encoding",
    "servicer.py": "gRPC door",
    "generation.py": "chunks to answers",
    "board.py": "chunks to answers",
}

Prompt = list[int] | str


@dataclass(frozen=True)
class Waited:
    """Seconds until the first token and until the end of one request."""

    first: float
    whole: float


class Doors:
    """One open connection to each door of a gateway."""

    def __init__(self, ready: dict[str, str]) -> None:
        self._address = ready["http"]
        self._channel = grpc.aio.insecure_channel(ready["grpc"], options=channels.client_options())
        self._call = self._channel.unary_stream(
            GENERATE, request_serializer=gateway_pb2.GenerateRequest.SerializeToString
        )

    async def __aenter__(self) -> Doors:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._writer.close()
        await self._channel.close()

    async def grpc(self, asked: Prompt, tokens: int) -> Waited:
        """A Generate call, its messages not decoded."""
        request = gateway_pb2.GenerateRequest(max_tokens=tokens, temperature=0, ignore_eos=True)
        if isinstance(asked, str):
            request.text = asked
        else:
            request.token_ids.ids.extend(asked)
        began, first = time.perf_counter(), 0.0
        async for _ in self._call(request):
            first = first or time.perf_counter() - began
        return Waited(first, time.perf_counter() - began)

    async def rest(self, asked: Prompt, tokens: int) -> Waited:
        """A streamed completion, its events not decoded."""
        body = json.dumps(
            {
                "prompt": asked,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        await self._reader.readuntil(b"data: {")
        first = time.perf_counter() - began
        await self._reader.readuntil(b"data: [DONE]")
        whole = time.perf_counter() - began
        await self._reader.readuntil(b"0\r\n\r\n")  # the chunk that ends the body
        return Waited(first, whole)


def quartiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median and both quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "median": round(1e3 * middle, 3),
        "q1": round(1e3 * low, 3),
        "q3": round(1e3 * high, 3),
    }


async def latency(ready: dict[str, str], rounds: int) -> dict[str, Any]:
    """Requests one at a time, the doors in turn."""
    asks: dict[str, tuple[Prompt, int]] = {
        "20 ids, 1 token": (prompt(3), 1),
        "20 ids, 64 tokens": (prompt(4), 64),
        "text of 1,000 words, 1 token": (" ".join(long_prompt(1).split()[:1000]), 1),
    }
    found: dict[str, Any] = {}
    async with Doors(ready) as doors:
        both: dict[str, Callable[[Prompt, int], Awaitable[Waited]]] = {
            "grpc": doors.grpc,
            "rest": doors.rest,
        }
        for name, (asked, tokens) in asks.items():
            waits: dict[str, list[Waited]] = {door: [] for door in both}
            for turn in range(rounds + 5):
                for door, ask in both.items():
                    waited = await ask(asked, tokens)
                    if turn >= 5:
                        waits[door].append(waited)
            cells: dict[str, Any] = {
                door: {
                    "first_ms": quartiles([one.first for one in rows]),
                    "whole_ms": quartiles([one.whole for one in rows]),
                }
                for door, rows in waits.items()
            }
            for part in ("first_ms", "whole_ms"):
                added = cells["rest"][part]["median"] - cells["grpc"][part]["median"]
                cells[f"rest_adds_{part}"] = round(added, 3)
            found[name] = cells
    return found


async def prompts(ready: dict[str, str], gateway: psutil.Process, rounds: int) -> dict[str, Any]:
    """Gateway time per prompt token: of text, of ids, and the difference, the tokenizer's."""
    words = [" ".join(long_prompt(i).split()[:2000]) for i in range(rounds)]
    ids = [[1000 + (7 * i + j) % 40000 for j in range(2000)] for i in range(rounds)]
    found = {}
    async with Doors(ready) as doors:
        for name, asked in (("text", words), ("ids", ids)):
            await doors.grpc(asked[0], 1)
            before = cpu_seconds(gateway)
            for one in asked:
                await doors.grpc(one, 1)
            spent = cpu_seconds(gateway) - before
            found[f"{name}_us_per_prompt_token"] = round(1e6 * spent / (2000 * rounds), 3)
    return found


@contextmanager
def profiled(pid: int, out: list[str]) -> Iterator[None]:
    """Samples of process `pid` meanwhile, as lines of "thread;frames count" in `out`."""
    profiler: Profiler = start_profiler(pid)
    time.sleep(1.0)  # it attaches
    try:
        yield
    finally:
        profiler.process.send_signal(signal.SIGINT)
        profiler.process.wait(30)
        out.extend(profiler.out.read_text().splitlines())
        profiler.folder.cleanup()


def kind(name: str, frames: list[str]) -> str:
    """Which of the gateway's threads one is, by its name and what it was seen to run."""
    if name in ("scheduler", "target-reader", "draft-reader"):
        return SCHEDULER if name == "scheduler" else READERS
    if "MainThread" in name:
        return EVENT_LOOP
    foreign = "_poll_wrapper" in name or any("grpc/" in frame for frame in frames)
    return NATIVE if foreign else f"thread {name}"


def part(thread: str, frames: list[str]) -> str:
    """What a sample was busy with: the innermost function of the gateway says it."""
    if thread != EVENT_LOOP:
        return thread
    for frame in reversed(frames):
        function, _, place = frame.partition(" (gateway/")
        file = place.partition(":")[0]
        if not file or file in ROOTS:
            continue
        if file == "stream.py" and not function.startswith("Detokenizer."):
            return "event loop: stop strings"
        return f"event loop: {PARTS.get(file, 'other code of the gateway')}"
    return "event loop: loop, sockets, gRPC"


def shares(lines: list[str], spent: Spent) -> dict[str, Any]:
    """Processor time per token by part: each thread's own clock, its parts by their samples."""
    names: dict[int, str] = {}
    samples: Counter[tuple[str, str]] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        head, *frames = stack.split(";")
        number, _, name = head.partition("): ")
        thread = kind(name, frames)
        names[int(number.rpartition("(")[2])] = thread
        samples[thread, part(thread, frames)] += int(count)
    clock: defaultdict[str, float] = defaultdict(float)
    for number_, seconds in spent.threads.items():
        clock[names.get(number_, NATIVE)] += seconds
    of_thread: Counter[str] = Counter()
    for (thread, _), n in samples.items():
        of_thread[thread] += n
    parts: defaultdict[str, float] = defaultdict(float)
    for (thread, name), n in samples.items():
        parts[name] += 1e6 * clock[thread] / spent.tokens * n / of_thread[thread]
    for thread in clock.keys() - of_thread.keys():  # seen by the clock alone
        parts[thread] += 1e6 * clock[thread] / spent.tokens
    total = sum(parts.values()) or 1.0
    return {
        name: {"us_per_token": round(us, 2), "percent": round(100 * us / total, 1)}
        for name, us in sorted(parts.items(), key=lambda item: -item[1])
    }


def under_load(
    runner: asyncio.Runner, door: str, accept: float | None, tokens: int, found: dict[str, Served]
) -> dict[str, Any]:
    """64 streams through one door, once by the clock and once more with the profiler."""
    case = Case(door, accept, NODES, tokens)
    runner.run(load(door, found["gateway"].ready, 50))
    spent = run_once(runner, case, found)
    lines: list[str] = []
    with profiled(found["gateway"].process.pid, lines):
        again = run_once(runner, case, found)
    return {
        "streams": STREAMS,
        "tokens_s": round(spent.tokens / spent.seconds),
        "tokens_per_message": round(spent.tokens / sum(one.messages for one in spent.got), 2),
        "gateway_us_per_token": round(1e6 * spent.cpu["gateway"] / spent.tokens, 2),
        "profiled": {
            "gateway_us_per_token": round(1e6 * again.cpu["gateway"] / again.tokens, 2),
            "samples": sum(int(line.rpartition(" ")[2]) for line in lines),
            "parts": shares(lines, again),
        },
    }


def measure(accept: float | None, tokenizer: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """All three questions on one pair of fakes."""
    result: dict[str, Any] = {}
    with cell(accept, NODES, tokenizer) as found, asyncio.Runner() as runner:
        ready = found["gateway"].ready
        result["latency"] = runner.run(latency(ready, rounds))
        gateway = psutil.Process(found["gateway"].process.pid)
        result["prompts"] = runner.run(prompts(ready, gateway, max(2, rounds // 5)))
        for door in ("grpc", "rest"):
            result[f"load, {door}"] = under_load(runner, door, accept, tokens, found)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of 49,152 ids")
    parser.add_argument("--accept", default="none,0.7", help="cells, by the draft's luck")
    parser.add_argument("--tokens", type=int, default=2000, help="of each of 64 streams")
    parser.add_argument("--rounds", type=int, default=200, help="requests of each kind alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if shutil.which("py-spy") is None:
        print("error: needs py-spy: pip install py-spy", file=sys.stderr)
        return 2
    cases: dict[str, Any] = {}
    for word in args.accept.split(","):
        accept = None if word == "none" else float(word)
        name = "no draft" if accept is None else f"chain {NODES}, p {accept:g}"
        cases[name] = measure(accept, args.tokenizer, args.tokens, args.rounds)
        print(json.dumps({name: cases[name]}, indent=1), flush=True)
    if args.out is not None:
        save(args.out, {"machine": machine(), "cases": cases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
