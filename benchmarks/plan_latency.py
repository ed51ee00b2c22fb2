"""How long is a result on the gateway before the next plan leaves, while long prompts arrive?

Fakes (5 ms verify, 1 ms draft), the real gateway process, 16 clients that stream over REST, and
a prompt of about 6,000 tokens as text every second. The latency is the scheduler's own:
StepDone in, Plan out, of the last 4,096 steps.

    python -m benchmarks.plan_latency --tokenizer FOLDER --out benchmarks/results/plan_latency.json
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway_rate import VOCAB, rest_stream, served
from benchmarks.stack import machine, save
from slipstream.cli.client import COMPLETIONS, Options, ask, client, completion_body, model_name

STREAMS = 16
WORDS = 6000  # about a token each
WARM_S, MEASURE_S = 2.0, 12.0
PAUSE_S = 1.0


def long_prompt(index: int) -> str:
    words = ("river", "stone", "cloud", "engine", "paper", "garden", "signal", "winter")
    return " ".join(words[(index + i * i) % len(words)] for i in range(WORDS))


async def quantiles(http: Any) -> dict[str, float]:
    """Plan latency in ms, from /metrics."""
    text = (await http.get("/metrics")).text
    found = re.findall(r'slipstream_plan_latency_seconds\{quantile="([\d.]+)"\} (\S+)', text)
    return {f"p{100 * float(q):g}_ms": round(1e3 * float(value), 3) for q, value in found}


async def drive(address: str, long: bool) -> dict[str, Any]:
    """16 streams without a pause; with `long`, a long prompt arrives every second beside them."""
    stop = time.monotonic() + WARM_S + MEASURE_S
    sent = 0
    async with client(f"http://{address}", 64) as http:
        model = await model_name(http)

        async def stream(index: int) -> int:
            tokens = 0
            while time.monotonic() < stop:
                tokens += (await rest_stream(address, index, 1500)).tokens
            return tokens

        async def arrive() -> None:
            nonlocal sent
            options = Options(model=model, max_tokens=4, temperature=0.0)
            while long and time.monotonic() < stop:
                await ask(http, COMPLETIONS, completion_body(long_prompt(sent), options))
                sent += 1
                await asyncio.sleep(PAUSE_S)

        began = time.perf_counter()
        *tokens, _ = await asyncio.gather(*(stream(i) for i in range(STREAMS)), arrive())
        seconds = time.perf_counter() - began
        latency = await quantiles(http)
    return {"long_prompts": sent, "tokens_s": round(sum(tokens) / seconds), **latency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_latency.json"))
    args = parser.parse_args()
    shared = ["--vocab", str(VOCAB), "--slots", "32", "--feature-width", "576"]
    target = [*shared, "--step-ms", "5", "--pages", "20000", "--max-model-len", "8192"]
    draft = [*shared, "--draft-ms", "1", "--pages", "40000"]
    result: dict[str, Any] = {"machine": machine()}
    for long in (False, True):
        with (
            served("tests.fakes.target", *target) as one,
            served("tests.fakes.draft", *draft) as two,
            served(
                "gateway",
                *("--target", one.ready["grpc"], "--draft", two.ready["grpc"]),
                *("--port", "0", "--tokenizer", str(args.tokenizer), "--log-level", "warning"),
                *("--tree", "top2gap", "--width", "4", "--budget", "32"),
            ) as gateway,
        ):
            name = "with long prompts" if long else "streams alone"
            result[name] = asyncio.run(drive(gateway.ready["http"], long))
            print(f"{name}: {result[name]}", flush=True)
    save(args.out, result)


if __name__ == "__main__":
    main()
