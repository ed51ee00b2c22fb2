"""What does MPS cost a chain of kernels, and what does the wait of its neighbour add to that?

One process times a graph of kernels that follow one another, as in a verify. Beside it, in another
process, is nothing, a context without work, or a stream that waits for a flag: by an operation of
the stream on host memory or on the GPU's, or by a kernel of one thread that polls either. Then a
flag goes back and forth between the two, for how fast each way of waiting is.

    python -m benchmarks.mps_cost --out results.json

Both use the driver alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kill_trial import FINISHED, FLAG, LAUNCHED, RELEASED, Gpu, checked, daemon
from benchmarks.stack import machine, save

PTX = b"""
.version 7.8
.target sm_80
.address_size 64
.visible .entry work(.param .u64 cycles)
{
  .reg .u64 %n, %now, %from;
  .reg .pred %go;
  ld.param.u64 %n, [cycles];
  mov.u64 %from, %clock64;
again:
  mov.u64 %now, %clock64;
  sub.u64 %now, %now, %from;
  setp.lt.u64 %go, %now, %n;
  @%go bra again;
  ret;
}
.visible .entry poll(.param .u64 flag, .param .u64 least)
{
  .reg .u64 %p, %v, %least;
  .reg .pred %go;
  ld.param.u64 %p, [flag];
  ld.param.u64 %least, [least];
again:
  ld.acquire.sys.global.u64 %v, [%p];
  setp.ge.s64 %go, %v, %least;
  @%go bra done;
  nanosleep.u32 100;
  bra again;
done:
  ret;
}
\x00"""

KERNELS = 300
GRID, BLOCK = 132, 128
SIZES = {"empty": (0, 0), "10 us": (18_000, 0), "10 us, all shared": (18_000, 227 * 1024)}
"""Cycles of each kernel, and bytes of shared memory of a block."""
REPEATS = 60
HOPS = 300
READY = 48  # a word of the segment
NEIGHBOURS = (
    "none", "idle", "stream host", "stream gpu", "kernel host", "kernel gpu", "stream host low",
)  # fmt: skip
"""What a neighbour's stream waits with and where its flag lies; low: a client of low priority."""
WAYS = ("stream", "kernel")


class Waiter(Gpu):
    """A stream that waits in one of the ways, and kernels to be timed."""

    def __init__(self, segment: str) -> None:
        super().__init__(segment)
        module = checked(self.driver.cuModuleLoadData(PTX))
        self.work_kernel = checked(self.driver.cuModuleGetFunction(module, b"work"))
        self.poll_kernel = checked(self.driver.cuModuleGetFunction(module, b"poll"))
        self.word = int(checked(self.driver.cuMemAlloc(8)))
        checked(self.driver.cuMemsetD8(self.word, 0, 8))
        self.poll(self.word, 0)
        checked(self.driver.cuStreamSynchronize(self.stream))

    def poll(self, address: int, least: int) -> None:
        """A kernel of one thread that ends when the word is at least so much."""
        values = ((address, least), (ctypes.c_uint64, ctypes.c_uint64))
        one = (1, 1, 1)
        checked(self.driver.cuLaunchKernel(self.poll_kernel, *one, *one, 0, self.stream, values, 0))

    def hold(self, way: str, address: int, least: int) -> None:
        """The stream goes on when the word is at least so much, by one of WAYS."""
        if way == "stream":
            checked(self.driver.cuStreamWaitValue64(self.stream, address, least, 0))
        else:
            self.poll(address, least)

    def chain(self, cycles: int, shared: int) -> Any:
        """A graph of KERNELS kernels that follow one another."""
        driver = self.driver
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.work_kernel, most, shared))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(self.stream, mode))
        values = ((cycles,), (ctypes.c_uint64,))
        for _ in range(KERNELS):
            checked(
                driver.cuLaunchKernel(
                    self.work_kernel, GRID, 1, 1, BLOCK, 1, 1, shared, self.stream, values, 0
                )
            )
        return checked(
            driver.cuGraphInstantiate(checked(driver.cuStreamEndCapture(self.stream)), 0)
        )


def neighbour(segment: str, kind: str) -> None:
    """Parks, or hops; ends when the segment says so."""
    gpu = Waiter(segment)
    flag = gpu.flags + 8 * FLAG
    if kind.startswith("hops"):
        for number in range(1, HOPS + 1):
            gpu.hold(kind.removeprefix("hops "), flag, number)
            gpu.write(FINISHED, number)
    elif kind != "idle":
        way, where, *_ = kind.split()
        gpu.hold(way, gpu.word if where == "gpu" else flag, 1)
    gpu.words[READY] = 1
    while not gpu.words[LAUNCHED]:
        time.sleep(0.001)
    gpu.words[FLAG] = RELEASED
    one = (ctypes.c_int64 * 1)(1)
    other = checked(gpu.driver.cuStreamCreate(1))
    checked(gpu.driver.cuMemcpyHtoDAsync(gpu.word, ctypes.addressof(one), 8, other))
    if not gpu.idle_within(5.0):
        sys.exit(1)


@contextmanager
def beside(gpu: Waiter, segment: str, kind: str) -> Iterator[None]:
    """The neighbour, ready; if any."""
    if kind.startswith("none"):
        yield
        return
    for word in (LAUNCHED, FLAG, FINISHED, READY):
        gpu.words[word] = 0
    command = [sys.executable, "-m", "benchmarks.mps_cost", "--segment", segment]
    low = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if kind.endswith("low") else {}
    child = subprocess.Popen([*command, "--neighbour", kind], env={**os.environ, **low})
    try:
        end = time.monotonic() + 20
        while not gpu.words[READY]:
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the neighbour {kind} is not ready: {child.poll()}")
            time.sleep(0.001)
        time.sleep(0.05)
        yield
        if child.poll() is not None:
            raise RuntimeError(f"the neighbour {kind} ended early")
    finally:
        gpu.words[LAUNCHED] = 1
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()


def timed(gpu: Waiter, graph: Any) -> float:
    """Median microseconds of the graph."""
    driver = gpu.driver
    begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))
    times: list[float] = []
    for _ in range(10 + REPEATS):
        checked(driver.cuEventRecord(begin, gpu.stream))
        checked(driver.cuGraphLaunch(graph, gpu.stream))
        checked(driver.cuEventRecord(end, gpu.stream))
        checked(driver.cuStreamSynchronize(gpu.stream))
        times.append(1e3 * checked(driver.cuEventElapsedTime(begin, end)))
    return statistics.median(times[10:])


def measure(segment: str, mps: bool) -> dict[str, Any]:
    """Every neighbour, and without a neighbour first and last."""
    gpu = Waiter(segment)
    graphs = {name: gpu.chain(*size) for name, size in SIZES.items()}
    found: dict[str, Any] = {}
    for kind in [*(NEIGHBOURS if mps else ("none", "idle")), "none again"]:
        with beside(gpu, segment, kind):
            found[kind] = {name: round(timed(gpu, graph), 1) for name, graph in graphs.items()}
        print(f"{'MPS' if mps else 'no MPS':<7} {kind:<12} {found[kind]}", flush=True)
    if mps:
        for way in WAYS:
            found[f"hop {way}"] = hop_time(gpu, segment, way)
            print(f"{way:<8} there and back {found[f'hop {way}']:.1f} us", flush=True)
    return found


def hop_time(gpu: Waiter, segment: str, way: str) -> float:
    """Microseconds of a flag's way to the neighbour and back, from events around half of HOPS."""
    driver = gpu.driver
    begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))
    with beside(gpu, segment, f"hops {way}"):
        for number in range(1, HOPS + 1):
            if number == HOPS // 2 + 1:
                checked(driver.cuEventRecord(begin, gpu.stream))
            gpu.write(FLAG, number)
            gpu.hold(way, gpu.flags + 8 * FINISHED, number)
        checked(driver.cuEventRecord(end, gpu.stream))
        if not gpu.idle_within(20.0):
            raise RuntimeError(f"the hops ({way}) stand still at {gpu.words[FINISHED]}")
        return 1e3 * float(checked(driver.cuEventElapsedTime(begin, end))) / (HOPS - HOPS // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    for hidden in ("--segment", "--neighbour"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--mps", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.neighbour:
        neighbour(args.segment, args.neighbour)
        return
    if args.segment:
        print(json.dumps(measure(args.segment, args.mps)), flush=True)
        return
    results: dict[str, Any] = {}
    for name, mps in (("no MPS", False), ("MPS", True)):
        with daemon(mps) as env, tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.truncate(mmap.PAGESIZE)
            command = [sys.executable, "-m", "benchmarks.mps_cost", "--segment", file.name]
            done = subprocess.run(
                [*command, *(["--mps"] if mps else [])],
                env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=False,
            )  # fmt: skip
            print(done.stdout, flush=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            results[name] = json.loads(lines[-1]) if lines else {"failed": done.returncode}
    if args.out:
        save(args.out, {"machine": machine(), **results})


if __name__ == "__main__":
    main()
