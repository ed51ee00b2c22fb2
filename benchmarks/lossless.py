"""Are the tokens those of plain greedy decoding, and how many are accepted?

Runs prompts with known plain greedy fp32 continuations through whole stacks, one per configuration,
and compares ids. The same answers give tau. Resumable: finished configurations are read from the
result file.

    python -m benchmarks.lossless --golden FILE.jsonl --out benchmarks/results/lossless.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.stack import Answer, Ask, machine, save, stack


@dataclass(frozen=True)
class Config:
    """One row of the matrix; `per_set` prompts of each set, 0: all."""

    head: str
    tree: str
    width: int
    budget: int
    spine: bool = True
    depth: int = 1
    streams: int = 8
    per_set: int = 0
    up: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        spine = "" if self.tree == "chain" else ("+spine" if self.spine else "-spine")
        shape = self.tree if self.tree == "chain" else f"{self.tree}-w{self.width}-b{self.budget}"
        rows = "all" if not self.per_set else f"{self.per_set}/set"
        more = "".join(f" {word}" for word in self.up)
        return f"{self.head}/{shape}{spine}/depth{self.depth}/x{self.streams}/{rows}{more}"

    @property
    def options(self) -> list[str]:
        spec: dict[str, Any] = {"tree": self.tree, "width": self.width, "budget": self.budget}
        if self.tree != "chain":
            spec["spine"] = self.spine
        return [
            *("--draft", self.head, "--dtype", "float32"),
            *("--speculative-config", json.dumps(spec)),
            *("--pipeline-depth", str(self.depth)),
            *self.up,
        ]


def matrix() -> list[Config]:
    """Everything that is claimed, cheapest evidence first."""
    rows = []
    for head in ("jetspec", "dflash"):
        chain = Config(head, "chain", 1, 16)
        small = Config(head, "top2gap", 4, 32)
        rows += [chain, small]
        for wide in (Config(head, "top2gap", 7, 64), Config(head, "best_first", 7, 32)):
            rows.append(_few(wide))
        rows += [_few(chain, depth=0), _few(small, depth=0)]
        rows += [_few(chain, streams=1), _few(small, streams=1)]
    rows += [
        Config("jetspec", "top2gap", 4, 32, spine=False),
        Config("jetspec", "accum_logp", 4, 32, spine=False),
        Config("jetspec", "top2gap", 7, 64, spine=False),
        Config("jetspec", "accum_logp", 7, 64, spine=False),
        Config("jetspec", "top2gap", 7, 64),
    ]
    return rows


def _few(config: Config, **changes: int) -> Config:
    return replace(config, per_set=4, **changes)


def choose(golden: list[dict[str, Any]], per_set: int) -> list[dict[str, Any]]:
    if not per_set:
        return golden
    taken: dict[str, int] = {}
    rows = []
    for row in golden:
        if taken.setdefault(row["set"], 0) < per_set:
            taken[row["set"]] += 1
            rows.append(row)
    return rows


def run(config: Config, golden: list[dict[str, Any]]) -> dict[str, Any]:
    rows = choose(golden, config.per_set)
    began = time.perf_counter()
    with stack(*config.options) as running:
        ready = time.perf_counter()
        answers = running.ask_all([Ask(row["prompt_ids"]) for row in rows], config.streams)
        seconds = time.perf_counter() - ready
    wrong = [
        describe(row, answer)
        for row, answer in zip(rows, answers, strict=True)
        if answer.ids != row["greedy_ids"]
    ]
    drafted = sum(n > 1 for answer in answers for n in answer.nodes)
    return {
        "prompts": len(rows),
        "identical": len(rows) - len(wrong),
        "wrong": wrong,
        "tau": {name: tau(pick(rows, answers, name)) for name in sets(rows)},
        "steps": sum(answer.steps for answer in answers),
        "steps_with_draft": drafted,
        "tokens": sum(len(answer.ids) for answer in answers),
        "seconds": round(seconds, 1),
        "start_seconds": round(ready - began, 1),
    }


def sets(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["set"] for row in rows))


def pick(rows: list[dict[str, Any]], answers: list[Answer], name: str) -> Iterable[Answer]:
    return [a for row, a in zip(rows, answers, strict=True) if row["set"] == name]


def tau(answers: Iterable[Answer]) -> float:
    """(emitted tokens - 1) / verify steps, summed over the set."""
    answers = list(answers)
    steps = sum(a.steps for a in answers)
    return round(sum(len(a.ids) - 1 for a in answers) / max(1, steps), 3)


def describe(row: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """Where an answer leaves the plain one."""
    expected = row["greedy_ids"]
    at = next(
        (i for i, (x, y) in enumerate(zip(answer.ids, expected, strict=False)) if x != y),
        min(len(answer.ids), len(expected)),
    )
    return {
        "id": row["id"],
        "at": at,
        "got": answer.ids[at : at + 4],
        "expected": expected[at : at + 4],
        "finish": answer.finish,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lossless.json"))
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--per-set", type=int, default=None, help="prompts of each set instead")
    parser.add_argument("--streams", type=int, default=None, help="requests at once instead")
    parser.add_argument("--up", default="", help='further options of up: --up="--device cuda"')
    args = parser.parse_args()
    changes: dict[str, Any] = {"up": tuple(shlex.split(args.up))}
    for name in ("per_set", "streams"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    golden = [json.loads(line) for line in args.golden.read_text().splitlines()]
    result = json.loads(args.out.read_text()) if args.out.exists() else {"configs": {}}
    result["machine"] = machine()
    for config in matrix():
        config = replace(config, **changes)
        if args.only not in config.name or config.name in result["configs"]:
            continue
        got = run(config, golden)
        result["configs"][config.name] = got
        save(args.out, result)
        print(
            f"{config.name}: {got['identical']}/{got['prompts']} identical, tau {got['tau']}, "
            f"{got['tokens'] / got['seconds']:.1f} tok/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
