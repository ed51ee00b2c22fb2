"""How long does each kernel take, how far is it from its floor and from its reference?

    python -m benchmarks.kernels --out benchmarks/results/kernels.json [--only NAME,...] [--quick]

The floor of a kernel is the larger of two times: its bytes at the copy bandwidth, its operations at
the matrix rate, both measured at the start. Printed are microseconds and multiples of the floor;
`torch` is how many times as long plain torch takes. A kernel that fails or is wrong does not stop
the others, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import REPLAYS, Clock, Floor
from benchmarks.kernel_cases import CASES, Bench, Case, Errors, Probe
from benchmarks.stack import machine, save

QUICK_REPLAYS = 5
MOST_COMPILERS = 8
ON_A_LINE = 4

Row = dict[str, Any]


def measure(case: Case, bench: Bench, clock: Clock, floor: Floor, *, reference: bool) -> Row:
    """One row of the result."""
    probe = case.make(bench)
    errors = probe.check()
    seconds = clock.seconds(probe.calls, graph=probe.graph)
    least = floor.seconds(probe.bytes, probe.flops, probe.dtype)
    row: Row = {
        "dtype": str(probe.dtype)[6:],
        "us": 1e6 * seconds,
        "floor_us": 1e6 * least,
        "ratio": seconds / least,
        "tb_s": 1e-12 * probe.bytes / seconds,
        "tflop_s": 1e-12 * probe.flops / seconds,
        "errors": errors,
        "sets": len(probe.calls),
    }
    if not within(errors, probe):
        row["failed"] = f"errors {errors}, at most {probe.limit:g}"
    if probe.details is not None:
        row |= probe.details(clock, seconds)
    if reference and probe.torch is not None:
        try:
            row["torch_us"] = 1e6 * clock.seconds(probe.torch, graph=probe.torch_graph)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["torch_error"] = _first_line(error)
    return row


def within(errors: Errors, probe: Probe) -> bool:
    """Whether the kernel gave what its reference gives; NaN is never within."""
    decisive = [errors[name] for name in ("relative", "wrong") if name in errors]
    return all(error <= probe.limit for error in decisive)


def run(cases: Sequence[Case], bench: Bench, clock: Clock, floor: Floor, quick: bool) -> list[Row]:
    """Every case's row; a failure is a row too."""
    rows = []
    for case in cases:
        row: Row = {"name": case.name, "kind": case.kind, "variant": case.variant}
        begin = time.perf_counter()
        try:
            row |= measure(case, bench, clock, floor, reference=not quick)
        except Exception as error:
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {_first_line(error)}"
        row["spent_s"] = time.perf_counter() - begin
        rows.append(row)
    return rows


def compile_all(cases: Sequence[Case], bench: Bench, processes: int) -> None:
    """Fills Triton's cache from several processes: compiling takes longer than all else here."""
    indices = [CASES.index(case) for case in cases if case.name != "gemm"]
    shares = [indices[i::processes] for i in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for share in shares:
            pool.submit(_compile, share, str(bench.device))


def _compile(indices: Sequence[int], device: str) -> None:
    bench = Bench(torch.device(device), single=True)
    torch.cuda.set_device(bench.device)
    for index in indices:
        try:
            CASES[index].make(bench).calls[0]()
            torch.cuda.synchronize()
        except Exception:  # it is met again, and reported, when the case is measured
            continue


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines for people: variants of a kernel side by side, attention one by one."""
    for (name, kind), group in groupby(rows, key=lambda row: (row["name"], row["kind"])):
        members = list(group)
        width = 1 if any("splits" in row for row in members) else ON_A_LINE
        for first in range(0, len(members), width):
            part = members[first : first + width]
            cells = " | ".join(f"{row['variant']:>{_width(width)}} {_cell(row)}" for row in part)
            good = [row for row in part if "us" in row]
            worst = max((_error(row) for row in good), default=float("nan"))
            times = [f"{row['torch_us'] / row['us']:.1f}" for row in good if "torch_us" in row]
            line = f"{name:12} {kind:15} | {cells} | err {worst:.1e}"
            yield line + (f" | torch {', '.join(times)} x" if times else "")
    for row in rows:
        if "failed" in row:
            yield f"FAILED {row['name']} {row['kind']} {row['variant']}: {row['failed'][:120]}"


def _width(members: int) -> int:
    return 13 if members == 1 else 8


def _cell(row: Row) -> str:
    if "us" not in row:
        return "failed"
    text = f"{row['us']:7.1f} us {row['ratio']:5.1f}x"
    if row["name"] == "gemm":
        text += f" {row['tb_s']:.2f} TB/s"
    if "merge_us" in row:
        text += f" = {row['attend_us']:.1f} + merge {row['merge_us']:.1f}"
    return text + (f", {row['splits']} splits" if "splits" in row else "")


def _error(row: Row) -> float:
    errors: Errors = row["errors"]
    return max(errors.get("relative", 0.0), errors.get("wrong", 0.0))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def choose(only: str, quick: bool, cuda: bool) -> list[Case]:
    """The cases by name; `quick` keeps the first of each name and kind."""
    names = {case.name for case in CASES}
    wanted = {name for name in only.split(",") if name} or names
    if not wanted <= names:
        raise SystemExit(f"--only: {', '.join(sorted(wanted - names))} is none of {sorted(names)}")
    cases = [case for case in CASES if case.name in wanted]
    if not cuda:
        cases = [case for case in cases if case.kind != "flashinfer"]
    if not quick:
        return cases
    first = {(case.name, case.kind): case for case in reversed(cases)}
    return [case for case in cases if first[(case.name, case.kind)] is case]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--only", default="", help="names of kernels, comma-separated")
    parser.add_argument("--quick", action="store_true", help="one size each, few replays, no torch")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="shapes for Triton's interpreter")
    parser.add_argument("--jobs", type=int, help="processes that compile; 0: none")
    options = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(options.device)
    cuda = device.type == "cuda"
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--device cpu: kernels run there with TRITON_INTERPRET=1 in the environment")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda:0")
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    cases, bench = choose(options.only, options.quick, cuda), Bench(device, options.tiny)
    jobs = options.jobs
    if jobs is None:
        jobs = min(MOST_COMPILERS, (os.cpu_count() or 1) // 2) if cuda else 0
    if jobs and cuda and not options.tiny:
        compile_all(cases, bench, min(jobs, len(cases)))
    if cuda:
        torch.cuda.set_device(device)
    compiled = time.perf_counter()
    clock = Clock(device, QUICK_REPLAYS if options.quick else REPLAYS)
    floor = Floor.measure(clock)
    rates = {str(dtype)[6:]: 1e-12 * rate for dtype, rate in floor.matrix.items()}
    print(
        f"copy {1e-12 * floor.copy:.2f} TB/s; products "
        + ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in rates.items())
        + f"; smallest node {1e6 * floor.node:.2f} us; compiled in {compiled - begin:.0f} s"
    )
    with torch.inference_mode():
        rows = run(cases, bench, clock, floor, options.quick)
    print("\n".join(table(rows)))
    total = time.perf_counter() - begin
    print(f"{len(rows)} kernels in {total:.0f} s")
    result = {
        "machine": machine(),
        "floor": {"copy_tb_s": 1e-12 * floor.copy, "matrix_tflop_s": rates}
        | {"node_us": 1e6 * floor.node},
        "replays": clock.replays,
        "seconds": total,
        "kernels": rows,
    }
    if options.out is not None:
        save(options.out, result)
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
