"""Target and draft as the two processes that they are: on one GPU under MPS, on two, or on a CPU.

Everything a server says goes to a file of its own; whatever happens, both are gone at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.mps import PrivateMps, client_environment
from slipstream.cli.process import READY, die_with_parent
from slipstream.cli.up_devices import visible_gpus
from slipstream.wire import MAX_NODES

READY_S = 300.0
END_S = 15.0
POLL_S = 0.05
PAGE_SIZE = 16
TAIL = 1500  # characters of a log that say why a server ended


@dataclass(frozen=True, slots=True)
class Cell:
    """What is started.

    Attributes:
        gpus: 1, both on the first and clients of a private MPS daemon; or 2. Not read on a CPU.
        handoff: what the target asks for; with grpc the draft maps nothing either.
        shares: parts of the one GPU that target and draft may hold; not read elsewhere.
        target_module, target_words: in place of the target, and words before its flags.
        warm: whether the servers measure steps before they are ready.
    """

    target: Path
    draft: Path
    device: str = "cuda"
    gpus: int = 1
    handoff: str = "cuda_ipc"
    slots: int = 32
    max_model_len: int = 2048
    shares: tuple[float, float] = (0.75, 0.15)
    random_weights: bool = True
    target_module: str = "services.target"
    target_words: tuple[str, ...] = ()
    warm: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def commands(self) -> tuple[list[str], list[str]]:
        """Command lines of target and draft."""
        common = ["--model", str(self.target), "--draft", str(self.draft), "--port", "0"]
        common += ["--slots", str(self.slots), "--page-size", str(PAGE_SIZE)]
        common += ["--random-weights"] if self.random_weights else []
        common += [] if self.warm else ["--no-warmup"]
        target = [*self.target_words, *common, "--max-model-len", str(self.max_model_len)]
        target += ["--handoff", self.handoff, "--drain-s", "1"]
        # Pages for what the target can hold: the head's default is its target's whole window.
        pages = self.slots * -(-(self.max_model_len + MAX_NODES) // PAGE_SIZE)
        draft = [*common, "--pages", str(pages)]
        draft += ["--handoff", "grpc" if self.handoff == "grpc" else "auto"]
        if not self.on_gpu:
            cpu = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
            target, draft = [*target, *cpu], [*draft, *cpu]
        elif self.gpus == 1:
            target += ["--device", "cuda:0", "--memory-share", str(self.shares[0])]
            draft += ["--device", "cuda:0", "--memory-share", str(self.shares[1])]
        else:
            target, draft = [*target, "--device", "cuda:0"], [*draft, "--device", "cuda:1"]
        python = [sys.executable, "-m"]
        return [*python, self.target_module, *target], [*python, "services.draft", *draft]


class Server:
    """One process and its log."""

    def __init__(
        self, name: str, command: list[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def wait_ready(self, until: float) -> str:
        """Its address. Raises RuntimeError when it ended, or is not ready at monotonic `until`."""
        while True:
            for line in self.log.read_text(errors="replace").splitlines():
                if line.startswith(READY):
                    return str(json.loads(line.removeprefix(READY))["grpc"])
            self.check()
            if time.monotonic() > until:
                raise RuntimeError(f"the {self.name} is not ready in time: {self.tail()}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises RuntimeError when it ended."""
        if self.process.poll() is not None:
            status = self.process.returncode
            raise RuntimeError(f"the {self.name} ended, status {status}: {self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-TAIL:]

    def end(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of its group."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_S)


@dataclass(frozen=True, slots=True)
class Servers:
    """Both, ready; `seconds` is what their start took."""

    cell: Cell
    target: Server
    draft: Server
    target_address: str
    draft_address: str
    seconds: float

    def check(self) -> None:
        """Raises RuntimeError when one has ended."""
        self.target.check()
        self.draft.check()


@contextmanager
def servers(cell: Cell, logs: Path, ready_s: float = READY_S) -> Iterator[Servers]:
    """Both servers of `cell`, with logs in the folder `logs`.

    Raises RuntimeError when one ends or is not ready, MpsUnavailable without MPS.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        environment = stack.enter_context(shared_gpu()) if cell.on_gpu and cell.gpus == 1 else {}
        began = time.monotonic()
        started: list[Server] = []
        for name, command in zip(("target", "draft"), cell.commands(), strict=True):
            one = Server(name, command, logs / f"{name}.log", environment)
            stack.callback(one.end)
            started.append(one)
        addresses = [one.wait_ready(began + ready_s) for one in started]
        seconds = time.monotonic() - began
        yield Servers(cell, started[0], started[1], addresses[0], addresses[1], seconds)


@contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """A private MPS daemon for the first GPU; yields what its clients need.

    Raises MpsUnavailable.
    """
    gpus = visible_gpus()
    uuid = gpus[0].uuid if gpus else ""
    mps = PrivateMps(uuid)
    asyncio.run(mps.start())
    try:
        yield {**client_environment(uuid), **mps.environment}
    finally:
        asyncio.run(mps.stop())
