"""How long is a step of each server on one GPU, and how far from what the card allows?

Target and draft lie in one process, loaded as the servers load them, with made-up weights on the
real shapes: next to nothing is accepted, but no step's time depends on values. Verify, draft, whole
step (draft, verify, features handed over through the host), a mixed batch, prefill, start-up; each
beside its floor by the copy bandwidth and the matrix rate of this run.

With --split also the whole step of two servers under MPS, handed over on the device, against the
same kernels in one process without a handoff; `--split together` is that process alone.

    python -m benchmarks.step_time --out benchmarks/results/step_time.json
    python -m benchmarks.step_time --split only --out benchmarks/results/step_split.json
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.rates import copy_bandwidth, matrix_rate
from benchmarks.stack import machine, save
from benchmarks.step_floor import Floor, Floors, Rates
from benchmarks.step_measure import Clocks, Reps, measure
from benchmarks.step_profile import profile
from benchmarks.step_report import Report
from benchmarks.step_rig import Rig, Setup, load
from benchmarks.step_split import SplitSteps
from services.target.runner import FeatureSpan, PrefillEntry
from slipstream.models import load_config, load_draft_config
from slipstream.tree import resolve_spec

CONFIGS = Path(__file__).parent / "configs"
TREE_NODES, TREE_WIDTH, MIXED_NODES = 64, 7, 128
WITH_STEPS = ("no", "also")
"""Of --split: those that measure the steps of each server."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `chunk` and `prompts` are rows of prefill steps."""

    batches: list[int]
    contexts: list[int]
    reps: Reps
    chunk: int
    prompts: tuple[int, ...]
    tree_nodes: int
    tree_width: int


class Run:
    """The cases over a filled rig; each is recorded, and fails alone."""

    def __init__(self, rig: Rig, plan: Plan, floors: Floors, rates: Rates, report: Report) -> None:
        self.rig, self.plan, self.floors, self.rates = rig, plan, floors, rates
        self.report = report
        block = rig.draft.spec.block_size
        self.block = block
        self.trees = {
            "chain": resolve_spec("chain", block_size=block),
            "tree": resolve_spec("top2gap", plan.tree_width, plan.tree_nodes, block_size=block),
        }
        self.nodes = {"plain": 1, **{kind: spec.budget for kind, spec in self.trees.items()}}

    def all(self) -> None:
        for length in self.plan.contexts:
            for batch in self.plan.batches:
                for kind in ("chain", "tree", "plain"):
                    name = f"verify  {batch:>2} x {length} {kind}"
                    self.report.case("verify", name, self.verify, batch, length, kind)
        for kind, spec in self.trees.items():
            self.rig.draft_as(spec)
            for length in self.plan.contexts:
                for batch in self.plan.batches:
                    name = f"{batch:>2} x {length} {kind}"
                    self.report.case("draft", f"draft   {name}", self.draft, batch, length, kind)
                    self.report.case("step", f"step    {name}", self.step, batch, length, kind)
        for length in self.plan.contexts:
            self.report.case("mixed", f"mixed   {length}", self.mixed, length)
        chunk = self.plan.chunk
        for first in (0, chunk):
            name = f"prefill {chunk} rows after {first}"
            self.report.case("prefill", name, self.prefill, first, chunk, False)
        for count in self.plan.prompts:
            name = f"prefill {count} rows, first token"
            self.report.case("prefill", name, self.prefill, 0, count, True)

    def verify(self, batch: int, length: int, kind: str) -> dict[str, Any]:
        """`TargetRunner.decode` of random proposals."""
        return self._decode([self.nodes[kind]] * batch, length, kind)

    def mixed(self, length: int) -> dict[str, Any]:
        """One large tree among chains in all other slots."""
        nodes = [MIXED_NODES] + [self.block] * (len(self.rig.rows) - 1)
        found = self._decode(nodes, length, f"one of {MIXED_NODES} nodes, others chains")
        step = getattr(self.rig.target, "_step", None)
        if step is not None:  # what the device was told of the last step
            found["rows_on_device"] = int(step.rows.counts[1])
            assert found["rows_on_device"] == sum(nodes), (found["rows_on_device"], sum(nodes))
        return found

    def _decode(self, nodes: list[int], length: int, kind: str) -> dict[str, Any]:
        rig, starts = self.rig, list[int]()
        rig.rewind(len(nodes), length)

        def step() -> dict[str, float]:
            entries = rig.proposals(nodes, self.block)
            starts.append(rig.rows[0].start)
            began = time.perf_counter()
            results = rig.target.decode(entries)
            ended = time.perf_counter()
            verified = sum(result.nodes for result in results)
            assert verified == sum(nodes), f"{verified} nodes were verified, not {sum(nodes)}"
            rig.advance(results)
            return {"total": ended - began}

        times = measure(step, self.plan.reps, Clocks(rig.target_clock))
        context = sum(starts) / len(starts)
        floor = self.floors.verify(len(nodes), sum(nodes), context)
        return self._found(times, floor, len(nodes), context, kind, rows=sum(nodes))

    def draft(self, batch: int, length: int, kind: str) -> dict[str, Any]:
        """One accepted row of each slot written, then a tree of each."""
        rig, sizes = self.rig, list[int]()
        rig.rewind(batch, length)

        def step() -> dict[str, float]:
            rows, entries = rig.context_rows(batch), rig.draft_entries(batch, self.nodes[kind])
            began = time.perf_counter()
            rig.context.write(rows)
            written = time.perf_counter()
            trees = rig.context.draft(entries)
            ended = time.perf_counter()
            sizes.extend(map(len, trees))
            return {"total": ended - began, "write": written - began, "draft": ended - written}

        times = measure(step, self.plan.reps, Clocks(draft=rig.draft_clock))
        floor = self.floors.draft(batch, length)
        nodes = {"nodes_mean": round(sum(sizes) / len(sizes), 2)}
        return self._found(times, floor, batch, length, kind, rows=batch * self.block, **nodes)

    def step(self, batch: int, length: int, kind: str) -> dict[str, Any]:
        """Draft, verify, hand over, as one loop: what one stream of steps takes."""
        rig, starts, accepted = self.rig, list[int](), list[int]()
        rig.rewind(batch, length)
        nodes = self.nodes[kind]

        def step() -> dict[str, float]:
            before = [row.start for row in rig.rows[:batch]]
            starts.append(before[0])
            began = time.perf_counter()
            trees = rig.context.draft(rig.draft_entries(batch, nodes))
            drafted = time.perf_counter()
            results = rig.target.decode([rig.entry(i, nodes, tree) for i, tree in enumerate(trees)])
            verified = time.perf_counter()
            rig.advance(results)
            rig.hand_over(batch, before)
            ended = time.perf_counter()
            accepted.extend(result.accepted for result in results)
            return {
                "total": ended - began,
                "draft": drafted - began,
                "verify": verified - drafted,
                "hand_over": ended - verified,
            }

        times = measure(step, self.plan.reps, Clocks(rig.target_clock, rig.draft_clock))
        context = sum(starts) / len(starts)
        floor = self.floors.verify(batch, batch * nodes, context)
        floor += self.floors.draft(batch, context)
        mean = {"accepted_mean": round(sum(accepted) / len(accepted), 3)}
        return self._found(times, floor, batch, context, kind, rows=batch * nodes, **mean)

    def prefill(self, first: int, count: int, last: bool) -> dict[str, Any]:
        """A chunk of one slot, its features stored; `read` is their way to the host."""
        rig = self.rig
        rig.readmit(0, first + count + (0 if last else 1))
        entry = PrefillEntry(0, first, count, last, rig.rows[0].pages)

        def step() -> dict[str, float]:
            began = time.perf_counter()
            rig.target.prefill([entry])
            if not last:  # nothing was waited for
                rig.synchronize()
            ended = time.perf_counter()
            rig.target.features([FeatureSpan(0, first, count)])
            return {"total": ended - began, "read": time.perf_counter() - ended}

        times = measure(step, self.plan.reps, Clocks())
        floor = self.floors.prefill(count, first, last)
        kind = "prompt, first token" if last else "chunk"
        return self._found(times, floor, 1, first, kind, rows=count)

    def _found(
        self,
        times: dict[str, Any],
        floor: Floor,
        batch: int,
        context: float,
        kind: str,
        **more: Any,
    ) -> dict[str, Any]:
        return {
            "batch": batch,
            "context": round(context, 1),
            "kind": kind,
            **more,
            **times,
            "floor": floor.report(self.rates, times["wall"]["total"]["median_ms"]),
        }


def run(args: argparse.Namespace) -> int:
    """Measures all; returns the exit status."""
    report = Report(args.out)
    on_gpu = args.device != "cpu"
    plan = _plan(args)
    config, draft = load_config(args.target), load_draft_config(args.draft)
    slots = max(args.slots, *plan.batches)
    length = min(args.max_model_len, config.max_position_embeddings)
    folder = args.out.with_suffix("")
    split = None
    try:
        if args.split != "no":
            split = SplitSteps(args, slots, length, report.failed, report.save)
            report.result["split"] = split.found
            if args.split != "together":  # before this process is on the GPU
                split.split(folder)
                if on_gpu:
                    split.alone(folder)
        report.result["machine"] = machine()
        # Before the servers take their shares.
        dtype = torch.bfloat16 if on_gpu else torch.float32
        rates = Rates(copy_bandwidth(args.device), matrix_rate(args.device, dtype))
        setup = Setup(
            args.target, args.draft, args.device, slots, length, args.target_share,
            args.draft_share,
        )  # fmt: skip
        report.result |= {
            "rates": {"copy_bytes_s": rates.copy, "matrix_operations_s": rates.matrix},
            "setup": {
                "target": args.target.name, "draft": args.draft.name, "slots": slots,
                "max_model_len": length, "shares": [args.target_share, args.draft_share],
            },
        }  # fmt: skip
        print(f"copy {rates.copy / 1e12:.3f} TB/s, {rates.matrix / 1e12:.1f} TFLOP/s", flush=True)
        loaded = load(setup)
        report.result["startup"] = loaded.startup
        if args.split in WITH_STEPS:
            rig = Rig(loaded, max(*plan.contexts, 2 * plan.chunk))
            item = torch.empty(0, dtype=getattr(torch, loaded.target.spec.dtype)).element_size()
            measured = Run(rig, plan, Floors(config, draft, item), rates, report)
            began = time.perf_counter()
            rig.fill(measured.trees["chain"])
            report.result["startup"]["fill_s"] = round(time.perf_counter() - began, 2)
    except Exception as error:
        report.failed("start", error)
        return 1
    if args.split in WITH_STEPS:
        measured.all()
        rig.empty()
    if split is not None:
        split.together(loaded.target, loaded.draft, folder)
        split.table()
    if args.split in WITH_STEPS and args.profile is not None:  # last, as in `SplitSteps.together`
        _profile(measured, args.profile)
    report.save()
    failures = len(report.result["failures"])
    print(f"{report.result['seconds']} s, {failures} failed, {args.out}", flush=True)
    return 1 if failures else 0


def _profile(measured: Run, path: Path) -> None:
    """Tables of kernels of a verify and a draft step at batch 1."""
    rig, length = measured.rig, measured.plan.contexts[0]
    try:
        rig.refill(measured.trees["chain"])
    except Exception as error:
        measured.report.failed("profile", error)
        return
    tables: dict[str, Any] = {}
    for kind, spec in measured.trees.items():
        nodes = measured.nodes[kind]

        def verify(nodes: int = nodes) -> None:
            entries = rig.proposals([nodes], measured.block)
            rig.advance(rig.target.decode(entries))

        def draft(nodes: int = nodes) -> None:
            rig.context.write(rig.context_rows(1))
            rig.context.draft(rig.draft_entries(1, nodes))

        for name, step in ((f"verify {kind}", verify), (f"draft {kind}", draft)):
            try:
                rig.draft_as(spec)
                rig.rewind(1, length)
                tables[name] = profile(step, rig.on_gpu)
            except Exception as error:
                measured.report.failed(f"profile {name}", error)
    save(path, {"machine": machine(), "context": length, "batch": 1, **tables})
    print(f"profile: {path}", flush=True)


def _plan(args: argparse.Namespace) -> Plan:
    reps = Reps(1, 3, 1) if args.tiny else Reps(2, 10, 4) if args.quick else Reps(4, 32, 10)
    batches, contexts = (list(map(int, text.split(","))) for text in (args.batches, args.contexts))
    tree = args.tree_nodes, args.tree_width
    if args.tiny:
        return Plan(batches, contexts, reps, 64, (8, 16, 32), *tree)
    return Plan(batches, contexts, reps, 2048, (32, 128, 512), *tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    parser.add_argument("--target", type=Path, default=CONFIGS / "qwen3-8b")
    parser.add_argument("--draft", type=Path, default=CONFIGS / "qwen3-8b-dflash-b16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", help="default: 1,8,32")
    parser.add_argument("--contexts", help="default: 1024,4096")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--target-share", type=float, default=0.75)
    parser.add_argument("--draft-share", type=float, default=0.15)
    parser.add_argument(
        "--split",
        choices=(*WITH_STEPS, "only", "together"),
        default="no",
        help="the step of two servers",
    )
    parser.add_argument("--tree-nodes", type=int, default=TREE_NODES)
    parser.add_argument("--tree-width", type=int, default=TREE_WIDTH)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--tiny", action="store_true", help="sizes for a tiny pair on a CPU")
    parser.add_argument("--profile", type=Path, help="also write a table of kernels")
    args = parser.parse_args()
    args.batches = args.batches or ("1,2,4" if args.tiny else "1,8,32")
    args.contexts = args.contexts or ("48,96" if args.tiny else "1024,4096")
    args.slots = args.slots or (4 if args.tiny else 32)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no server is left behind
    raise SystemExit(run(args))


if __name__ == "__main__":
    main()
