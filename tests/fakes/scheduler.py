"""A scheduler without servers: scripted tokens, several per step, from a thread of its own.

`python -m tests.fakes.scheduler FLAGS` runs the whole gateway process over it; beside the gateway's
own flags, SLIPSTREAM_FAKE_STEP_MS, SLIPSTREAM_FAKE_TOKENS and SLIPSTREAM_FAKE_VOCAB set the step,
its tokens and their ids. At its end it prints the modules that were loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.counters import Snapshot
from gateway.request import Chunk, Deliver, GenerateParams, ModelInfo, TokenLogprob
from slipstream.errors import Draining, QueueFull, SlipstreamError

Script = Callable[[GenerateParams], Sequence[int]]


def noise_script(low: int, vocab: int, length: int = 100_000) -> Script:
    """Ids in [low, vocab) that depend on prompt, seed, choice and position only."""

    def script(params: GenerateParams) -> Sequence[int]:
        key = repr((params.prompt_ids, params.seed, params.choice)).encode()
        size = min(length, params.max_tokens)
        stream = hashlib.shake_128(key).digest(4 * size)
        words = (stream[i : i + 4] for i in range(0, 4 * size, 4))
        return [low + int.from_bytes(word, "little") % (vocab - low) for word in words]

    return script


def scored(token: int, position: int, vocab: int, wanted: int | None) -> TokenLogprob | None:
    """The log-probability of a token at a position; at every other one it is the best itself."""
    if wanted is None:
        return None
    best = [(token + 1 + rank) % vocab for rank in range(wanted)]
    values = [-0.25 * (rank + 1) - position / 1024 for rank in range(wanted)]
    if position % 2 and wanted:
        best[0] = token
        return TokenLogprob(values[0], tuple(zip(best, values, strict=True)))
    return TokenLogprob(-9.0 - position / 1024, tuple(zip(best, values, strict=True)))


@dataclass
class Running:
    """One request: its tokens to come."""

    params: GenerateParams
    tokens: Sequence[int]
    given: int = 0
    read: int = 0
    lengths: list[int] = field(default_factory=list)


class FakeScheduler:
    """Gives each running request `per_step` tokens every `step_s` seconds, and before them the
    log-probabilities of its prompt, `per_chunk` tokens at a time.

    Attributes:
        cancelled: ids given to `cancel`, in order.
        submitted: every accepted request's parameters.
        fail_after: a request fails with this error once it has given so many tokens.
    """

    def __init__(
        self,
        deliver: Deliver,
        script: Script,
        *,
        info: ModelInfo,
        step_s: float = 0.002,
        per_step: int = 3,
        per_chunk: int = 4,
        max_running: int = 1000,
        ready: bool = True,
    ) -> None:
        self._deliver = deliver
        self._script = script
        self.info = info
        self.ready = ready
        self.step_s = step_s
        self.per_step = per_step
        self.per_chunk = per_chunk
        self.max_running = max_running
        self.cancelled: list[int] = []
        self.submitted: list[GenerateParams] = []
        self.fail_after: tuple[int, SlipstreamError] | None = None
        self.steps = 0
        self._ids = itertools.count(1)
        self._running: dict[int, Running] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self) -> ModelInfo:
        while not (self.ready or self._stopping.wait(0.01)):
            pass
        return self.info

    def stop(self, drain_s: float) -> None:
        self._stopping.set()
        self._thread.join()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            ready=self.ready,
            draft_attached=True,
            slots=self.info.slots,
            running=len(self._running),
            waiting=0,
            pages=self.info.pages,
            free_pages=self.info.pages,
            in_flight=0,
            groups=1,
            step_s=self.step_s,
            plan_latency_p50_ns=1000,
            plan_latency_p99_ns=2000,
            totals={"steps": self.steps, "computed_ns": 5_000_000, "something_new": 3},
        )

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, params: GenerateParams) -> int:
        if self._stopping.is_set():
            raise Draining("the scheduler stops")
        params.validate(self.info)
        with self._lock:
            if len(self._running) >= self.max_running:
                raise QueueFull(f"{self.max_running} requests wait already", retry_after=2.5)
            number = next(self._ids)
            self._running[number] = Running(params, self._script(params))
            self.submitted.append(params)
        return number

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            self._running.pop(request_id, None)

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._stopping.is_set():
            with self._lock:
                batch = [(number, self._step(run)) for number, run in self._running.items()]
                for number, chunk in batch:
                    if chunk.finish != "none":
                        del self._running[number]
            if batch:
                self.steps += 1
                self._deliver(batch)
            due = max(due + self.step_s, time.perf_counter())
            self._stopping.wait(due - time.perf_counter())

    def _step(self, run: Running) -> Chunk:
        if self.fail_after is not None and run.given >= self.fail_after[0]:
            return Chunk(finish="error", error=self.fail_after[1])
        params = run.params
        scores = self._scores(run)
        if run.read < len(params.prompt_ids):
            return Chunk(prompt_logprobs=scores)
        limit = min(params.max_tokens, self.info.max_model_len - len(params.prompt_ids))
        first = run.given == 0
        tokens: list[int] = []
        finish = "none" if limit else "length"
        for token in run.tokens[run.given :][: min(limit, 1) if first else self.per_step]:
            tokens.append(token)
            run.given += 1
            if token in params.stop_ids and run.given > params.min_tokens:
                finish = "stop"
                break
            if run.given == limit:
                finish = "length"
                break
        if finish == "none" and run.given >= len(run.tokens):
            finish = "length"
        position = len(params.prompt_ids) + run.given - len(tokens)
        rows = [self._score(t, position + i, params.logprobs) for i, t in enumerate(tokens)]
        logprobs = None if params.logprobs is None else tuple(rows)
        if first:
            return Chunk(tuple(tokens), logprobs, scores, finish)
        drafted = self.per_step if params.draft else 1
        accepted = max(0, drafted - 1)
        return Chunk(tuple(tokens), logprobs, (), finish, nodes=drafted, accepted=accepted)

    def _score(self, token: int, position: int, wanted: int | None) -> TokenLogprob:
        row = scored(token, position, self.info.vocab_size, wanted)
        return row or TokenLogprob(0.0)

    def _scores(self, run: Running) -> tuple[TokenLogprob, ...]:
        """Of the prompt's next tokens; `run.read` of them have been seen."""
        ids, wanted = run.params.prompt_ids, run.params.prompt_logprobs
        if wanted is None or run.read == len(ids):
            run.read = len(ids)
            return ()
        first, run.read = run.read, min(run.read + self.per_chunk, len(ids))
        return tuple(self._score(ids[i], i, wanted) for i in range(max(first, 1), run.read))


def main(argv: Sequence[str]) -> int:
    from gateway.server import run
    from gateway.settings import GatewaySettings
    from slipstream.settings import parse_or_exit

    def make(deliver: Deliver) -> FakeScheduler:
        vocab = int(os.environ.get("SLIPSTREAM_FAKE_VOCAB", "320"))
        return FakeScheduler(
            deliver,
            noise_script(10, vocab),
            info=model_info(vocab, 100_000),
            step_s=float(os.environ.get("SLIPSTREAM_FAKE_STEP_MS", "2")) / 1e3,
            per_step=int(os.environ.get("SLIPSTREAM_FAKE_TOKENS", "3")),
        )

    status = run(parse_or_exit(GatewaySettings, argv), make)
    print("MODULES", json.dumps(sorted(sys.modules)))
    return status


def model_info(vocab: int, max_model_len: int = 512) -> ModelInfo:
    """A model of which only the vocabulary and the window matter."""
    return ModelInfo(
        model="fake-model",
        vocab_size=vocab,
        max_model_len=max_model_len,
        eos_ids=(2,),
        dtype="float32",
        slots=8,
        pages=64,
        page_size=16,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
