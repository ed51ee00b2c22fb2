"""Both sides of sessions over shared memory as engines drive them, and a draft in a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import IO

import torch

from slipstream.handoff.base import PeerSpec
from slipstream.handoff.cuda_ipc import CudaDraftEnd, CudaTargetEnd, Mapper
from slipstream.handoff.grpc import GrpcAcceptor
from slipstream.handoff.layout import Layout, ring_entry
from slipstream.serving import Server

SPEC = PeerSpec(
    feature_width=8, feature_dtype="float32", vocab_size=100, slots=2,
    fingerprints={"fc": "aa", "hidden_norm": "bb", "embedding": "cc", "lm_head": "dd"},
)  # fmt: skip
LAYOUT = Layout(slots=2, pages=3, page_size=4, table_pages=3, width=8, dtype="float32")


def mixed(step: int, value: int) -> int:
    """What a side makes of the other's value."""
    return (31 * value + step) % 1_000_003


def target_steps(end: CudaTargetEnd, first: int, count: int, every: int = 1) -> int:
    """Publishes `count` steps and awaits a proposal in each `every`-th; checks what is there.

    Returns how many steps it did before the session ended.
    """
    memory, value = end.memory, 0
    for step in range(first, first + count):
        entry = ring_entry(end.which, step)
        if step % every == 0:
            end.await_proposal(step)
            head = memory.heads[entry, 0].tolist()  # on a GPU this is where the thread waits
            if not end.alive:
                end.passed(step, 0)
                return step - first
            assert head[:2] == [step, mixed(step, value)], (step, head, value)
        else:
            end.await_room(step)
        value = mixed(step, value + 1)
        memory.records[entry, 0, 1] = value
        memory.records[entry, 0, 0] = step
        end.publish(step)
        end.passed(step, 1000)
    return count


def draft_steps(end: CudaDraftEnd, first: int, count: int) -> int:
    """Answers `count` steps, each after the context of the one before."""
    memory, value = end.memory, 0
    for step in range(first, first + count):
        if step > first:
            end.await_context(step - 1)
            header = memory.records[ring_entry(end.which, step - 1), 0].tolist()
            if not end.alive:
                end.planned(step)
                end.passed(step)
                return step - first
            assert header[0] == step - 1, (step, header)
            value = header[1]
            end.consumed(step - 1)
        entry = ring_entry(end.which, step)
        memory.heads[entry, 0, 1] = mixed(step, value)
        memory.heads[entry, 0, 0] = step
        end.publish(step)
        end.planned(step)
        end.passed(step)
    end.await_context(first + count - 1)
    end.consumed(first + count - 1)
    end.planned(first + count - 1)
    return count


def finish(end: CudaDraftEnd) -> None:
    """As an engine ends a session: acknowledges, its stream is idle, gives the set back."""
    end.end("done")
    end.close()


def draft_flags(end: CudaDraftEnd, first: int, count: int) -> None:
    """Puts `count` waits and writes on the stream, with nothing between and no look at them."""
    for step in range(first, first + count):
        if step > first:
            end.await_context(step - 1)
        end.publish(step)
        end.planned(step)


def on_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream of its own for the calling thread; nothing on a CPU."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))


class Draft:
    """A draft in a process of its own: serves one session after another.

    It answers endless steps in each, or with `flags` puts so many waits and writes on its stream.
    `unchecked`: it takes a target on its own GPU without MPS too.
    """

    def __init__(self, device: str = "cpu", unchecked: bool = False) -> None:
        arguments = [device, "unchecked"] if unchecked else [device]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.device_steps", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # a stopped member may bring a hangup on its process group
        )  # fmt: skip
        self.port = int(self.says())

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def expect(self, session: int, first_step: int, flags: int = 0) -> None:
        assert self.process.stdin is not None
        print(session, first_step, flags, file=self.process.stdin, flush=True)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _session(end: CudaDraftEnd, first_step: int, flags: int) -> None:
    device = end.memory.device
    with on_stream(device):
        if flags:
            draft_flags(end, first_step, flags)
        else:
            draft_steps(end, first_step, 1 << 40)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    while end.alive:
        time.sleep(0.001)
    finish(end)
    print("closed", end.reason, flush=True)


async def _main(commands: IO[str], device: torch.device, unchecked: bool) -> None:
    torch.set_num_threads(1)
    loop = asyncio.get_running_loop()
    server = Server(["slipstream.v1.HandoffService"])
    acceptor, mapper = GrpcAcceptor(loop), Mapper(device)
    if unchecked:
        mapper._check_gpu = lambda target: None  # type: ignore[method-assign]
    acceptor.add_to(server.grpc)
    await server.start("127.0.0.1", 0)
    print(server.port, flush=True)

    def begin(end: object, first_step: int, flags: int) -> None:
        if isinstance(end, CudaDraftEnd):
            arguments = (end, first_step, flags)
            threading.Thread(target=_session, args=arguments, daemon=True).start()
        else:
            print("not on devices:", getattr(end, "fallback", end), flush=True)

    while line := await asyncio.to_thread(commands.readline):
        session, first_step, flags = map(int, line.split())
        acceptor.expect(
            session, first_step, SPEC, partial(begin, first_step=first_step, flags=flags),
            mapper=mapper,
        )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(_main(sys.stdin, torch.device(sys.argv[1]), "unchecked" in sys.argv))
