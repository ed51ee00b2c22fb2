"""The scheduler over real streams, with the fake target and the fake draft behind real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from gateway.request import Chunk, GenerateParams
from gateway.scheduler import Scheduler
from gateway.settings import SchedulerSettings
from slipstream.cli.up_settings import free_port
from slipstream.errors import Draining, PairError, PeerLost
from tests.fakes import draft as fake_draft
from tests.fakes import target as fake_target

VOCAB = 1000


class Cell:
    """Both servers on a loop of their own thread."""

    def __init__(
        self,
        target: fake_target.FakeTargetRunner | None = None,
        draft: fake_draft.FakeDraftRunner | None = None,
    ) -> None:
        self.target_runner = target or fake_target.FakeTargetRunner()
        self.draft_runner = draft or fake_draft.FakeDraftRunner(slots=8, accept=0.8)
        self.target = self.draft = ""
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> Cell:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with (
            fake_target.serve_fake(self.target_runner) as target,
            fake_draft.serve(self.draft_runner) as draft,
        ):
            self.target, self.draft = f"127.0.0.1:{target.port}", f"127.0.0.1:{draft.port}"
            self._up.set()
            await self._stop.wait()


class Client:
    """A scheduler and what it delivered."""

    def __init__(self, target: str, draft: str | None, **settings: Any) -> None:
        self.chunks: dict[int, list[Chunk]] = {}
        self.params: dict[int, GenerateParams] = {}
        self.fatal: list[BaseException] = []
        self._news = threading.Condition()
        self.scheduler = Scheduler(
            SchedulerSettings(target, draft, **settings), self._deliver, on_fatal=self.fatal.append
        )

    def __enter__(self) -> Client:
        self.scheduler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.scheduler.stop()
        assert not self.fatal

    def _deliver(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        with self._news:
            for number, chunk in batch:
                self.chunks.setdefault(number, []).append(chunk)
            self._news.notify_all()

    def submit(self, prompt: Sequence[int], **params: Any) -> int:
        asked = GenerateParams(tuple(prompt), **params)
        number = self.scheduler.submit(asked)
        self.params[number] = asked
        return number

    def wait(self, done: Callable[[], bool], timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        with self._news:
            while not done():
                assert time.monotonic() < deadline, "nothing came"
                self._news.wait(0.02)

    def ended(self, number: int) -> bool:
        return any(chunk.finish != "none" for chunk in self.chunks.get(number, ()))

    def tokens(self, number: int) -> list[int]:
        return [token for chunk in self.chunks.get(number, ()) for token in chunk.tokens]

    def nodes(self) -> int:
        """The most nodes that a step verified so far."""
        return max((c.nodes for chunks in self.chunks.values() for c in chunks), default=0)

    def check(self, number: int) -> None:
        """A request got what plain decoding gives."""
        params = self.params[number]
        limit = min(len(params.prompt_ids) + params.max_tokens, self.scheduler.info.max_model_len)
        right = fake_target.expected_output(
            params.prompt_ids, limit, VOCAB, params.stop_ids, params.min_tokens
        )
        assert self.chunks[number][-1].finish in ("stop", "length"), self.chunks[number][-1]
        assert self.tokens(number) == right

    def check_idle(self) -> None:
        """Every slot and page came back."""
        deadline = time.monotonic() + 5
        while (now := self.scheduler.snapshot()).running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert now.running == now.waiting == 0 and now.free_pages == now.pages


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 90))] for _ in range(count)]


@pytest.mark.parametrize(
    ("depth", "ping_pong", "draft"),
    [(0, "off", True), (1, "off", True), (1, "on", True), (0, "on", True), (1, "off", False)],
)
def test_same_tokens_over_real_streams(depth: int, ping_pong: str, draft: bool) -> None:
    with (
        Cell() as cell,
        Client(
            cell.target,
            cell.draft if draft else None,
            pipeline_depth=depth,
            ping_pong=ping_pong,
            pin_nodes=True,
            max_prefill_chunk=48,
        ) as client,
    ):
        client.scheduler.wait_ready(10)
        numbers = [
            client.submit(p, max_tokens=5 + 11 * i % 60, stop_ids=frozenset({3 * i}))
            for i, p in enumerate(prompts(24))
        ]
        client.wait(lambda: all(map(client.ended, numbers)))
        for number in numbers:
            client.check(number)
        client.check_idle()
        assert (client.nodes() > 16) == draft
        totals = client.scheduler.snapshot().totals
        assert totals["rejected"] == totals["replayed"] == 0


def test_few_pages_logprobs_and_cancel() -> None:
    target = fake_target.FakeTargetRunner(pages=24, page_size=8, max_model_len=160)
    with Cell(target) as cell, Client(cell.target, cell.draft, pin_nodes=True) as client:
        client.scheduler.wait_ready(10)
        numbers = [client.submit(p, max_tokens=60, logprobs=1) for p in prompts(12, seed=2)]
        dropped = client.submit([1, 2, 3], max_tokens=100)
        client.scheduler.cancel(dropped)
        client.wait(lambda: all(map(client.ended, numbers)) and client.ended(dropped))
        for number in numbers:
            client.check(number)
            rows = [row for chunk in client.chunks[number] for row in chunk.logprobs or ()]
            assert [-row.logprob for row in rows] == client.tokens(number)
        assert client.chunks[dropped][-1].finish == "cancelled"
        assert client.scheduler.snapshot().totals["preemptions"] > 0
        client.check_idle()


def test_a_pair_that_does_not_fit_names_both_values() -> None:
    draft = fake_draft.FakeDraftRunner(vocab=999, slots=8)
    with Cell(draft=draft) as cell:
        scheduler = Scheduler(SchedulerSettings(cell.target, cell.draft), lambda batch: None)
        scheduler.start()
        with pytest.raises(PairError, match="vocab_size: the target has 1000, the draft 999"):
            scheduler.wait_ready(10)
        scheduler.stop()


def test_a_second_gateway_waits_for_the_first() -> None:
    with Cell() as cell:
        with Client(cell.target, cell.draft) as first:
            first.scheduler.wait_ready(10)
            number = first.submit([1, 2, 3], max_tokens=30)
            second = Client(cell.target, cell.draft)
            second.scheduler.start()
            with pytest.raises(PeerLost):
                second.scheduler.wait_ready(0.5)
            first.wait(lambda: first.ended(number))
            first.check(number)
        second.scheduler.wait_ready(10)
        number = second.submit([4, 5, 6], max_tokens=30)
        second.wait(lambda: second.ended(number))
        second.check(number)
        second.scheduler.stop()


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    target = fake_target.FakeTargetRunner(step_ms=2)
    with Cell(target) as cell, Client(cell.target, None) as client:
        client.scheduler.wait_ready(10)
        number = client.submit([1, 2, 3], max_tokens=40)
        client.scheduler.drain(10)
        with pytest.raises(Draining):
            client.submit([1], max_tokens=1)
        client.scheduler.stop(10)
        client.check(number)


def test_a_drain_that_takes_too_long_ends_with_an_error() -> None:
    target = fake_target.FakeTargetRunner(step_ms=20)
    with Cell(target) as cell, Client(cell.target, None) as client:
        client.scheduler.wait_ready(10)
        number = client.submit([1, 2, 3], max_tokens=400)
        client.wait(lambda: bool(client.tokens(number)))
        client.scheduler.stop(0.05)
        last = client.chunks[number][-1]
        assert last.finish == "error" and isinstance(last.error, Draining)


@contextlib.contextmanager
def process(module: str, port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A fake server as a process, ready."""
    command = [sys.executable, "-m", module, "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            word, _, rest = child.stdout.readline().partition(" ")
            assert word == "READY" and json.loads(rest)["grpc"].endswith(f":{port}")
            yield child
        finally:
            child.kill()


TARGET = ("tests.fakes.target", "--step-ms", "4", "--max-model-len", "4096")
DRAFT = ("tests.fakes.draft", "--slots", "8", "--accept", "0.8")


def test_a_draft_that_is_killed_and_comes_back() -> None:
    ports = free_port(), free_port()
    with (
        process(TARGET[0], ports[0], *TARGET[1:]),
        process(DRAFT[0], ports[1], *DRAFT[1:]) as first,
        Client(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", pin_nodes=True) as client,
    ):
        client.scheduler.wait_ready(10)
        numbers = [client.submit(p, max_tokens=1200) for p in prompts(3, seed=5)]
        client.wait(lambda: client.nodes() > 1)
        first.kill()
        client.wait(lambda: not client.scheduler.snapshot().draft_attached)
        with process(DRAFT[0], ports[1], *DRAFT[1:]):
            client.wait(lambda: client.scheduler.snapshot().totals["sessions"] == 2)
            before = len(client.chunks[numbers[0]])
            client.wait(lambda: any(c.nodes > 1 for c in client.chunks[numbers[0]][before:]))
            client.wait(lambda: all(map(client.ended, numbers)), 30)
        for number in numbers:
            client.check(number)
        client.check_idle()


def test_a_target_that_is_killed_and_comes_back() -> None:
    ports = free_port(), free_port()
    with (
        process(TARGET[0], ports[0], *TARGET[1:]) as first,
        process(DRAFT[0], ports[1], *DRAFT[1:]),
        Client(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", pin_nodes=True) as client,
    ):
        client.scheduler.wait_ready(10)
        numbers = [client.submit(p, max_tokens=300) for p in prompts(10, seed=6)]
        client.wait(lambda: bool(client.tokens(numbers[0])))
        first.kill()
        client.wait(lambda: not client.scheduler.ready)
        with process(TARGET[0], ports[0], *TARGET[1:]):
            late = client.submit([7, 8, 9], max_tokens=20)
            client.wait(lambda: all(map(client.ended, [*numbers, late])), 30)
            for number in (*numbers, late):
                client.check(number)
            assert client.scheduler.snapshot().totals["recoveries"] > 0
            client.check_idle()
