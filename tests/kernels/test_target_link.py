"""The device's target and a draft in memory that they share: what goes in, and what comes out.

The draft is the test: it writes trees into the ring when the target's stream waits for them. The
reference is the plain runner, given the same trees through the host.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from services.target.commands import Attach, Attached, PlanEntry, Rejected, StepDone, StepKind
from services.target.commands import Rewind as RewindTo
from services.target.device_flight import DecodeFlight, PrefillFlight
from services.target.device_runner import DeviceRunner
from services.target.model_runner import ModelRunner
from services.target.runner import Finish
from slipstream.grammar import Grammar, GrammarKind
from slipstream.handoff.base import ContextRecord, Proposal, ProposedTree
from slipstream.handoff.cuda_ipc import Export
from slipstream.handoff.layout import Head, Header, ProposalHeader, Record, ring_entry
from slipstream.kernels.handoff import DONE, ENDED
from slipstream.params import SamplingParams
from tests.fakes.target_driver import WAIT_S, Driver, entry
from tests.kernels.test_target_device import on_device
from tests.tiny import EOS, Pair, make_pair
from tests.unit.target_model_rig import VOCAB, load

SESSION, WHICH = 7, 2
PROMPTS = [[7, 9, 11, 13, 15], [42 + 3 * i for i in range(9)]]
SAMPLED = SamplingParams(temperature=0.8, seed=7)
Trees = Callable[[int, int, int], tuple[list[int], list[int]]]
"""Tokens and parents for (slot, rows, nodes) of an entry."""


class RingEnd:
    """A device end whose draft writes its proposal as soon as the stream waits for it.

    Attributes:
        plans: entries of each step's plan, told before it is given.
        spoilt: steps whose proposal is wrong in a way of its own.
        given: the trees that a target must have found, by step.
    """

    transport: Literal["cuda_ipc"] = "cuda_ipc"
    one_gpu = False
    session, which = SESSION, WHICH

    def __init__(self, runner: DeviceRunner, trees: Trees) -> None:
        assert runner.shared is not None
        self.memory: Export = runner.shared
        self._start = runner._slots.state.start
        self._trees = trees
        self.plans: dict[int, Sequence[PlanEntry]] = {}
        self.spoilt: dict[int, str] = {}
        self.given: dict[int, list[ProposedTree]] = {}
        self.operations: list[tuple[str, int]] = []
        self.passed_steps: list[int] = []
        self.alive, self.reason = True, ""

    def await_proposal(self, step: int) -> None:
        self.operations.append(("proposal", step))
        assert self._header(step)[Header.STEP] != step
        self._propose(step)

    def await_room(self, step: int) -> None:
        self.operations.append(("room", step))
        assert self._header(step)[Header.STEP] != step

    def publish(self, step: int) -> None:
        self.operations.append(("publish", step))

    def passed(self, step: int, waited_ns: int) -> None:
        self.passed_steps.append(step)

    def end(self, reason: str) -> None:
        self.alive, self.reason = False, reason

    def _header(self, step: int) -> list[int]:
        return [int(word) for word in self.memory.records[ring_entry(WHICH, step), 0].tolist()]

    def _propose(self, step: int) -> None:
        ring, how, first = ring_entry(WHICH, step), self.spoilt.get(step, ""), 0
        heads, nodes = self.memory.heads[ring], self.memory.nodes[ring]
        nodes.fill_(-(2**31))
        self.given[step] = []
        for row, e in enumerate(self.plans[step]):
            tokens, parents = self._trees(e.slot, int(self._start[e.slot]), e.nodes)
            count = len(tokens)
            pairs = torch.tensor([tokens, parents], dtype=torch.int32).t()
            nodes[first : first + count] = pairs.to(nodes.device)
            head = {Head.SLOT: e.slot, Head.EPOCH: e.epoch, Head.NODES: count}
            if how == "epoch":
                head[Head.EPOCH] += 1
            elif how == "count":
                head[Head.NODES] = 2**40
            elif not how:
                self.given[step].append(ProposedTree(e.slot, e.epoch, tokens, parents))
            for word, value in head.items():
                heads[1 + row, word] = value
            first += e.nodes
        heads[0, ProposalHeader.STEP] = step - 8 if how == "step" else step
        heads[0, ProposalHeader.COUNT] = len(self.plans[step])
        heads[0, ProposalHeader.BEGAN], heads[0, ProposalHeader.ENDED] = 100, 130

    def records(self, step: int) -> list[ContextRecord]:
        """What is published of a step."""
        found = self.memory.records[ring_entry(WHICH, step)].tolist()
        assert found[0][: Header.BEGAN] == [step, len(self.plans[step])]
        rows = [row[: Record.CAUGHT_UP + 1] for row in found[1 : 1 + found[0][Header.COUNT]]]
        for row, e in zip(rows, self.plans[step], strict=True):
            assert row[:2] == [e.slot, e.epoch]
        return [
            ContextRecord(slot, epoch, first, count, anchor, bool(whole))
            for slot, epoch, first, count, anchor, whole in rows
            if count
        ]

    def rows(self, record: ContextRecord) -> torch.Tensor:
        """The features that a record names, found as a draft finds them."""
        size = self.memory.layout.page_size
        table = self.memory.tables[record.slot].tolist()
        positions = range(record.first_row, record.first_row + record.count)
        return self.memory.features[[table[p // size] * size + p % size for p in positions]].cpu()


class Gate:
    """Holds back that results are there, so that later steps begin first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        for kind in (DecodeFlight, PrefillFlight):
            wait = kind.wait

            def held(flight: object, wait: Callable[..., None] = wait) -> None:
                assert self.open.wait(WAIT_S * 10)
                wait(flight)

            monkeypatch.setattr(kind, "wait", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("linked"), "llama", vocab=VOCAB)


@pytest.fixture(scope="module")
def runner(pair: Pair, device: torch.device) -> Iterator[DeviceRunner]:
    made = on_device(pair, device, shares=True, decode_rows=8)  # steps of several parts
    yield made
    assert made.shared is not None
    made.shared.close()


@dataclass(frozen=True)
class Step:
    """A plan of the script; `rewind` (slot, rows) comes before it."""

    kind: StepKind
    entries: tuple[PlanEntry, ...]
    rewind: tuple[int, int] | None = None
    spoilt: str = ""


def chunk(slot: int, first: int, count: int) -> PlanEntry:
    end = first + count
    return PlanEntry(slot, 1, end, first=first, count=count, last=end == len(PROMPTS[slot]))


def tree(slot: int, nodes: int, replay: int = 0, epoch: int = 1) -> PlanEntry:
    return PlanEntry(slot, epoch, 128, nodes=nodes, replay=replay, branches=True)


SCRIPT = [
    Step(StepKind.PREFILL, (chunk(0, 0, 5), chunk(1, 0, 4))),
    Step(StepKind.PREFILL, (chunk(1, 4, 5),)),
    Step(StepKind.DECODE, (tree(0, 6), tree(1, 5))),  # right after a last chunk
    Step(StepKind.DECODE, (tree(1, 4, epoch=9), tree(0, 1), tree(1, 6))),  # one is stale
    Step(StepKind.DECODE, (tree(1, 3), tree(0, 3)), spoilt="epoch"),
    Step(StepKind.DECODE, (tree(1, 1), tree(0, 4)), rewind=(1, 2), spoilt="count"),
    Step(StepKind.DECODE, (tree(1, 1, replay=4), tree(0, 4)), spoilt="step"),
    Step(StepKind.DECODE, ()),
    Step(StepKind.DECODE, (tree(0, 3), tree(1, 1, replay=90))),
]


def play(
    driver: Driver[DeviceRunner] | Driver[ModelRunner], told: Callable[[int, Step], None]
) -> list[StepDone]:
    """Gives the whole script, then waits for its results."""
    for slot, prompt in enumerate(PROMPTS):
        driver.admit(slot, prompt, limit=100, sampling=(SamplingParams(), SAMPLED)[slot])
    for step in SCRIPT:
        if step.rewind is not None:
            slot, rows = step.rewind
            driver.send(lambda n: RewindTo(n, slot, 1, rows))  # noqa: B023
        told(driver.step + 1, step)
        driver.plan(step.kind, *step.entries, session=SESSION)
    found: list[StepDone] = []
    while len(found) < len(SCRIPT):
        event = driver.events.get(timeout=WAIT_S * 10)
        if isinstance(event, StepDone):
            found.append(event)
        else:
            assert isinstance(event, Rejected) and event.epoch == 9
    return found


def outputs(pair: Pair) -> list[list[int]]:
    """What plain decoding gives for the prompts."""
    driver = Driver(load(pair))
    found = []
    for slot, prompt in enumerate(PROMPTS):
        driver.admit(slot, prompt, limit=100, sampling=(SamplingParams(), SAMPLED)[slot])
        got = list(driver.prefill(slot, 0, len(prompt)).entries[0].result.tokens)
        while len(got) < 40:
            got += driver.decode(entry(slot, 128)).entries[0].result.tokens
        found.append(got)
    driver.engine.stop()
    return found


def guesses(want: list[list[int]], seed: int) -> Trees:
    """Trees with the right path among wrong nodes, and rubbish at their ends."""
    rng = random.Random(seed)

    def build(slot: int, rows: int, nodes: int) -> tuple[list[int], list[int]]:
        future = want[slot][rows - len(PROMPTS[slot]) :] if slot < len(want) else []
        tokens, parents, at = [rng.randrange(VOCAB)], [-1], 0
        for right in future[1:]:
            if rng.random() < 0.4:
                tokens, parents = [*tokens, rng.randrange(VOCAB)], [*parents, at]
            tokens, parents, at = [*tokens, right], [*parents, at], len(tokens)
            if rng.random() < 0.2:
                wild = rng.choice([-(2**31), -1, VOCAB, 2**31 - 1])
                tokens, parents = [*tokens, wild], [*parents, rng.choice([at, -5, 99])]
        return tokens[:nodes], parents[:nodes]

    return build


def linked(runner: DeviceRunner, trees: Trees) -> tuple[Driver[DeviceRunner], RingEnd]:
    """A driver whose session stays on the device."""
    driver, end = Driver(runner), RingEnd(runner, trees)
    end.memory.records.zero_()
    driver.connector.answer = lambda session: end
    driver.send(lambda n: Attach(n, SESSION, driver.step + 1, "draft:1"))
    assert driver.next() == Attached(SESSION, "cuda_ipc")
    return driver, end


def test_as_through_the_host(pair: Pair, runner: DeviceRunner, gate: Gate) -> None:
    """Tokens, records, cursors and features are those of the plain runner, given in turn."""
    want = outputs(pair)
    driver, end = linked(runner, guesses(want, 3))
    for ring in (end.memory.heads, end.memory.nodes):
        ring.random_(-(2**31), 2**31 - 1)

    def told(number: int, step: Step) -> None:
        end.plans[number], end.spoilt[number] = step.entries, step.spoilt
        if number == 1:
            gate.open.clear()
        if step.rewind is not None:  # which waits for what is on its way
            deadline = time.monotonic() + 10 * WAIT_S
            while ("publish", number - 1) not in end.operations:
                assert time.monotonic() < deadline and not driver.failure
                time.sleep(0.01)
            assert end.passed_steps == [], "every step began before one had ended"
            gate.open.set()

    got = play(driver, told)
    driver.check()
    cursors = [int(row) for row in runner._slots.cursor[:2]]
    assert cursors == [slot.cursor for slot in driver.engine._slots]
    assert cursors == [int(row) for row in runner._slots.state.start[:2]]

    plain = Driver(load(pair))
    other = plain.attach(SESSION)
    other.propose = lambda step: Proposal(step, tuple(end.given[step]))
    reference = play(plain, lambda number, step: None)
    for mine, its in zip(got, reference, strict=True):
        assert [e.outcome for e in mine.entries] == [e.outcome for e in its.entries]
        assert [e.result.tokens for e in mine.entries] == [e.result.tokens for e in its.entries]
        assert [e.result.nodes for e in mine.entries if e.result.nodes > 1] == [
            e.result.nodes for e in its.entries if e.result.nodes > 1
        ]
    for slot in range(2):
        tokens = [t for d in got for e in d.entries if e.slot == slot for t in e.result.tokens]
        assert tokens == want[slot][: len(tokens)]
    assert max(e.result.accepted for d in got for e in d.entries) > 1
    _same_context(end, other.messages)
    waits = [operation for operation in end.operations if operation[0] != "publish"]
    assert [name for name, _ in waits] == ["room"] * 2 + ["proposal"] * 5 + ["room", "proposal"]
    assert end.operations == [both for wait in waits for both in (wait, ("publish", wait[1]))]
    assert end.passed_steps == list(range(1, 1 + len(SCRIPT)))
    for made in (driver, plain):
        made.engine.stop()
        assert not made.failure


def _same_context(end: RingEnd, messages: list) -> None:  # type: ignore[type-arg]
    """The last steps' records, as many as a ring holds, and the features they name."""
    assert [message.step for message in messages] == list(range(1, 1 + len(SCRIPT)))
    for message in messages[1:]:
        records = end.records(message.step)
        assert records == list(message.records)
        rows = torch.frombuffer(bytearray(message.rows or b"\0\0\0\0"), dtype=torch.float32)
        at = 0
        for record in records:
            mine = end.rows(record)
            its = rows[at : at + mine.numel()].view(mine.shape)
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
            at += mine.numel()
    empty = end.memory.records[ring_entry(WHICH, 8), 0].tolist()
    assert empty[: Header.BEGAN] == [8, 0]


def test_a_grammar_sees_what_the_ring_holds(pair: Pair, runner: DeviceRunner) -> None:
    """Its masks are worked out for the tree that the draft wrote: the tokens are those without."""
    grammar = Grammar(GrammarKind.REGEX, "(the)+|a+")
    sampling = SamplingParams(temperature=0.9, seed=8, top_k=40)
    fields = {"sampling": sampling, "grammar": grammar, "stop": (EOS,), "limit": 14}
    reference = Driver(load(pair))
    reference.admit(0, PROMPTS[0], **fields)  # type: ignore[arg-type]
    want = list(reference.prefill(0, 0, 5).entries[0].result.tokens)
    while True:
        result = reference.decode(entry(0, 128)).entries[0].result
        want += result.tokens
        if result.finish is not Finish.NONE:
            break
    reference.engine.stop()
    driver, end = linked(runner, guesses([want], 4))
    end.plans[driver.step + 1] = [chunk(0, 0, 5)]
    driver.admit(0, PROMPTS[0], **fields)  # type: ignore[arg-type]
    got = list(driver.prefill(0, 0, 5, session=SESSION).entries[0].result.tokens)
    accepted = 0
    while True:
        end.plans[driver.step + 1] = [tree(0, 6)]
        result = driver.decode(tree(0, 6), session=SESSION).entries[0].result
        got, accepted = got + list(result.tokens), accepted + result.accepted
        if result.finish is not Finish.NONE:
            break
    assert (got, result.finish) == (want, Finish.LIMIT if len(want) == 9 else Finish.STOP)
    assert accepted > 0
    driver.engine.stop()
    assert not driver.failure


def test_what_a_draft_writes_into_the_shared_tables_changes_no_token(
    pair: Pair, runner: DeviceRunner
) -> None:
    want = outputs(pair)[0]
    driver, end = linked(runner, guesses([want], 3))
    driver.admit(0, PROMPTS[0], limit=100)
    got: list[int] = []
    plans = [(StepKind.PREFILL, chunk(0, 0, len(PROMPTS[0])))]
    for kind, planned in [*plans, *[(StepKind.DECODE, tree(0, 4))] * 5]:
        end.plans[driver.step + 1] = [planned]
        driver.plan(kind, planned, session=SESSION)
        got += driver.done().entries[0].result.tokens
        assert runner.shared is not None
        runner.shared.tables.copy_(runner.shared.tables.flip(0))  # pages, but of nobody here
    assert got == want[: len(got)]
    driver.engine.stop()
    assert not driver.failure


def test_a_step_of_nothing_is_published(runner: DeviceRunner) -> None:
    """It waits for room only, and takes no times over from the step before."""
    driver, end = linked(runner, guesses([], 1))
    end.plans[1] = [tree(3, 4, epoch=2**64 - 1)]
    runner._step.stamps[:DONE] = 99
    driver.plan(StepKind.DECODE, *end.plans[1], session=SESSION)
    assert isinstance(driver.next(), Rejected)
    driver.done()
    assert end.operations == [("room", 1), ("publish", 1)]
    header, record, *_ = end.memory.records[ring_entry(WHICH, 1)].tolist()
    assert header[: Header.BEGAN] == [1, 1]
    assert record[: Record.CAUGHT_UP + 1] == [3, 2**63 - 1, 0, 0, record[Record.ANCHOR], 0]
    began, *draft = runner._step.stamps[DONE:ENDED].tolist()
    assert began != 99 and draft == [0, 0]
    driver.engine.stop()
    assert not driver.failure
