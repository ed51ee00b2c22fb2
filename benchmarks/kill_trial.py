"""What a target sees when a draft on its GPU is killed, or faults, in the middle of its work.

A target process parks its stream on a flag, as it does while it waits for a proposal; a draft
process runs a graph that would raise the flag, and is killed with signal 9 inside that graph. The
target then ends the wait as its watchdog would, and goes on: its memory is compared, its next graph
is run. Both use the driver alone, so that a child is up within a third of a second.

    python -m benchmarks.kill_trial --kills 50 --out results.json

With --mps the two are clients of a private MPS daemon. --fault makes the draft store to an address
that is not mapped, in place of being killed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PTX = b"""
.version 7.8
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 ns, .param .u64 out)
{
  .reg .u64 %t, %end, %p, %v;
  .reg .pred %go;
  ld.param.u64 %t, [ns];
  mov.u64 %end, %globaltimer;
  add.u64 %end, %end, %t;
again:
  mov.u64 %t, %globaltimer;
  setp.lt.u64 %go, %t, %end;
  @%go bra again;
  ld.param.u64 %p, [out];
  ld.global.u64 %v, [%p];
  add.u64 %v, %v, 1;
  st.global.u64 [%p], %v;
  ret;
}
\x00"""

RELEASED = 1 << 62
BYTES = 1 << 20
WAIT_S = 3.0
HANDLE = 64
LAUNCHED, FLAG, FINISHED = 0, 16, 32  # words of the segment


def checked(answer: tuple[Any, ...]) -> Any:
    """What a driver call gave. Raises RuntimeError with the driver's name of an error."""
    if answer[0].value != 0:
        raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:]


class Gpu:
    """A context, a stream, the segment's device address, and a graph of spinning kernels."""

    def __init__(self, segment: str) -> None:
        from cuda.bindings import driver  # type: ignore[import-not-found]

        self.driver = driver
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(0))
        self.context = checked(driver.cuDevicePrimaryCtxRetain(device))
        checked(driver.cuCtxSetCurrent(self.context))
        self.stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        module = checked(driver.cuModuleLoadData(PTX))
        self.kernel = checked(driver.cuModuleGetFunction(module, b"spin"))
        with open(segment, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.words = (ctypes.c_int64 * (mmap.PAGESIZE // 8)).from_buffer(self.map)
        address = ctypes.addressof(self.words)
        checked(driver.cuMemHostRegister(address, mmap.PAGESIZE, 2))  # DEVICEMAP
        self.flags = int(checked(driver.cuMemHostGetDevicePointer(address, 0)))

    def launch(self, microseconds: int, out: int) -> None:
        """One kernel that spins and then adds 1 to the word at `out`."""
        driver = self.driver
        values = ((1000 * microseconds, out), (ctypes.c_uint64, ctypes.c_uint64))
        checked(driver.cuLaunchKernel(self.kernel, 1, 1, 1, 1, 1, 1, 0, self.stream, values, 0))

    def graph(self, kernels: int, microseconds: int, out: int) -> Any:
        """`kernels` such launches, recorded."""
        driver = self.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(self.stream, mode))
        for _ in range(kernels):
            self.launch(microseconds, out)
        graph = checked(driver.cuStreamEndCapture(self.stream))
        return checked(driver.cuGraphInstantiate(graph, 0))

    def wait(self, word: int, value: int) -> None:
        checked(
            self.driver.cuStreamWaitValue64(self.stream, self.flags + 8 * word, value, 0)
        )  # GEQ

    def write(self, word: int, value: int) -> None:
        checked(self.driver.cuStreamWriteValue64(self.stream, self.flags + 8 * word, value, 0))

    def idle_within(self, seconds: float) -> bool:
        """Whether the stream gets through with all it has. Raises RuntimeError on a fault."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            state = self.driver.cuStreamQuery(self.stream)[0]
            if state.value == 0:
                return True
            if state.name != "CUDA_ERROR_NOT_READY":
                raise RuntimeError(state.name)
            time.sleep(0.0005)
        return False


def draft(segment: str, handle: str, fault: bool) -> None:
    """Maps the target's memory and works on a graph of 20 ms until it is killed."""
    gpu = Gpu(segment)
    driver = gpu.driver
    ipc = driver.CUipcMemHandle()
    ctypes.memmove(ipc.getPtr(), bytes.fromhex(handle), HANDLE)
    memory = int(checked(driver.cuIpcOpenMemHandle(ipc, 1)))  # LAZY_ENABLE_PEER_ACCESS
    work = gpu.graph(20, 1000, memory + 8)
    while True:
        checked(driver.cuGraphLaunch(work, gpu.stream))
        if fault:
            gpu.launch(10, 8)  # address 8 is nobody's
        gpu.words[LAUNCHED] = 1
        try:
            gpu.idle_within(WAIT_S)
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(3)


def target(segment: str, kills: int, fault: bool) -> None:
    """Runs the trials and prints one JSON line for each."""
    gpu = Gpu(segment)
    driver = gpu.driver
    memory = int(checked(driver.cuMemAlloc(BYTES)))
    checked(driver.cuMemsetD8(memory, 0, BYTES))
    ipc = checked(driver.cuIpcGetMemHandle(memory))
    handle = ctypes.string_at(ipc.getPtr(), HANDLE).hex()
    pattern = random.Random(7).randbytes(BYTES // 2)
    checked(driver.cuMemcpyHtoD(memory + BYTES // 2, pattern, len(pattern)))
    own = gpu.graph(10, 50, memory)
    checked(driver.cuGraphLaunch(own, gpu.stream))
    gpu.idle_within(WAIT_S)
    done = 10
    for trial in range(1, kills + 1):
        gpu.words[LAUNCHED] = gpu.words[FLAG] = 0
        command = [sys.executable, "-m", "benchmarks.kill_trial", "--segment", segment]
        child = subprocess.Popen(
            [*command, "--draft", handle, *(["--fault"] if fault else [])], stdout=subprocess.PIPE
        )
        gpu.wait(FLAG, trial)
        checked(driver.cuGraphLaunch(own, gpu.stream))
        end = time.monotonic() + 20
        while not gpu.words[LAUNCHED] and child.poll() is None and time.monotonic() < end:
            time.sleep(0.0005)
        launched = bool(gpu.words[LAUNCHED])
        time.sleep(random.uniform(0.0005, 0.018))
        began = time.monotonic()
        if fault:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
        else:
            child.kill()
        child.wait()
        gone = time.monotonic()
        said = child.stdout.read().decode().strip() if child.stdout else ""
        row: dict[str, Any] = {"trial": trial, "launched": launched, "exit": child.returncode}
        row |= {"gone_ms": 1e3 * (gone - began), "draft_said": said}
        try:
            gpu.words[FLAG] = RELEASED
            row["through"] = gpu.idle_within(WAIT_S)
            row["through_ms"] = 1e3 * (time.monotonic() - gone)
            done += 10
            out = bytearray(8)
            checked(driver.cuMemcpyDtoH(out, memory, 8))
            back = bytearray(len(pattern))
            checked(driver.cuMemcpyDtoH(back, memory + BYTES // 2, len(back)))
            row["right"] = int.from_bytes(out, "little") == done and bytes(back) == pattern
            row["survived"] = row["through"] and row["right"]
        except RuntimeError as error:
            row |= {"survived": False, "error": str(error)}
        print(json.dumps(row), flush=True)
        if not row["survived"]:
            os._exit(1)


@contextmanager
def daemon(wanted: bool) -> Iterator[dict[str, str]]:
    """The environment of clients of a private MPS daemon, which ends with the block."""
    if not wanted:
        yield dict(os.environ)
        return
    folder = tempfile.mkdtemp(prefix="slipstream-mps-")
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True, timeout=20)
    try:
        yield env
    finally:
        control = ["nvidia-cuda-mps-control"]
        try:
            subprocess.run(control, input=b"quit -t 5\n", env=env, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            print("the daemon did not quit", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)


def trials(kills: int, fault: bool, env: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of as many trials; after one that the target did not survive a new target begins."""
    rows: list[dict[str, Any]] = []
    while len(rows) < kills:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="slipstream-trial-") as segment:
            segment.truncate(mmap.PAGESIZE)
            command = [sys.executable, "-m", "benchmarks.kill_trial", "--segment", segment.name]
            command += ["--target", "--kills", str(kills - len(rows))]
            began = time.monotonic()
            done = subprocess.run(
                [*command, *(["--fault"] if fault else [])],
                env=env, stdout=subprocess.PIPE, timeout=300, check=False,
            )  # fmt: skip
            found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == b"{"]
            rows += found
            if not found:
                rows.append({"survived": False, "error": f"the target ended with {done.returncode}"
                             f" after {time.monotonic() - began:.1f} s"})  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    times = sorted(row["through_ms"] for row in rows if "through_ms" in row)
    middle = f", through in {times[len(times) // 2]:.1f} ms" if times else ""
    errors = sorted({row["error"] for row in rows if "error" in row})
    return f"{sum(r['survived'] for r in rows)} of {len(rows)} survived{middle} {errors or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--plain", type=int, default=10, help="kills without MPS")
    parser.add_argument("--faults", type=int, default=3, help="illegal accesses under MPS")
    parser.add_argument("--out", type=Path)
    for hidden in ("--segment", "--draft"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--target", "--fault"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draft:
        draft(args.segment, args.draft, args.fault)
    elif args.target:
        target(args.segment, args.kills, args.fault)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        results: dict[str, list[dict[str, Any]]] = {}
        for name, count, mps, fault in (
            ("kill -9, no MPS", args.plain, False, False),
            ("kill -9, MPS", args.kills, True, False),
            ("illegal access, MPS", args.faults, True, True),
            ("illegal access, no MPS", min(1, args.faults), False, True),
        ):
            with daemon(mps) as env:
                results[name] = trials(count, fault, env)
            print(f"{name}: {summary(results[name])}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
