"""Requests through the real runner and engine of the target, with trees of an end in memory.

A request is followed from admission to its end; its trees are right, wrong or torn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.target.commands import Detach, Detached, EntryDone, PlanEntry, Release
from services.target.loading import load_runner
from services.target.model_runner import ModelRunner
from services.target.runner import Finish, Logprob
from services.target.settings import TargetSettings
from slipstream.handoff.base import Proposal, ProposedTree
from tests.fakes.target_driver import Driver
from tests.tiny import Pair

VOCAB = 320
LENGTH = 24  # output tokens of a request
PROMPTS = [
    [7, 9, 11],
    [i % 300 + 10 for i in range(37)],
    [42],
    [(i * i) % 250 + 20 for i in range(18)],
]


def load(pair: Pair, **more: Any) -> ModelRunner:
    """The plain runner, also where there is a GPU."""
    fields = {"model": str(pair.target), "draft": str(pair.draft), "device": "cpu"}
    fields |= {"dtype": "float32", "slots": 6, "pages": 200, "page_size": 8, "warmup": False} | more
    return load_runner(TargetSettings(**fields))


@dataclass
class Request:
    """A request as the test follows it."""

    prompt: list[int]
    epoch: int = 0
    got: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish = Finish.NONE
    accepted: int = 0
    verified: int = 0

    @property
    def start(self) -> int:
        return len(self.prompt) + len(self.got) - 1


Trees = Callable[[Request], tuple[list[int], list[int]]]
"""Tokens and parents that a draft proposes for a request."""


def oracle(want: Mapping[int, list[int]], misses: float = 0.3) -> Trees:
    """The right path hidden among wrong siblings, in an order that is not dense; sometimes cut."""
    rng = random.Random(5)

    def build(request: Request) -> tuple[list[int], list[int]]:
        future = want[id(request.prompt)][len(request.got) :]
        tokens, parents, at = [request.got[-1]], [-1], 0
        for right in future[:6]:
            siblings = rng.sample(range(VOCAB), rng.randint(0, 2))
            if rng.random() > misses:
                siblings.insert(rng.randint(0, len(siblings)), right)
            if not siblings:
                break
            next_at = None
            for token in siblings:
                tokens.append(token)
                parents.append(at)
                if token == right and next_at is None:
                    next_at = len(tokens) - 1
            if rng.random() < 0.5:  # a distraction below a wrong node
                tokens.append(rng.randrange(VOCAB))
                parents.append(len(tokens) - 2)
            if next_at is None:
                break
            at = next_at
        return (tokens[:16], parents[:16])

    return build


def noise(request: Request) -> tuple[list[int], list[int]]:
    """Random tokens in a random shape."""
    rng = random.Random(len(request.got))
    count = rng.randint(1, 16)
    parents = [-1, *(rng.randrange(node) for node in range(1, count))]
    return ([request.got[-1], *rng.choices(range(VOCAB), k=count - 1)], parents)


def torn(request: Request) -> tuple[list[int], list[int]]:
    """What a broken peer might write."""
    rng = random.Random(len(request.got))
    tokens = [rng.randint(-5, VOCAB + 5) for _ in range(12)]
    return (tokens, [rng.randint(-2, 12) for _ in tokens])


def chain(want: Mapping[int, list[int]]) -> Trees:
    """The right tokens in a row, wrong from the fourth on every other time."""

    def build(request: Request) -> tuple[list[int], list[int]]:
        future = want[id(request.prompt)][len(request.got) :][:7]
        if len(request.got) % 2:
            future[3:] = [0] * len(future[3:])
        tokens = [request.got[-1], *future]
        return (tokens, list(range(-1, len(tokens) - 1)))

    return build


def generate(
    driver: Driver[ModelRunner],
    requests: list[Request],
    trees: Trees | None = None,
    *,
    join_every: int = 0,
    chunk: int = 64,
    **admit: Any,
) -> list[list[int]]:
    """Runs the requests to their ends; with `join_every` one more starts every few steps."""
    session = 0
    running: dict[int, Request] = {}
    if trees is not None:
        end = driver.attach(session=driver.step + 1)
        session = end.session
        end.propose = lambda step: _propose(step, running, trees)
    waiting = list(requests)
    steps = 0
    while running or waiting:
        while waiting and (not join_every or not running or steps % join_every == 0):
            slot = min(set(range(6)) - running.keys())
            request = waiting.pop(0)
            start(driver, slot, request, session, chunk, **admit)
            if request.finish is Finish.NONE:
                running[slot] = request
            else:
                release(driver, slot, request)
            if join_every:
                break
        nodes = 1 if trees is None else 16
        entries = [
            PlanEntry(slot, r.epoch, r.start + nodes, nodes=nodes) for slot, r in running.items()
        ]
        steps += 1
        for entry in driver.decode(*entries, session=session).entries:
            if take(running[entry.slot], entry):
                release(driver, entry.slot, running.pop(entry.slot))
    if session:
        driver.send(lambda n: Detach(n, session, "test"))
        assert driver.next() == Detached(session, "test")
    return [request.got for request in requests]


def _propose(step: int, running: dict[int, Request], trees: Trees) -> Proposal:
    made = ((slot, r.epoch, trees(r)) for slot, r in running.items())
    return Proposal(step, tuple(ProposedTree(slot, epoch, *tree) for slot, epoch, tree in made))


def release(driver: Driver[ModelRunner], slot: int, request: Request) -> None:
    driver.send(lambda n: Release(n, slot, request.epoch))


def start(
    driver: Driver[ModelRunner],
    slot: int,
    request: Request,
    session: int,
    chunk: int,
    **admit: Any,
) -> None:
    prompt = request.prompt
    epoch = request.epoch = driver.step + 1
    limit = len(prompt) + admit.pop("count", LENGTH)
    driver.admit(slot, prompt, epoch=epoch, limit=limit, **admit)
    first = 0
    while first < len(prompt):
        count = min(chunk, len(prompt) - first)
        last = first + count == len(prompt)
        done = driver.prefill(slot, first, count, last, epoch=epoch, session=session)
        request.prompt_logprobs += done.entries[0].result.prompt_logprobs
        first += count
    take(request, done.entries[0])


def take(request: Request, entry: EntryDone) -> bool:
    """Adds an entry's tokens; True when the request ended."""
    result = entry.result
    request.got += result.tokens
    request.logprobs += result.logprobs
    request.accepted += result.accepted
    request.verified = max(request.verified, result.nodes)
    request.finish = result.finish
    return result.finish is not Finish.NONE


def fresh() -> list[Request]:
    return [Request(prompt) for prompt in PROMPTS]


def plain(driver: Driver[ModelRunner], **admit: Any) -> dict[int, list[int]]:
    """Tokens of plain decoding by id of the prompt."""
    tokens = generate(driver, fresh(), **admit)
    return {id(prompt): out for prompt, out in zip(PROMPTS, tokens, strict=True)}
