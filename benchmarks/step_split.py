"""The whole split step of `step_time`: two servers under MPS, then the same in one process.

The one process runs as a client of MPS too, with nobody beside it: what MPS itself takes. Of both
its runs the kernels are told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.split import Load, NoSession, Step, columns, driven
from benchmarks.split_servers import Cell, servers, shared_gpu
from benchmarks.split_summary import summary
from benchmarks.stack import save
from benchmarks.step_profile import profile
from benchmarks.step_together import together
from slipstream.models import load_draft_config
from slipstream.tree import TreeSpec, resolve_spec

STEPS, WARM = 200, 20
ALONE_S = 240.0
"""Most seconds of the one process under MPS."""

Failed = Callable[[str, Exception], None]


class SplitSteps:
    """The ways of running a step, case by case; what fails is told to `failed`.

    Attributes:
        found: by case, `split`, `together` and `ratio`, the split step's period over the other's;
            `alone` is `together` under MPS.
    """

    def __init__(
        self, args: argparse.Namespace, slots: int, length: int, failed: Failed,
        save_all: Callable[[], None],
    ) -> None:  # fmt: skip
        """`slots` of the servers, `length`: their --max-model-len."""
        self._args, self._slots, self._length = args, slots, length
        self._failed, self._save = failed, save_all
        self._steps = 8 if args.tiny else STEPS
        self._context = min(map(int, args.contexts.split(",")))
        block = load_draft_config(args.draft).block_size
        # With pinned nodes the gateway plans a tree's whole budget.
        self._trees: dict[str, TreeSpec] = {
            "chain": resolve_spec("chain", block_size=block),
            "tree": resolve_spec("top2gap", args.tree_width, args.tree_nodes, block_size=block),
        }
        batches = sorted(set(map(int, args.batches.split(","))))
        self._cases = {
            f"{kind} x {batch}": (kind, batch)
            for kind in self._trees
            for batch in (batches[0], batches[-1])
        }
        self.found: dict[str, dict[str, Any]] = defaultdict(lambda: {"kernels": {}})

    def split(self, folder: Path) -> None:
        """The two servers; nothing of this process may be on the GPU yet."""
        args, on_gpu = self._args, self._args.device != "cpu"
        cell = Cell(
            args.target, args.draft, args.device, 1, "cuda_ipc" if on_gpu else "grpc", self._slots,
            self._length, (args.target_share, args.draft_share),
        )  # fmt: skip
        try:
            with servers(cell, folder) as both:
                print(f"both servers ready after {both.seconds:.1f} s", flush=True)
                for name, case in self._cases.items():
                    self._case(name, "split", folder, self._split, both, *case)
        except Exception as error:
            self._failed("split servers", error)

    def alone(self, folder: Path) -> None:
        """The one process under MPS, as a child; nothing of this process may be on the GPU yet."""
        args, out = self._args, folder / "alone.json"
        command = [sys.executable, "-m", "benchmarks.step_time", "--split", "together"]
        for flag in (
            "target", "draft", "device", "batches", "contexts", "slots", "max-model-len",
            "target-share", "draft-share", "tree-nodes", "tree-width",
        ):  # fmt: skip
            command += [f"--{flag}", str(getattr(args, flag.replace("-", "_")))]
        command += ["--tiny"] if args.tiny else []
        try:
            with shared_gpu() as environment, (folder / "alone.log").open("wb") as log:
                done = subprocess.run(
                    [*command, "--out", str(out)], env={**os.environ, **environment},
                    stdout=log, stderr=log, timeout=ALONE_S, check=False,
                )  # fmt: skip
            said = json.loads(out.read_text())
            for name, case in said["split"].items():
                if "together" in case:
                    self._found(name, "alone", case["together"], case["kernels"].get("together"))
            if done.returncode:
                raise RuntimeError(f"it ended with {done.returncode}: {said['failures']}")
        except Exception as error:
            self._failed("one process under MPS", error)

    def together(self, target: Any, draft: Any, folder: Path) -> None:
        """Both runners of this process, whose slots and contexts are free."""
        for name, case in self._cases.items():
            self._case(name, "together", folder, self._together, target, draft, *case)
        for (
            name,
            case,
        ) in self._cases.items():  # last: then looks at the pace of kernels tell nothing
            self._kernels(name, target, draft, *case)

    def _split(self, both: Any, kind: Any, batch: int) -> list[Step]:
        tree = self._trees[kind]
        load = Load(batch, self._context, kind, tree.budget, tree.width)
        with driven(both, load, both.cell.handoff) as run:
            run.settle()
            return run.window(self._steps, warm=WARM)

    def _together(self, target: Any, draft: Any, kind: str, batch: int) -> list[Step]:
        with together(target, draft, self._trees[kind], batch, self._context) as run:
            return run.run(WARM + self._steps)[WARM:]

    def _kernels(self, name: str, target: Any, draft: Any, kind: str, batch: int) -> None:
        """Of steps that the host does not run ahead of."""
        try:
            with together(target, draft, self._trees[kind], batch, self._context) as run:
                kernels = profile(lambda: run.run(1), self._args.device != "cpu")
        except Exception as error:  # the times stand without it, such as where nothing is seen
            self._failed(f"kernels {name}", error)
        else:
            self.found[name]["kernels"]["together"] = kernels
            self._save()

    def _case(
        self, name: str, way: str, folder: Path, work: Callable[..., Any], *args: Any
    ) -> None:
        try:
            steps = work(*args)
        except NoSession:
            raise
        except Exception as error:  # the others may still be measured
            self._failed(f"{way} {name}", error)
            return
        save(folder / f"{way} {name}.steps.json".replace(" ", "_"), columns(steps))
        self._found(name, way, summary(steps))

    def _found(
        self, name: str, way: str, said: dict[str, Any], kernels: dict[str, Any] | None = None
    ) -> None:
        case = self.found[name]
        case[way], case[f"{way}_p50_us"] = said, said["period"]["p50"]
        if kernels is not None:
            case["kernels"][way] = kernels
        if "split" in case and "together" in case and case["together_p50_us"]:
            case["ratio"] = round(case["split_p50_us"] / case["together_p50_us"], 4)
        print(f"{way:<9} {name:<12} {_line(said)}", flush=True)
        self._save()

    def table(self) -> None:
        """The ratios, the last thing on the screen."""
        for name, case in self.found.items():
            print(
                f"{name:<12} split {case.get('split_p50_us')} us, one process "
                f"{case.get('together_p50_us')} us, ratio {case.get('ratio')}; "
                f"one process under MPS {case.get('alone_p50_us')} us",
                flush=True,
            )


def _line(found: dict[str, Any]) -> str:
    parts = []
    for name in ("period", "computed", "drafted", "round_trip", "enqueued"):
        if found.get(name):
            parts.append(f"{name} {found[name]['p50']} / {found[name]['p90']}")
    return ", ".join(parts) + " us"
