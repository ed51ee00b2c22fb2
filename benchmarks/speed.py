"""Tokens per second with a draft and without, one stream and eight, and where a step's time goes.

Two stacks are up at once, one with `--draft none`; rounds of the same prompts alternate between
them, so that the machine's mood hits both.

    python -m benchmarks.speed --golden FILE.jsonl --out benchmarks/results/speed.json
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.stack import Answer, Ask, Stack, machine, save, stack

PARTS = ("waited", "computed", "published", "drafted")


def scrape(running: Stack) -> dict[str, float]:
    """Seconds by part of the step and counts, summed since start, from the gateway's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{running.http_port}/metrics") as answer:
        text = answer.read().decode()
    values = {}
    for part in PARTS:
        pattern = rf'^slipstream_step_part_seconds_total{{part="{part}"}} (\S+)$'
        match = re.search(pattern, text, re.MULTILINE)
        values[part] = float(match.group(1)) if match else 0.0
    for name in ("decode_steps", "drafted_steps", "prefill_steps", "rows", "slot_steps"):
        match = re.search(rf"^slipstream_scheduler_{name}_total (\S+)$", text, re.MULTILINE)
        values[name] = float(match.group(1)) if match else 0.0
    return values


def round_of(running: Stack, asks: list[Ask], streams: int) -> dict[str, Any]:
    """All `asks`, `streams` at once: speed, tau, and the mean step by part in ms."""
    before, began = scrape(running), time.perf_counter()
    answers = running.ask_all(asks, streams)
    seconds = time.perf_counter() - began
    after = scrape(running)
    spent = {name: after[name] - before[name] for name in after}
    steps = max(1.0, spent["decode_steps"] + spent["prefill_steps"])
    parts = {part: round(1e3 * spent[part] / steps, 3) for part in PARTS}
    whole = 1e3 * seconds / steps
    parts["handoff"] = round(max(0.0, parts["waited"] - parts["drafted"]), 3)
    parts["gateway_and_rest"] = round(
        whole - parts["waited"] - parts["computed"] - parts["published"], 3
    )
    return {
        "tok_s": sum(len(a.ids) for a in answers) / seconds,
        "tau": tau(answers),
        "seconds": round(seconds, 2),
        "decode_steps": int(spent["decode_steps"]),
        "drafted_steps": int(spent["drafted_steps"]),
        "rows_per_slot_step": round(spent["rows"] / max(1.0, spent["slot_steps"]), 2),
        "mean_step_ms": round(whole, 3),
        "step_parts_ms": parts,
    }


def tau(answers: list[Answer]) -> float:
    steps = sum(answer.steps for answer in answers)
    return round(sum(len(answer.ids) - 1 for answer in answers) / max(1, steps), 3)


def compare(drafted: Stack, plain: Stack, asks: list[Ask], streams: int, rounds: int) -> Any:
    """Alternating rounds; the quotient is of total tokens over total seconds."""
    runs: dict[str, list[dict[str, Any]]] = {"draft": [], "plain": []}
    for _ in range(rounds):
        for name, running in (("draft", drafted), ("plain", plain)):
            got = round_of(running, asks, streams)
            runs[name].append(got)
            print(f"{streams} streams, {name}: {got}", flush=True)
    speed = {name: len(rows) / sum(1 / row["tok_s"] for row in rows) for name, rows in runs.items()}
    return {
        "streams": streams,
        "tok_s_draft": round(speed["draft"], 2),
        "tok_s_plain": round(speed["plain"], 2),
        "ratio": round(speed["draft"] / speed["plain"], 3),
        "rounds": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--set", default="gsm8k")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--options", default="", help="further options of the stack with a draft")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed.json"))
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.golden.read_text().splitlines()]
    chosen = [row["prompt_ids"] for row in rows if row["set"] == args.set]
    asks = [Ask(ids, args.max_tokens) for ids in chosen[: args.prompts]]
    warm = [Ask(ids, 48) for ids in chosen[args.prompts :][:4]]
    result: dict[str, Any] = {"machine": machine(), "set": args.set, "prompts": len(asks)}
    with (
        stack("--draft", "none", "--dtype", args.dtype) as plain,
        stack("--dtype", args.dtype, *args.options.split()) as drafted,
    ):
        for streams in map(int, args.streams.split(",")):
            for running in (drafted, plain):  # prompts that are not measured
                running.ask_all(warm, streams)
            got = compare(drafted, plain, asks, streams, args.rounds)
            result[f"x{streams}"] = got
            print({key: value for key, value in got.items() if key != "rounds"}, flush=True)
    save(args.out, result)


if __name__ == "__main__":
    main()
