"""Starts a whole stack for a benchmark and talks to it: `slipstream up` as users run it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from slipstream import channels
from slipstream.cli.up_settings import free_port
from slipstream.hardware import describe
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

READY_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One finished choice."""

    ids: list[int]
    finish: str
    steps: int
    accepted: list[int]
    nodes: list[int]
    first_s: float
    total_s: float


@dataclass(frozen=True)
class Ask:
    """One request, by token ids or as plain text."""

    prompt: list[int] | str
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    draft: bool = True
    ignore_eos: bool = False


@dataclass
class Stack:
    """A running stack; `ports` are REST and gRPC of the gateway."""

    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    log: list[str] = field(default_factory=list)

    def ask(self, ask: Ask) -> Answer:
        """One request through GatewayService.Generate. Raises grpc.RpcError."""
        request = gateway_pb2.GenerateRequest(
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            ignore_eos=ask.ignore_eos,
            speculative=gateway_pb2.Speculative(stats=True, enabled=ask.draft),
        )
        if isinstance(ask.prompt, str):
            request.text = ask.prompt
        else:
            request.token_ids.ids.extend(ask.prompt)
        if ask.seed is not None:
            request.seed = ask.seed
        began = time.perf_counter()
        ids: list[int] = []
        first, last = 0.0, gateway_pb2.GenerateResponse()
        for response in self._stub().Generate(request):
            if response.token_ids and not ids:
                first = time.perf_counter() - began
            ids.extend(response.token_ids)
            last = response
        return Answer(
            ids,
            last.finish_reason,
            last.speculative.steps,
            list(last.speculative.accepted),
            list(last.speculative.nodes),
            first,
            time.perf_counter() - began,
        )

    def ask_all(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """All requests, at most `concurrency` at once, answers in order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.ask, asks))

    def close(self) -> None:
        """Closes the channel, if one was opened."""
        channel = getattr(self, "_channel", None)
        if channel is not None:
            channel.close()

    def _stub(self) -> Any:
        if not hasattr(self, "_channel"):
            self._channel = grpc.insecure_channel(
                f"127.0.0.1:{self.grpc_port}", options=channels.client_options()
            )
        return gateway_pb2_grpc.GatewayServiceStub(self._channel)


@contextmanager
def stack(*options: str) -> Iterator[Stack]:
    """`slipstream up` with `options`, ready to answer; stopped like Ctrl-C at the end."""
    http_port = free_port()
    grpc_port = free_port(http_port)
    command = [sys.executable, "-m", "slipstream.cli.main", "up"]
    command += ["--port", str(http_port), "--grpc-port", str(grpc_port), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    running = Stack(process, http_port, grpc_port)

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            running.log.append(line.rstrip())

    pumping = threading.Thread(target=pump, daemon=True)
    pumping.start()
    try:
        _wait_ready(running)
        yield running
    finally:
        running.close()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        pumping.join()
        assert process.stdout is not None
        process.stdout.close()


def _wait_ready(running: Stack) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise RuntimeError("the stack ended:\n" + "\n".join(running.log[-40:]))
        try:
            url = f"http://127.0.0.1:{running.http_port}/ready"
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"not ready within {READY_S:g} s:\n" + "\n".join(running.log[-40:]))


def machine() -> dict[str, Any]:
    """Hardware, versions and command for a result file; absolute paths are cut to their names.

    With a GPU, key `gpu` describes the first.
    """
    spec = sys.modules["__main__"].__spec__
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    command = ["python", "-m", spec.name] if spec else ["python", Path(sys.argv[0]).name]
    from slipstream.accelerator import describe_gpu  # torch, which most scripts here do without

    gpu = describe_gpu()
    found = {**describe(), "command": " ".join([*command, *words])}
    return found if gpu is None else {**found, "gpu": gpu}


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes `result` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
