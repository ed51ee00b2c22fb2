"""Does the host's time hide behind the step? Fake executors, real channels, real scheduler.

The fake target is busy for 5 ms a step and the fake draft for 1 ms, with the interpreter lock
released, and context rows as wide as the embedded pair's. Measured: the mean step with and without
a delay between StepDone and the next plan, at pipeline depth 0 and 1; how busy the target is with
ping-pong; whether 64 streams get every token.

    python -m benchmarks.run_ahead --out benchmarks/results/run_ahead.json
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gateway_rate import served
from benchmarks.stack import machine, save
from gateway.cell import Cell, GrpcCell, Lost, Peer, Received
from gateway.request import Chunk, GenerateParams
from gateway.scheduler import Scheduler
from gateway.settings import SchedulerSettings
from tests.fakes.target import expected_output

VERIFY_MS, DRAFT_MS = 5.0, 1.0
VOCAB = 1000
WIDTH = 576  # float32 words of a context row, as the embedded pair's features
SETTLE_STEPS = 20


class Collector:
    """Gathers every request's tokens; `done` is set when all that are expected have ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.changed = threading.Condition()

    def __call__(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        with self.changed:
            for number, chunk in batch:
                self.tokens.setdefault(number, []).extend(chunk.tokens)
                if chunk.finish != "none":
                    self.finish[number] = chunk.finish
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool], timeout: float = 120.0) -> None:
        with self.changed:
            if not self.changed.wait_for(until, timeout):
                raise TimeoutError("the streams did not get on")


@dataclass(frozen=True)
class Case:
    """One measurement."""

    streams: int = 1
    depth: int = 1
    delay_ms: float = 0.0
    ping_pong: str = "off"
    steps: int = 300
    rows_us: float = 0.0

    @property
    def name(self) -> str:
        return (
            f"x{self.streams} depth {self.depth} delay {self.delay_ms:g} ms "
            f"ping-pong {self.ping_pong}"
        )


def delayed(delay_s: float, settings: SchedulerSettings) -> Callable[[Any], Cell]:
    """Makes a cell whose StepDone arrive `delay_s` late: what a slow gateway would add."""

    def make(post: Callable[[Received | Lost], None]) -> Cell:
        def late(message: Received | Lost) -> None:
            if (
                delay_s
                and isinstance(message, Received)
                and message.peer is Peer.TARGET
                and message.event.WhichOneof("event") == "step_done"
            ):
                time.sleep(delay_s)
            post(message)

        return GrpcCell(settings.target, settings.draft, late)

    return make


def params(index: int, tokens: int) -> GenerateParams:
    prompt = [(7 * index + i) % VOCAB for i in range(20)]
    return GenerateParams(prompt_ids=tuple(prompt), max_tokens=tokens)


def measure(case: Case, target: str, draft: str) -> dict[str, Any]:
    """Mean step and the target's share of busy time, after the first steps."""
    settings = SchedulerSettings(
        target=target,
        draft=draft,
        pipeline_depth=case.depth,
        ping_pong=case.ping_pong,  # type: ignore[arg-type]
        tree="top2gap",
        width=4,
        budget=32,
        pin_nodes=True,
    )
    collector = Collector()
    scheduler = Scheduler(settings, collector, make_cell=delayed(case.delay_ms / 1e3, settings))
    scheduler.start()
    scheduler.wait_ready(30)
    tokens = case.steps * 16
    numbers = [scheduler.submit(params(i, tokens)) for i in range(case.streams)]

    def steps() -> int:
        return scheduler.snapshot().totals["decode_steps"]

    collector.wait(lambda: steps() >= SETTLE_STEPS)
    began, first = time.perf_counter(), steps()
    before = dict(scheduler.snapshot().totals)
    goal = case.steps
    collector.wait(lambda: steps() >= first + goal or len(collector.finish) == case.streams)
    seconds, count = time.perf_counter() - began, steps() - first
    after = scheduler.snapshot()
    for number in numbers:
        scheduler.cancel(number)
    scheduler.stop(1.0)
    spent = {
        part: (after.totals[f"{part}_ns"] - before[f"{part}_ns"]) / 1e6 / count
        for part in ("waited", "computed", "published", "drafted")
    }
    return {
        "steps": count,
        "mean_step_ms": round(1e3 * seconds / count, 3),
        "target_busy": round(count * VERIFY_MS / 1e3 / seconds, 4),
        "plan_latency_p50_ms": round(after.plan_latency_p50_ns / 1e6, 3),
        "plan_latency_p99_ms": round(after.plan_latency_p99_ns / 1e6, 3),
        "per_step_ms": {part: round(value, 3) for part, value in spent.items()},
    }


def complete(target: str, draft: str, streams: int = 64, tokens: int = 200) -> dict[str, Any]:
    """`streams` requests at once to their end: every token must be the plain one."""
    settings = SchedulerSettings(
        target=target, draft=draft, tree="top2gap", width=4, budget=32, pin_nodes=True
    )
    collector = Collector()
    scheduler = Scheduler(settings, collector)
    scheduler.start()
    scheduler.wait_ready(30)
    began = time.perf_counter()
    asked = [params(i, tokens) for i in range(streams)]
    numbers = [scheduler.submit(one) for one in asked]
    collector.wait(lambda: len(collector.finish) == streams)
    seconds = time.perf_counter() - began
    scheduler.stop(1.0)
    right = sum(
        collector.tokens[number] == expected_output(one.prompt_ids, 20 + tokens, VOCAB)
        for number, one in zip(numbers, asked, strict=True)
    )
    return {"streams": streams, "right": right, "tokens_s": round(streams * tokens / seconds)}


def run() -> dict[str, Any]:
    shared = ["--vocab", str(VOCAB), "--slots", "64", "--feature-width", str(WIDTH)]
    target_options = [*shared, "--step-ms", str(VERIFY_MS), "--pages", "16384"]
    draft_options = [*shared, "--draft-ms", str(DRAFT_MS), "--pages", "32768"]
    one, eight = Case(), Case(streams=8)
    cases = [
        *(replace(case, depth=depth, delay_ms=delay) for case in (one, eight)
          for depth in (1, 0) for delay in (0.0, 4.0)),
        replace(eight, ping_pong="on"),
        Case(streams=64),
    ]  # fmt: skip
    result: dict[str, Any] = {}
    with (
        served("tests.fakes.target", *target_options) as target_process,
        served("tests.fakes.draft", *draft_options) as draft_process,
    ):
        target, draft = target_process.ready["grpc"], draft_process.ready["grpc"]
        for case in cases:
            result[case.name] = measure(case, target, draft)
            print(f"{case.name}: {result[case.name]}", flush=True)
        result["complete"] = complete(target, draft)
        print(f"complete: {result['complete']}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/run_ahead.json"))
    args = parser.parse_args()
    save(args.out, {"machine": machine(), "verify_ms": VERIFY_MS, "draft_ms": DRAFT_MS, **run()})


if __name__ == "__main__":
    main()
