"""The target's step stream is parked on a proposal that does not come; all else is driven."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from slipstream.handoff.cuda_ipc import CudaTargetEnd
from slipstream.handoff.cuda_ipc.export import probe_address
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.memory import signals_of
from slipstream.handoff.cuda_ipc.segment import Segment
from slipstream.handoff.layout import Flag
from tests.gpu.health import health
from tests.gpu.parked_target import NODES, SLOTS, Target, until
from tests.gpu.test_nothing_loads import loads
from tests.tiny import Pair, make_pair

pytestmark = pytest.mark.gpu

LIMIT_S = 0.05
FIRST, LATER = range(4), range(4, SLOTS)
SESSION = 7


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


@contextmanager
def targets(pair: Pair) -> Iterator[Target]:
    made = Target(pair, torch.device("cuda", 0))
    try:
        yield made
    finally:
        made.close()


class Neighbour:
    """Another session of the same target, whose draft is this process too."""

    def __init__(self, target: Target) -> None:
        self.target, self.lane = target, target._lane()
        layout, segment = target.export.layout, target.export._segment
        self.segment = Segment.open(segment.name, 8 * layout.flag_words)
        self.signals = signals_of(self.segment, target.export.device)
        self.far = Lane(self.segment, self.signals, self.lane.which)
        cuda = target.device.type == "cuda"
        records = target.export.records[0]
        self.values = torch.zeros(records.shape, dtype=records.dtype, pin_memory=cuda)

    def live(self, number: int, first: int) -> None:
        """Probes, exchanges a few steps, is retired."""
        watch, export = self.target.watch, self.target.export
        self.lane.reset(0)
        with watch.call("draft's half of a probe"):
            self.far.answer(probe_address(export, self.lane))
        with watch.call("target's half of a probe"):
            assert export.probe(self.lane, 12345) == ""
        self.lane.reset(first - 1)
        end = CudaTargetEnd(number, first, export, self.lane, lambda reason: None)
        for step in range(first, first + 3):
            self.lane.store(Flag.PROPOSAL, step)
            with watch.call("a step of another session"), self.target.on_side():
                end.await_proposal(step)
                end.publish(step)
            assert self.lane.load(Flag.CONTEXT) == step
            end.passed(step, 1000)
        with watch.call("another session is retired while it waits"), self.target.on_side():
            if self.target.device.type == "cuda":
                end.await_proposal(first + 3)  # does not come
            end.end("enough")
        end.passed(first + 3, 0)
        assert until(lambda: end.drained)

    def close(self) -> None:
        self.signals.close()
        self.segment.close()


def drive(target: Target, wanted: dict[int, list[int]], neighbour: Neighbour) -> int:
    """Parks the stream between two steps and does all that may happen; the parked step."""
    watch = target.watch
    target.got.clear()
    for slot in FIRST:
        target.admit(slot)
    target.attach(SESSION)
    target.done(target.prefill(FIRST, SESSION))
    with health() as healthy:
        # The copies of a step's results go on while the next one is parked.
        before = target.decode([0, 1], session=SESSION)
        watch.on = True
        parked = target.decode(FIRST, NODES, SESSION)
        target.done(before)
        assert target.parked
        for slot in LATER:
            target.admit(slot)
        target.release(SLOTS - 1)
        target.admit(SLOTS - 1)
        filled = target.prefill(LATER)
        again = target.decode(FIRST, NODES, SESSION)
        apart = target.decode(LATER)
        for round_ in range(2):
            neighbour.live(90 + round_, 1000 * (1 + round_))
        for _ in range(10):
            with watch.call("health"):
                assert healthy()
            with watch.call("a copy on another stream"), target.on_side():
                neighbour.values.copy_(target.export.records[0], non_blocking=True)
        assert target.parked
        assert until(lambda: len(watch.calls) > 0 and target.driver.engine._inbox.empty())
        watch.on = False
    target.give(parked)
    target.done(parked)
    target.done(filled)
    assert target.parked  # on the proposal after it
    target.propose(again, FIRST, wanted)
    target.give(again)
    target.done(again)
    target.done(apart)
    return again


def check_tokens(target: Target, wanted: dict[int, list[int]], accepted: bool = True) -> None:
    for slot in range(SLOTS):
        got = target.got[slot]
        assert got == wanted[slot][: len(got)], f"slot {slot}"
    if accepted:
        assert all(target.accepted[slot] > 0 for slot in FIRST), target.accepted
        assert all(len(target.got[slot]) >= 2 + NODES for slot in FIRST)


def test_nothing_blocks_while_the_stream_is_parked(pair: Pair) -> None:
    with targets(pair) as target:
        wanted = target.plain()
        neighbour = Neighbour(target)
        try:
            drive(target, wanted, neighbour)
        finally:
            target.lane.store(Flag.PROPOSAL, 1 << 62)
            torch.cuda.synchronize()
            neighbour.close()
        check_tokens(target, wanted)
        seconds, name = target.watch.slowest()
        assert seconds < LIMIT_S, f"{name} took {1e3 * seconds:.1f} ms"


def test_a_detach_releases_what_is_parked(pair: Pair) -> None:
    with targets(pair) as target:
        wanted = target.plain()
        target.got.clear()
        for slot in range(SLOTS):
            target.admit(slot)
        target.attach(SESSION)
        target.done(target.prefill(range(SLOTS), SESSION))
        first = target.decode(range(SLOTS), NODES, SESSION)
        second = target.decode(range(SLOTS), NODES, SESSION)
        assert target.parked
        began = time.monotonic()
        target.detach(SESSION)
        events = [target.event() for _ in range(1)]
        assert type(events[0]).__name__ == "Detached"
        target.done(first)
        target.done(second)
        took = time.monotonic() - began
        print(f"a detach released two parked steps within {1e3 * took:.1f} ms")
        assert took < 0.2
        target.done(target.decode(range(SLOTS)))
        check_tokens(target, wanted, accepted=False)
        assert target.end is not None and until(lambda: target.end.drained)


def test_nothing_is_loaded_meanwhile(pair: Pair) -> None:
    with targets(pair) as target:
        wanted = target.plain()
        neighbour = Neighbour(target)
        try:
            neighbour.live(80, 500)  # torch's own first copies
            with loads() as found:
                drive(target, wanted, neighbour)
        finally:
            target.lane.store(Flag.PROPOSAL, 1 << 62)
            torch.cuda.synchronize()
            neighbour.close()
        check_tokens(target, wanted)
    assert not found, f"{len(found)} loads, the first: {found[:5]}"
