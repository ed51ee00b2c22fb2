"""Many streams of every kind of request, some of whose clients leave before the end."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.failure_cases.cell import SERVERS, Cell
from benchmarks.failure_cases.gauges import Sight, growth, look, until_idle
from benchmarks.failure_cases.streams import PROMPTS, Stream

ANSWER_S = 120.0
IDLE_S = 15.0
HEAP = 64 << 10
"""KiB by which a heap may grow under load: answers of all lengths, and on a CPU pages of a cache
that were not touched before."""

LEAVES = 0.3
"""Share of clients that leave; a few of them at once."""


@dataclass(frozen=True)
class Load:
    """So many clients for so long, with answers of up to `longest` tokens."""

    streams: int
    seconds: float
    longest: int


@dataclass
class Seen:
    """What the clients saw; of all threads, under the lock."""

    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, stream: Stream) -> None:
        with self.lock:
            self.tokens += len(stream.ids)
            self.ends["left" if stream.left else stream.finish or "error"] += 1
            if stream.error:
                self.errors.append(stream.error)


def body(rng: random.Random, longest: int) -> dict[str, Any]:
    """A request of any kind."""
    made: dict[str, Any] = {
        "prompt": rng.choice(PROMPTS) * rng.choice((1, 1, 2, 5)),
        "max_tokens": rng.randint(1, longest),
        "stream": True, "return_token_ids": True, "speculative": {"stats": True},
        "ignore_eos": rng.random() < 0.5,
        "temperature": 0.0,
    }  # fmt: skip
    if rng.random() < 0.6:
        made |= {"temperature": rng.choice((0.3, 0.7, 1.0)), "seed": rng.randrange(1 << 32)}
        made |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
    if rng.random() < 0.2:
        made |= rng.choice(
            ({"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"logit_bias": {"30": -5.0}})
        )
    if rng.random() < 0.1:
        made["logprobs"] = 2
    if rng.random() < 0.1:
        made["speculative"] = {"stats": True, "enabled": False}
    return made


def load(cell: Cell, what: Load) -> dict[str, Any]:
    """A short load to warm up, then the one that counts; idle before and after each."""
    after = len(cell.lines())
    _clients(cell.url, what, min(10.0, what.seconds), Seen())
    before = until_idle(cell.url, IDLE_S)
    pids = {name: cell.pid(name) for name in (*SERVERS, "gateway")}
    sights = [look(0.0, pids)]
    seen = Seen()
    began = time.monotonic()
    middle = _clients(cell.url, what, what.seconds, seen, pids)
    seconds = time.monotonic() - began
    idle = until_idle(cell.url, IDLE_S)
    time.sleep(1.0)
    sights.append(look(seconds, pids))
    found = growth(sights, factor=2.0, rss=HEAP)
    row: dict[str, Any] = {
        "streams": what.streams,
        "run_s": round(seconds, 1),
        "requests": sum(seen.ends.values()),
        "ends": dict(seen.ends),
        "left": seen.ends["left"],
        "tokens": seen.tokens,
        "tokens_per_s": round(seen.tokens / seconds, 1),
        "errors": seen.errors[:5],
        "idle": idle,
        "cancelled": idle["cancelled"] - before["cancelled"],
        "failed": idle["failed"],
        "transports": sorted(set(cell.transports())),
        "sessions": idle["sessions"],
        "growth": found,
        "while_loaded": growth(middle, factor=4.0, rss=HEAP),
        "not_flat": [
            f"{name}: {r['first']} -> {r['last']}" for name, r in found.items() if not r["flat"]
        ],
        "wrong_lines": cell.wrong_lines(after)[:8],
    }
    row["checks"] = {
        "no error in answers": not seen.errors and seen.ends["error"] == 0,
        "no error in the logs": not row["wrong_lines"],
        "every slot and page free": idle["free_slots"] == idle["slots"]
        and idle["free_pages"] == idle["pages"]
        and idle["waiting"] == 0,
        "nobody died": {name: cell.pid(name) for name in pids} == pids,
        "one session": idle["sessions"] == before["sessions"],
        "nothing grows": not row["not_flat"],
    }
    return row


def _clients(
    url: str, what: Load, seconds: float, seen: Seen, pids: dict[str, int] | None = None
) -> list[Sight]:
    """Runs the clients; looks at the processes meanwhile."""
    until = time.monotonic() + seconds

    def run(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            request = body(rng, what.longest)
            stays = rng.random() >= LEAVES
            last = 10**9 if stays else rng.randint(0, request["max_tokens"])
            stream = Stream(request)
            stream.run(url, ANSWER_S, lambda tokens: tokens < last)  # noqa: B023 - used at once
            seen.add(stream)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(what.streams)]
    for thread in threads:
        thread.start()
    sights: list[Sight] = []
    while pids and time.monotonic() < until:
        time.sleep(min(2.0, max(until - time.monotonic(), 0.1)))
        sights.append(look(seconds - (until - time.monotonic()), pids))
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0) + ANSWER_S)
    return sights[len(sights) // 4 :]
