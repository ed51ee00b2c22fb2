"""Are a GPU's tokens those of plain decoding, in fp32, sampled and in bf16, and what is tau?

Both runners of the embedded pair in one process, without servers (`benchmarks.pair`). fp32: golden
ids, every tree, backends triton and torch. Sampled: with and without draft, and beside other
requests. bf16: every first difference from plain decoding with its margin (`benchmarks.margins`).

    python -m benchmarks.gpu_lossless --golden FILE.jsonl --out FILE.json

Exit status 1: something differed, was a bug, failed, or was left out for lack of time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lossless import choose
from benchmarks.margins import Difference, compare, first_difference
from benchmarks.pair import SLOTS, Pair, Request, Row, taus, unload
from benchmarks.stack import machine, save
from slipstream.params import SamplingParams
from slipstream.tree import TreeSpec, resolve_spec

SHAPES = ("chain", "w4-b64", "w4-b128", "w7-b64", "w7-b128")
SAMPLED_SHAPES = ("chain", "w7-b64")
SAMPLED_PER_SET = 3
TEMPERATURES = (0.7, 1.0)
TOP_P = 0.95
FEW_SLOTS = 5
LOGPROBS = 20
MOST_TOKENS = 256
TAU_PERCENT = 1.0
"""How far fp32 may be from the heads' own tables."""

PHASES = ("fp32", "sampled", "bf16")
TABLES = Path(__file__).parent / "results" / "replay_tau.json"

Result = dict[str, Any]


def tree_spec(shape: str, block_size: int) -> TreeSpec:
    """`chain`, or w{width}-b{budget}: top2gap with its spine."""
    if shape == "chain":
        return resolve_spec("chain", 1, block_size, block_size=block_size)
    width, budget = (int(word[1:]) for word in shape.split("-"))
    return resolve_spec("top2gap", width, budget, block_size=block_size)


def table(head: str, shape: str) -> dict[str, float]:
    """tau of all 60 prompts by replay of a CPU's answers; empty where there is none."""
    found: dict[str, dict[str, float]] = json.loads(TABLES.read_text())["tau"]
    name = shape if shape == "chain" else f"top2gap {shape.replace('-', ' ')}, spine"
    return found.get(f"{head} {name}", {})


@dataclass
class Report:
    """Results by configuration, written and printed as they come.

    Attributes:
        bad: configurations that show less than what is claimed.
    """

    out: Path
    seconds: float
    result: Result = field(default_factory=lambda: {"machine": machine(), "configs": {}})
    bad: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def attempt(self, name: str, work: Callable[[], Result]) -> bool:
        """Runs one configuration; its failure is recorded. False when it failed."""
        began = time.perf_counter()
        if began - self.began > self.seconds:
            got: Result = {"ok": False, "error": "left out: no time left"}
        else:
            try:
                got = work()
            except Exception:
                got = {"ok": False, "error": traceback.format_exc()}
        got["seconds"] = round(time.perf_counter() - began, 1)
        if not got["ok"]:
            self.bad.append(name)
        self.result["configs"][name] = got
        self.result["seconds"] = round(time.perf_counter() - self.began, 1)
        self.result["bad"] = self.bad
        save(self.out, self.result)
        print(line(name, got), flush=True)
        return "error" not in got


def line(name: str, got: Result) -> str:
    """One row of the table, and beneath it what differed."""
    mark = "ok " if got["ok"] else "BAD"
    if "error" in got:
        return f"{mark} {name:34} {got['seconds']:6.1f} s  {got['error']}"
    words = [f"{mark} {name:34} {got['seconds']:6.1f} s"]
    if "prompts" in got:
        words.append(f"{got['identical']}/{got['prompts']} identical")
    if got.get("tau"):
        words.append("tau " + " / ".join(str(tau) for tau in got["tau"].values()))
    if got.get("deviation_percent"):
        deviations = (f"{d:+.2f}" for d in got["deviation_percent"].values())
        words.append(f"({' / '.join(deviations)} % of {got['reference']})")
    words += [f"{count} {kind}" for kind, count in got.get("verdicts", {}).items() if count]
    return "\n      ".join(["  ".join(words), *got.get("shown", [])])


@dataclass
class Run:
    """What the phases share.

    Attributes:
        golden: rows of the file, those wanted.
        whole: whether those are all of them, to their ends, as the tables have it.
        first: rows of each head and tree of the first backend that ran; the second is compared
            with them where it runs fewer prompts than the tables have.
    """

    report: Report
    golden: list[dict[str, Any]]
    whole: bool
    limit: int
    first: dict[tuple[str, str], list[Row]] = field(default_factory=dict)

    def requests(
        self, golden: Sequence[dict[str, Any]], logprobs: int | None = None
    ) -> list[Request]:
        return [
            Request(row["id"], row["set"], row["prompt_ids"], self.limit, logprobs=logprobs)
            for row in golden
        ]

    def deviation(self, head: str, shape: str, rows: list[Row]) -> Result:
        """tau, and how far it is from what it should be."""
        found: Result = {"tau": taus(rows)}
        wanted: dict[str, Any] = {}
        if self.whole and len(rows) == len(self.golden):
            wanted, found["reference"] = table(head, shape), "the table"
        elif (head, shape) in self.first:
            ids = {row.request.id for row in rows}
            same = [row for row in self.first[head, shape] if row.request.id in ids]
            wanted, found["reference"] = taus(same), "the first backend"
        if wanted:
            found["deviation_percent"] = {
                group: round(100 * (tau / wanted[group] - 1), 2)
                for group, tau in found["tau"].items()
                if tau and wanted.get(group)
            }
        return found

    # fp32

    def fp32(self, pair: Pair, backend: str, head: str, golden: list[dict[str, Any]]) -> None:
        """Golden ids without draft and with every tree."""
        for shape in ("plain", *SHAPES):
            spec = None if shape == "plain" else tree_spec(shape, pair.block_size)
            self.report.attempt(
                f"fp32/{backend}/{head}/{shape}",
                partial(self._golden, pair, head, shape, spec, golden),
            )

    def _golden(
        self,
        pair: Pair,
        head: str,
        shape: str,
        spec: TreeSpec | None,
        golden: list[dict[str, Any]],
    ) -> Result:
        rows = pair.run(self.requests(golden), spec)
        wrong = []
        for row, known in zip(rows, golden, strict=True):
            expected = known["greedy_ids"][: self.limit]
            at = first_difference(row.tokens, expected)
            if at is not None:
                wrong.append((known, at, row.tokens[at : at + 1], expected[at : at + 1]))
        got = counts(rows, len(wrong), spec)
        got["differences"] = [
            {"id": known["id"], "at": at, "got": token, "expected": other}
            for known, at, token, other in wrong
        ]
        got["shown"] = [
            f"{known['id']} at {at}: {token} for {other}" for known, at, token, other in wrong
        ]
        if spec is None:
            return got
        got |= self.deviation(head, shape, rows)
        self.first.setdefault((head, shape), rows)
        if got.get("reference") == "the table":
            off = [abs(d) for d in got.get("deviation_percent", {}).values()]
            got["ok"] = got["ok"] and max(off, default=0.0) <= TAU_PERCENT
        if wrong:
            again = self.requests([known for known, *_ in wrong], LOGPROBS)
            found = differences(pair.run(again, None), pair.run(again, spec))
            got["with_logprobs"] = [difference.json() for difference in found]
            got["shown"] += [f"again, from plain decoding: {difference}" for difference in found]
        return got

    # Sampled

    def sampled(self, pair: Pair, backend: str, head: str) -> None:
        """Seeded draws: the same with and without draft, and whoever runs beside."""
        golden = choose(self.golden, SAMPLED_PER_SET)
        for temperature in TEMPERATURES:
            requests = [
                replace(request, sampling=SamplingParams(temperature, TOP_P, seed=1000 + index))
                for index, request in enumerate(self.requests(golden))
            ]
            plain: list[Row] = []
            for shape in ("plain", *SAMPLED_SHAPES):
                spec = None if shape == "plain" else tree_spec(shape, pair.block_size)
                self.report.attempt(
                    f"sampled/{backend}/{head}/T{temperature:g}/{shape}",
                    partial(self._seeded, pair, requests, spec, plain),
                )

    def _seeded(
        self, pair: Pair, requests: list[Request], spec: TreeSpec | None, plain: list[Row]
    ) -> Result:
        """Two runs, the second in another order and batch. `plain` is filled when it is empty."""
        rows = pair.run(requests, spec)
        others = pair.run(requests[::-1], spec, FEW_SLOTS)[::-1]
        if spec is None:
            plain += rows
        if not plain:
            raise RuntimeError("there is no plain run to compare with")
        shown, wrong = [], set()
        for what, found in (("plain", rows), ("neighbours", others)):
            for row, known in zip(found, plain, strict=True):
                at = first_difference(row.tokens, known.tokens)
                if at is not None:
                    wrong.add(row.request.id)
                    tokens = row.tokens[at : at + 1], known.tokens[at : at + 1]
                    shown.append(f"{what}: {row.request.id} at {at}: {tokens[0]} for {tokens[1]}")
        got = counts(rows, len(wrong), spec)
        if spec is not None:
            got["tau"] = taus(rows)
        return {**got, "shown": shown}

    # bf16

    def bf16(self, pair: Pair, backend: str, head: str) -> None:
        """tau, and whether what differs from plain decoding was nearly equal."""
        requests, plain = self.requests(self.golden, LOGPROBS), list[Row]()

        def without() -> Result:
            plain.extend(pair.run(requests, None))
            pairs = zip(plain, self.golden, strict=True)
            golden = sum(row.tokens != known["greedy_ids"][: self.limit] for row, known in pairs)
            # What rounding makes of the fp32 answers is stated, not judged.
            return {**counts(plain, golden, None), "ok": True}

        def drafted(shape: str) -> Result:
            if not plain:
                raise RuntimeError("there is no plain run to compare with")
            spec = tree_spec(shape, pair.block_size)
            rows = pair.run(requests, spec)
            found = differences(plain, rows)
            verdicts = [difference.verdict for difference in found]
            got = counts(rows, len(found), spec)
            got["ok"] = "BUG" not in verdicts and got["steps"] == got["steps_with_draft"]
            kinds = ("near-tie", "exact tie", "BUG")
            got["verdicts"] = {kind: verdicts.count(kind) for kind in kinds}
            got["differences"] = [difference.json() for difference in found]
            got["shown"] = [str(difference) for difference in found]
            return got | self.deviation(head, shape, rows)

        self.report.attempt(f"bf16/{backend}/{head}/plain", without)
        for shape in SHAPES:
            self.report.attempt(
                f"bf16/{backend}/{head}/{shape}",
                partial(drafted, shape),
            )


def counts(rows: list[Row], wrong: int, spec: TreeSpec | None) -> Result:
    """What every configuration says; with a draft every step has to have verified one."""
    steps, drafted = sum(row.steps for row in rows), sum(row.drafted for row in rows)
    return {
        "ok": not wrong and (spec is None or drafted == steps),
        "prompts": len(rows),
        "identical": len(rows) - wrong,
        "tokens": sum(len(row.tokens) for row in rows),
        "steps": steps,
        "steps_with_draft": drafted,
    }


def differences(plain: list[Row], rows: list[Row]) -> list[Difference]:
    found = (compare(one, other) for one, other in zip(plain, rows, strict=True))
    return [difference for difference in found if difference is not None]


@contextmanager
def loaded(
    report: Report, head: str, device: str, dtype: str, backend: str
) -> Iterator[Pair | None]:
    """A pair, and its memory given back; None when it could not be loaded."""
    held: list[Pair] = []

    def load() -> Result:
        held.append(Pair(head, device, dtype, backend))
        return {"ok": True}

    report.attempt(f"load/{dtype}/{backend}/{head}", load)
    try:
        yield held[0] if held else None
    finally:
        held.clear()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PHASES), help="of fp32, sampled, bf16")
    parser.add_argument("--heads", default="jetspec,dflash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backends", help="of fp32; default: triton,torch, on a CPU torch")
    parser.add_argument("--per-set", type=int, default=0, help="prompts of each set; 0: all")
    parser.add_argument("--torch-prompts", type=int, default=3, help="the same for torch on a GPU")
    parser.add_argument("--tokens", type=int, default=MOST_TOKENS, help="new tokens at most")
    parser.add_argument("--seconds", type=float, default=200.0, help="nothing begins after them")
    args = parser.parse_args()
    args.only, args.heads = args.only.split(","), args.heads.split(",")
    args.backends = (args.backends or ("torch" if args.device == "cpu" else "triton,torch")).split(
        ","
    )
    if unknown := set(args.only) - set(PHASES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PHASES)}")
    return args


def main() -> None:
    args = arguments()
    golden = [json.loads(text) for text in args.golden.read_text().splitlines()]
    whole = not args.per_set and args.tokens == MOST_TOKENS
    run = Run(Report(args.out, args.seconds), choose(golden, args.per_set), whole, args.tokens)
    run.report.result["slots"] = SLOTS
    main_backend = args.backends[0]
    for head in args.heads:
        if {"fp32", "sampled"} & set(args.only):
            with loaded(run.report, head, args.device, "float32", main_backend) as pair:
                if pair is not None and "fp32" in args.only:
                    run.fp32(pair, main_backend, head, run.golden)
                if pair is not None and "sampled" in args.only:
                    run.sampled(pair, main_backend, head)
            pair = None
            unload()
        if "bf16" in args.only:
            with loaded(run.report, head, args.device, "bfloat16", main_backend) as pair:
                if pair is not None:
                    run.bf16(pair, main_backend, head)
            pair = None
            unload()
    # The plain backend last: it is slow, and shows the least.
    for backend in args.backends[1:] if "fp32" in args.only else ():
        few = choose(run.golden, args.torch_prompts) if backend == "torch" else run.golden
        for head in args.heads:
            with loaded(run.report, head, args.device, "float32", backend) as pair:
                if pair is not None:
                    run.fp32(pair, backend, head, few)
            pair = None
            unload()
    bad = run.report.bad
    print(f"{len(bad)} bad: {', '.join(bad)}" if bad else "all good", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
