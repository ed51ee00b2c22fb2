"""Where does the time between two verifies go? Two server processes, stamps, and the profiler.

Whole split steps at several batches, chain and tree; the handoff's round trip, the host's time for
a step, what a slow gateway costs, running ahead against the lock-step loop, ping-pong on two GPUs,
and which calls of CUDA the enqueueing thread makes in a step.

    python -m benchmarks.timeline --gpus 1 --out benchmarks/results/timeline.json
    python -m benchmarks.timeline --gpus 2 --out benchmarks/results/timeline_2gpus.json
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.profiled_target import profile_window
from benchmarks.split import Driven, Load, NoSession, Step, columns, driven
from benchmarks.split_servers import Cell, Servers, servers
from benchmarks.split_summary import periods, summary
from benchmarks.stack import save
from benchmarks.timeline_bars import bars, line
from slipstream.hardware import describe

CONFIGS = Path(__file__).parent / "configs"
NOTE = (
    "Times in microseconds. round_trip: the target's idle time before a step less the draft's own "
    "compute in it, both ways of the handoff. handed: from the draft's last kernel to the "
    "beginning of the verify, on one GPU's clock; on two GPUs the round trip bounds it. cost: of a "
    "delay before every plan, against windows without one in turn. busy: the target's share of "
    "computing. Weights are made up: next to nothing is accepted."
)
CHAIN, TREE = 16, 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: steps of a window, turns of compared windows, steps profiled."""

    steps: int
    turns: int
    profiled: int


class Report:
    """The result file, written anew after every case."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.folder = out, out.with_suffix("")
        self.result: dict[str, Any] = {"machine": {}, "note": NOTE, "cases": {}, "failures": []}
        self._began, self._limit = time.monotonic(), seconds
        self.folder.mkdir(parents=True, exist_ok=True)

    def case(self, name: str, work: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Runs a case and records what it returns, or why it failed. None begins too late."""
        if time.monotonic() - self._began > self._limit:
            self.result["failures"].append({"case": name, "error": "not begun: no time was left"})
            self.save()
            return
        try:
            self.result["cases"][name] = found = work(*args)
            print(f"{name:<28} {line(found)}", flush=True)
        except NoSession:
            raise
        except Exception as error:  # the others may still be measured
            self.failed(name, error)
        self.save()

    def failed(self, name: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self.result["failures"].append({"case": name, "error": text})
        print(f"{name:<28} FAILED: {str(error)[:400]!r}", flush=True)

    def raw(self, name: str, steps: list[Step]) -> None:
        """The steps as they came, in a file of their own."""
        words = "".join(c if c.isalnum() else "_" for c in name)
        path = self.folder / f"{words}.steps.json"
        path.write_text(json.dumps(columns(steps)))

    def save(self) -> None:
        self.result["seconds"] = round(time.monotonic() - self._began, 1)
        save(self.out, self.result)

    def table(self) -> None:
        """All cases once more, the last thing on the screen."""
        print(f"\n{self.out.name}: {self.result['seconds']} s, us")
        for name, found in self.result["cases"].items():
            print(f"{name:<28} {line(found)}")
        for bar in self.result.get("bars", ()):
            print(("reached  " if bar["reached"] else "MISSED   ") + bar["text"])
        for failure in self.result["failures"]:
            print(
                f"{failure['case']:<28} FAILED: {failure['error'].strip().splitlines()[-1][:200]}"
            )


class Run:
    """The cases on two servers."""

    def __init__(self, both: Servers, args: argparse.Namespace, report: Report) -> None:
        self.both, self.report = both, report
        self.batches = [int(word) for word in args.batches.split(",")]
        self.load = Load(1, context=args.context, nodes=args.chain)
        self.tree = args.tree
        self.transport = both.cell.handoff
        self.pairs = [int(word) for word in args.pairs.split(",") if word]
        self.delay_ms = args.delay_ms
        self.sizes = Sizes(args.steps, args.turns, args.profiled)
        self.only = set(args.only.split(","))

    def all(self, profile: Path) -> None:
        case = self.report.case
        chain, tree = self.load, replace(self.load, kind="tree", nodes=self.tree)
        for load in (chain, tree) if "steps" in self.only else ():
            for batch in self.batches:
                name = f"{load.kind} {load.nodes} x {batch}"
                case(name, self.steps, name, replace(load, batch=batch))
        ends = sorted({self.batches[0], self.batches[-1]})
        if "delay" in self.only:
            for batch, depth in [(batch, depth) for depth in (1, 0) for batch in ends]:
                name = f"delay depth {depth} x {batch}"
                case(name, self.delay, name, replace(chain, batch=batch, depth=depth))
        if "pingpong" in self.only:
            for batch in self.pairs:
                name = f"ping-pong x {batch}"
                case(name, self.ping_pong, name, replace(chain, batch=batch))
        if "profile" in self.only:
            for batch in ends:
                name = f"profile x {batch}"
                case(name, self.profile, replace(chain, batch=batch), profile)

    def _measured(self, name: str, run: Driven, **more: Any) -> list[Step]:
        steps = run.window(self.sizes.steps, **more)
        self.report.raw(name, steps)
        return steps

    def steps(self, name: str, load: Load) -> dict[str, Any]:
        """One load, nothing in its way."""
        with driven(self.both, load, self.transport) as run:
            run.settle()
            return {"transport": run.transport, **summary(self._measured(name, run))}

    def delay(self, name: str, load: Load) -> dict[str, Any]:
        """The same requests with and without a delay, in turn."""
        with driven(self.both, load, self.transport) as run:
            run.settle()
            plain, late = list[list[Step]](), list[list[Step]]()
            for turn in range(self.sizes.turns):
                plain.append(self._measured(f"{name} without {turn}", run))
                late.append(self._measured(f"{name} with {turn}", run, delay_ms=self.delay_ms))
        without, delayed = (
            statistics.median([p for steps in part for p in periods(steps)])
            for part in (plain, late)
        )
        return {
            "transport": run.transport,
            "delay_ms": self.delay_ms,
            "cost": round(delayed / without - 1, 4),
            "period": [round(without / 1e3, 2), round(delayed / 1e3, 2)],
            "without": [summary(steps) for steps in plain],
            "with": [summary(steps) for steps in late],
        }

    def ping_pong(self, name: str, load: Load) -> dict[str, Any]:
        """One group against two, in turn; faster: tokens per second of two over those of one."""
        found: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
        for turn in range(self.sizes.turns):
            for mode in ("off", "on"):
                wanted = replace(load, ping_pong=mode)
                with driven(self.both, wanted, self.transport) as run:
                    run.settle()
                    # A cycle of two groups is two steps.
                    count = self.sizes.steps * (2 if mode == "on" else 1)
                    steps = run.window(count)
                    self.report.raw(f"{name} {mode} {turn}", steps)
                    found[mode].append(summary(steps))
        speed = {
            mode: statistics.median(one["tokens_s"] for one in runs) for mode, runs in found.items()
        }
        return {
            "faster": round(speed["on"] / speed["off"], 4),
            "busy_on": statistics.median(one["busy"] for one in found["on"]),
            "busy_off": statistics.median(one["busy"] for one in found["off"]),
            **found,
        }

    def profile(self, load: Load, out: Path) -> dict[str, Any]:
        """Calls of CUDA in steady steps."""
        with driven(self.both, load, self.transport) as run:
            run.settle()
            count = self.sizes.profiled
            pid = self.both.target.process.pid
            return {
                "transport": run.transport,
                **profile_window(pid, out, lambda: run.window(count, warm=0)),
            }


def gpu_facts() -> Any:
    """The GPU as another process sees it: this one never opens it."""
    code = (
        "import json; from slipstream.accelerator import describe_gpu as d; print(json.dumps(d()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr[-300:]


def run(args: argparse.Namespace) -> int:
    """Measures all; returns the exit status."""
    report = Report(args.out, args.seconds)
    command = ["python -m benchmarks.timeline", *(Path(w).name for w in sys.argv[1:])]
    report.result["machine"] = {**describe(), "command": " ".join(command)}
    profile = report.folder / "profile.json"
    try:
        if args.device != "cpu":
            report.result["machine"]["gpu"] = gpu_facts()
        cell = Cell(
            args.target, args.draft, args.device, args.gpus, args.handoff, args.slots,
            args.max_model_len, (args.target_share, args.draft_share),
            random_weights=not args.weights,
            target_module="benchmarks.profiled_target",
            target_words=("--profile-out", str(profile)),
        )  # fmt: skip
        with servers(cell, report.folder, args.ready_s) as both:
            report.result["start_s"] = round(both.seconds, 1)
            report.result["gpus"] = args.gpus if args.device != "cpu" else 0
            print(f"both ready after {both.seconds:.1f} s", flush=True)
            Run(both, args, report).all(profile)
    except Exception as error:
        report.failed("servers", error)
    report.result["bars"] = bars(report.result["cases"], args.gpus)
    report.save()
    report.table()
    return 1 if report.result["failures"] else 0


def options(parser: argparse.ArgumentParser) -> None:
    """Flags of the two servers."""
    parser.add_argument("--target", type=Path, default=CONFIGS / "qwen3-8b")
    parser.add_argument("--draft", type=Path, default=CONFIGS / "qwen3-8b-dflash-b16")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--handoff", choices=("cuda_ipc", "grpc"), help="default: cuda_ipc on GPUs")
    parser.add_argument("--weights", action="store_true", help="the folders have weights: use them")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--target-share", type=float, default=0.75, help="of one GPU")
    parser.add_argument("--draft-share", type=float, default=0.15, help="of one GPU")
    parser.add_argument("--ready-s", type=float, default=300.0, help="for the servers' start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/timeline.json"))
    options(parser)
    parser.add_argument("--slots", type=int, help="default: as many as any case needs")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chain", type=int, default=CHAIN, help="nodes of a chain")
    parser.add_argument("--tree", type=int, default=TREE, help="nodes of a tree")
    parser.add_argument("--pairs", help="batches with ping-pong; default: 64,32 on two GPUs")
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=200, help="of a window")
    parser.add_argument("--turns", type=int, default=2, help="of compared windows")
    parser.add_argument("--profiled", type=int, default=40, help="steps under the profiler")
    parser.add_argument("--only", default="steps,delay,pingpong,profile")
    parser.add_argument("--seconds", type=float, default=420.0, help="no case begins later")
    args = parser.parse_args()
    two = args.gpus == 2 and args.device != "cpu"
    args.handoff = args.handoff or ("grpc" if args.device == "cpu" else "cuda_ipc")
    args.pairs = args.pairs if args.pairs is not None else "64,32" if two else ""
    most = [int(word) for word in f"{args.batches},{args.pairs}".split(",") if word]
    args.slots = args.slots or max(most)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no server is left behind
    raise SystemExit(run(args))


if __name__ == "__main__":
    main()
