"""How many tokens a second does one gateway process carry? Fake executors, both of its doors.

The fake target and draft answer at once, so that the gateway, and on a small machine the cores that
all processes share, set the pace. Measured at 64 streams through gRPC and through REST: tokens and
messages a second, and the CPU time that every process spent per token. The gateway runs Python on
one core at a time: 1 s / its CPU time per token is what it would carry with a core of its own.

The clients are cheap on purpose: they count bytes or messages and decode nothing but the last one.

    python -m benchmarks.gateway_rate --tokenizer FOLDER --out benchmarks/results/gateway_rate.json
    python -m benchmarks.gateway_rate --tokenizer FOLDER --profile     # needs py-spy
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from benchmarks.stack import machine, save
from slipstream import channels
from slipstream.v1 import gateway_pb2

VOCAB = 49152
STREAMS = 64
PROMPT = 20  # tokens
GENERATE = "/slipstream.v1.GatewayService/Generate"


@dataclass(frozen=True)
class Case:
    """One cell and one door. `accept` is the fake draft's chance per depth, None: no draft."""

    door: str
    accept: float | None
    nodes: int = 16
    tokens: int = 2000

    @property
    def name(self) -> str:
        draft = "no draft" if self.accept is None else f"chain {self.nodes}, p {self.accept:g}"
        return f"{self.door}, {draft}"


@dataclass(frozen=True)
class Served:
    """A process that said READY."""

    process: subprocess.Popen[str]
    ready: dict[str, str]


@contextmanager
def served(module: str, *options: str) -> Iterator[Served]:
    """`python -m module` until it is ready; ended at exit."""
    command = [sys.executable, "-m", module, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("READY "):
                yield Served(process, json.loads(line.removeprefix("READY ")))
                break
        else:
            raise RuntimeError(f"{module} ended before it was ready")
    finally:
        process.terminate()
        process.wait(15)


@contextmanager
def cell(accept: float | None, nodes: int, tokenizer: Path) -> Iterator[dict[str, Served]]:
    """Fakes and a gateway of 64 slots, which verifies `nodes` in every step."""
    shared = ["--vocab", str(VOCAB), "--slots", str(STREAMS)]
    with ExitStack() as stack:
        target = stack.enter_context(served("tests.fakes.target", *shared, "--pages", "32768"))
        found = {"target": target}
        options = ["--target", target.ready["grpc"], "--port", "0", "--tokenizer", str(tokenizer)]
        if accept is not None:
            options_draft = [*shared, "--pages", "65536", "--accept", str(accept)]
            draft = stack.enter_context(served("tests.fakes.draft", *options_draft))
            found["draft"] = draft
            options += ["--draft", draft.ready["grpc"], "--ping-pong", "off"]
            options += ["--tree", "chain", "--width", "1", "--budget", str(nodes)]
        options += ["--log-level", "warning"]
        found["gateway"] = stack.enter_context(served("gateway", *options))
        yield found


def prompt(index: int) -> list[int]:
    """Token ids that differ between the streams."""
    return [1000 + (7 * index + i) % 40000 for i in range(PROMPT)]


@dataclass
class Got:
    """What a client saw of one stream."""

    tokens: int = 0
    messages: int = 0


async def grpc_stream(channel: grpc.aio.Channel, index: int, tokens: int) -> Got:
    """One Generate call; only the last message is decoded."""
    call = channel.unary_stream(
        GENERATE, request_serializer=gateway_pb2.GenerateRequest.SerializeToString
    )
    request = gateway_pb2.GenerateRequest(max_tokens=tokens, temperature=0, ignore_eos=True)
    request.token_ids.ids.extend(prompt(index))
    got, last = Got(), b""
    async for message in call(request):
        got.messages += 1
        last = message
    got.tokens = gateway_pb2.GenerateResponse.FromString(last).usage.completion_tokens
    return got


class Reader(asyncio.Protocol):
    """An HTTP client that sends one request and keeps the last bytes of the answer."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.reads = 0
        self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.tail = (self.tail + data)[-4096:] if len(data) < 4096 else data[-4096:]
        if b"data: [DONE]" in data:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError(f"cut short: {self.tail!r}"))


async def rest_stream(address: str, index: int, tokens: int) -> Got:
    """One streamed completion; only the usage is decoded."""
    body = json.dumps(
        {
            "prompt": prompt(index),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(
        lambda: Reader(head.encode() + body), host, int(port)
    )
    await reader.done
    transport.close()
    events = [line[6:] for line in reader.tail.split(b"\n") if line.startswith(b"data: {")]
    return Got(json.loads(events[-1])["usage"]["completion_tokens"], reader.reads)


async def load(door: str, ready: dict[str, str], tokens: int) -> list[Got]:
    """64 streams at once, to their ends."""
    if door == "rest":
        return await asyncio.gather(
            *(rest_stream(ready["http"], i, tokens) for i in range(STREAMS))
        )
    async with grpc.aio.insecure_channel(
        ready["grpc"], options=channels.client_options()
    ) as channel:
        return await asyncio.gather(*(grpc_stream(channel, i, tokens) for i in range(STREAMS)))


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def thread_seconds(process: psutil.Process) -> dict[int, float]:
    """User and system time by the system's number of the thread."""
    return {one.id: one.user_time + one.system_time for one in process.threads()}


@dataclass
class Spent:
    """Wall time, what came, and the CPU seconds of every process meanwhile."""

    seconds: float
    got: list[Got]
    cpu: dict[str, float]
    threads: dict[int, float]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.got)


def run_once(runner: asyncio.Runner, case: Case, found: dict[str, Served]) -> Spent:
    """64 streams to their ends."""
    watched = {name: psutil.Process(one.process.pid) for name, one in found.items()}
    watched["client"] = psutil.Process()
    before = {name: cpu_seconds(process) for name, process in watched.items()}
    threads = thread_seconds(watched["gateway"])
    began = time.perf_counter()
    got = runner.run(load(case.door, found["gateway"].ready, case.tokens))
    seconds = time.perf_counter() - began
    after = thread_seconds(watched["gateway"])
    cpu = {name: cpu_seconds(process) - before[name] for name, process in watched.items()}
    spent = Spent(seconds, got, cpu, {k: v - threads.get(k, 0.0) for k, v in after.items()})
    assert spent.tokens == STREAMS * case.tokens, f"{spent.tokens} tokens came"
    return spent


def measure(case: Case, found: dict[str, Served], profile: bool) -> dict[str, Any]:
    """One run after a short one to warm up, and with `profile` one more under py-spy."""
    with asyncio.Runner() as runner:
        runner.run(load(case.door, found["gateway"].ready, 50))
        spent = run_once(runner, case, found)
        tokens = spent.tokens
        result: dict[str, Any] = {
            "streams": STREAMS,
            "tokens": tokens,
            "seconds": round(spent.seconds, 3),
            "tokens_s": round(tokens / spent.seconds),
            "tokens_per_message": round(tokens / sum(one.messages for one in spent.got), 2),
            "cpu_us_per_token": {k: round(1e6 * v / tokens, 2) for k, v in spent.cpu.items()},
            "gateway_cores": round(spent.cpu["gateway"] / spent.seconds, 3),
            "tokens_s_of_one_gateway_core": round(tokens / spent.cpu["gateway"]),
        }
        if profile:
            profiler = start_profiler(found["gateway"].process.pid)
            spent = run_once(runner, case, found)
            result["profile"] = read_profile(profiler, spent)
    return result


@dataclass(frozen=True)
class Profiler:
    """A running py-spy and the file that it writes."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]

    @property
    def out(self) -> Path:
        return Path(self.folder.name) / "samples.txt"


def start_profiler(pid: int) -> Profiler:
    """py-spy on process `pid`, every thread, until `read_profile`."""
    folder = tempfile.TemporaryDirectory(prefix="gateway-rate-")
    command = ["py-spy", "record", "--pid", str(pid), "--format", "raw", "--threads"]
    command += ["--rate", "200", "--duration", "600", "--nonblocking", "--output"]
    command.append(str(Path(folder.name) / "samples.txt"))
    quiet = subprocess.DEVNULL
    return Profiler(subprocess.Popen(command, stdout=quiet, stderr=quiet), folder)


def read_profile(profiler: Profiler, spent: Spent) -> dict[str, Any]:
    """CPU time per token by thread, and the functions by their share of the samples, in percent.

    Samples see Python's frames only: what a function's C code does is its own time, which for the
    event loop's `run` is gRPC and uvloop.
    """
    profiler.process.send_signal(signal.SIGINT)
    profiler.process.wait(20)
    names: dict[int, str] = {}
    own: Counter[str] = Counter()
    under: Counter[str] = Counter()
    for line in profiler.out.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        head, *frames = stack.split(";")
        number, _, name = head.partition("): ")
        names[int(number.rpartition("(")[2])] = name
        functions = [frame.rpartition(":")[0] or frame for frame in frames] or ["(no Python)"]
        own[f"{name}: {functions[-1]}"] += int(count)
        for one in set(functions):
            under[f"{name}: {one}"] += int(count)
    profiler.folder.cleanup()
    by_thread: Counter[str] = Counter()
    for thread, seconds in spent.threads.items():
        by_thread[names.get(thread, "threads without Python")] += seconds
    total = sum(own.values()) or 1

    def shares(counts: Counter[str], most: int) -> dict[str, float]:
        return {key: round(100 * n / total, 1) for key, n in counts.most_common(most)}

    return {
        "us_per_token_by_thread": {
            name: round(1e6 * seconds / spent.tokens, 2)
            for name, seconds in by_thread.most_common(12)
        },
        "own_percent": shares(own, 25),
        "with_callees_percent": shares(under, 40),
    }


def show(name: str, result: dict[str, Any]) -> None:
    """One case on the terminal."""
    spent = ", ".join(f"{k} {v:.1f}" for k, v in result["cpu_us_per_token"].items())
    print(
        f"{name}: {result['tokens_s']} tokens/s in {result['tokens_per_message']} tokens a message,"
        f" gateway {result['gateway_cores']:.2f} cores; CPU us per token: {spent};"
        f" one gateway core carries {result['tokens_s_of_one_gateway_core']} tokens/s",
        flush=True,
    )
    for title, part in result.get("profile", {}).items():
        print(f"  {title}")
        print("\n".join(f"  {value:7.2f}  {what}" for what, value in part.items()), end="\n\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of 49,152 ids")
    parser.add_argument("--doors", default="grpc,rest")
    parser.add_argument("--accept", default="none,0.7,0.85", help="cells, by the draft's luck")
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--profile", action="store_true", help="where the gateway's time goes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.profile and shutil.which("py-spy") is None:
        print("error: --profile needs py-spy: pip install py-spy", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    for word in args.accept.split(","):
        accept = None if word == "none" else float(word)
        with cell(accept, 16, args.tokenizer) as found:
            for door in args.doors.split(","):
                case = Case(door, accept, tokens=args.tokens)
                results[case.name] = measure(case, found, args.profile)
                show(case.name, results[case.name])
    if args.out is not None:
        save(args.out, {"machine": machine(), "cases": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
