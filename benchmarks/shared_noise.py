"""What ranking candidates with the request's own noise gains at temperature > 0, and that it
changes no token.

Whole stacks in fp32, seeded requests, trees pinned: without a draft, and with the noise shared or
not.

    python -m benchmarks.shared_noise --golden FILE.jsonl --out benchmarks/results/shared_noise.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.lossless import choose, tau
from benchmarks.stack import Answer, Ask, machine, save, stack

TEMPERATURES = (0.7, 1.0)
SHAPES = {
    "chain": {"tree": "chain", "width": 1, "budget": 16},
    "top2gap w4 b32": {"tree": "top2gap", "width": 4, "budget": 32},
}


def answers(options: list[str], asks: list[Ask], streams: int) -> list[Answer]:
    with stack("--dtype", "float32", *options) as running:
        return running.ask_all(asks, streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--head", default="jetspec")
    parser.add_argument("--per-set", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/shared_noise.json"))
    args = parser.parse_args()
    golden = [json.loads(line) for line in args.golden.read_text().splitlines()]
    rows = choose(golden, args.per_set)
    asks = [
        Ask(row["prompt_ids"], args.max_tokens, temperature=temperature, seed=100 + i)
        for temperature in TEMPERATURES
        for i, row in enumerate(rows)
    ]
    plain = answers(["--draft", "none"], asks, args.streams)
    result: dict[str, Any] = {"machine": machine(), "prompts": len(rows), "tau": {}}
    for shape, spec in SHAPES.items():
        for shared in (False, True):
            config = json.dumps({**spec, "shared_noise": shared})
            options = ["--draft", args.head, "--speculative-config", config]
            got = answers(options, asks, args.streams)
            same = sum(a.ids == b.ids for a, b in zip(got, plain, strict=True))
            taus = {
                f"T {temperature}": tau(
                    a for ask, a in zip(asks, got, strict=True) if ask.temperature == temperature
                )
                for temperature in TEMPERATURES
            }
            name = f"{args.head} {shape}, noise {'shared' if shared else 'not shared'}"
            result["tau"][name] = {**taus, "identical": same, "of": len(asks)}
            print(f"{name}: {result['tau'][name]}", flush=True)
            save(args.out, result)


if __name__ == "__main__":
    main()
