"""Streamed answers of the REST API, each with the time of every chunk."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PROMPTS = (
    "Once upon a time a clockmaker lived at the edge of the sea. Every morning she",
    "Write a long story about a lighthouse. The night of the storm",
    "The history of bread begins in",
    "def quicksort(values):\n    ",
    "Question: A farmer has 17 sheep and buys 5 more every week. How many after a year? Answer:",
    "Dear committee, I am writing to explain why the library",
    "In chemistry, a catalyst is",
    "The three most important rules of chess are",
)

Keep = Callable[[int], bool]
"""Told how many tokens there are so far; False: the client leaves."""


@dataclass
class Stream:
    """One request and what came of it.

    Attributes:
        times, counts: when each chunk came (monotonic seconds), and tokens of it.
        error: what was wrong; "" while nothing is. A client that left says nothing.
        left: whether the client left before the end.
        accepted, nodes: of each verify step, once the answer has ended.
    """

    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    left: bool = False
    ended: bool = False
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def run(self, url: str, timeout_s: float, keep: Keep = lambda tokens: True) -> None:
        """Asks and reads to the end, or until `keep` says no; never raises."""
        try:
            self._read(url, timeout_s, keep)
            if not (self.finish or self.left or self.error):
                self.error = "the stream ended before the answer did"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = True

    def _read(self, url: str, timeout_s: float, keep: Keep) -> None:
        where = urlsplit(url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(self.body),
                {"content-type": "application/json"},
            )  # fmt: skip
            response = connection.getresponse()
            if response.status != 200:
                self.error = f"HTTP {response.status}: {response.read(300)!r}"
                return
            while line := response.readline():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
                    if not keep(len(self.ids)):
                        self.left = True
                        return
        finally:
            connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if "error" in event:
            self.error = str(event["error"])
            return
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or ()
            if ids:
                self.ids += ids
                self.times.append(now)
                self.counts.append(len(ids))
            self.finish = choice.get("finish_reason") or self.finish
        stats = event.get("speculative")
        if stats:
            self.accepted, self.nodes = stats["accepted"], stats["nodes"]

    def gaps(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Seconds between chunks, of those pairs that overlap the span."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [b - a for a, b in pairs if b > since and a < until]


def greedy(prompt: str, tokens: int) -> dict[str, Any]:
    """A long greedy answer that no stop token ends."""
    return {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "speculative": {"stats": True},
    }  # fmt: skip


@dataclass
class Batch:
    """Streams that run at once, each on a thread."""

    streams: Sequence[Stream]
    threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def start(cls, url: str, bodies: Sequence[dict[str, Any]], timeout_s: float) -> Batch:
        made = cls([Stream(body) for body in bodies])
        for stream in made.streams:
            thread = threading.Thread(target=stream.run, args=(url, timeout_s), daemon=True)
            made.threads.append(thread)
            thread.start()
        return made

    def until(self, tokens: int, timeout_s: float) -> bool:
        """Waits until all have begun and one has so many tokens; False: too long, or all ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not all(stream.ended for stream in self.streams):
            known = [len(stream.ids) for stream in self.streams]
            if min(known) and max(known) >= tokens:
                return True
            time.sleep(0.002)
        return False

    def join(self, timeout_s: float) -> bool:
        """Waits for all; False: some did not end."""
        deadline = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0.01))
        return not any(thread.is_alive() for thread in self.threads)

    @property
    def errors(self) -> list[str]:
        open_ = ["not ended" for stream in self.streams if not stream.ended]
        return [stream.error for stream in self.streams if stream.error] + open_

    @property
    def drafted(self) -> bool:
        """Whether drafts were verified, and accepted."""
        nodes = any(count > 1 for stream in self.streams for count in stream.nodes)
        return nodes and any(sum(stream.accepted) for stream in self.streams)

    def step(self, since: float, until: float) -> float:
        """Median seconds between chunks that came in the span; 0 without any."""
        found = [
            b - a
            for stream in self.streams
            for a, b in zip(stream.times, stream.times[1:], strict=False)
            if a >= since and b <= until
        ]
        return statistics.median(found) if found else 0.0

    def longest(self, since: float, until: float) -> list[float]:
        """Each stream's longest gap that overlaps the span, in seconds."""
        return [max(stream.gaps(since, until), default=0.0) for stream in self.streams]

    def different(self, wanted: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Where streams leave the tokens wanted; those may be more than were asked for."""
        found = []
        for index, (stream, ids) in enumerate(zip(self.streams, wanted, strict=True)):
            ids = ids[: stream.body["max_tokens"]]
            if stream.ids != ids:
                pairs = enumerate(zip(stream.ids, ids, strict=False))
                at = next((i for i, (x, y) in pairs if x != y), min(len(stream.ids), len(ids)))
                found.append(
                    {"stream": index, "at": at, "got": stream.ids[at : at + 4],
                     "wanted": list(ids[at : at + 4]), "tokens": len(stream.ids)}
                )  # fmt: skip
        return found


def run_all(url: str, bodies: Sequence[dict[str, Any]], timeout_s: float) -> Batch:
    """A batch that nobody disturbs."""
    batch = Batch.start(url, bodies, timeout_s)
    batch.join(timeout_s)
    return batch
