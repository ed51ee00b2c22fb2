"""The draft's engine under random commands and losses: no stale row, no step unanswered."""

from __future__ import annotations

import queue
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.draft.commands import (
    Admit,
    Attach,
    Attached,
    Behind,
    Detach,
    Detached,
    Event,
    Live,
    Plan,
    PlanEntry,
    Release,
)
from tests.unit.draft_rig import FakeEnd, Request, Rig

SLOTS = 4

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["admit", "admit", "step", "step", "step", "lose", "repeat", "stale", "tear", "release",
             "reattach", "die"]
        ),
        st.integers(0, SLOTS - 1),
        st.integers(0, 20),
    ),
    min_size=5,
    max_size=40,
)  # fmt: skip


class World:
    """Gateway and target around one engine: what they know of every slot."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.requests: dict[int, Request] = {}
        self.live: set[int] = set()
        self.epoch = 0
        self.session = 7
        self.harmed = -1  # the slot whose last record was spoilt

    def take(self, event: Event) -> None:
        """A gateway's answer to an event."""
        if isinstance(event, Live | Behind) and event.session == self.session:
            request = self.requests.get(event.slot)
            if request is None or request.epoch != event.epoch:
                return
            if isinstance(event, Live):
                assert event.rows == len(request.tokens) - 1
                self.live.add(event.slot)
            else:
                self.live.discard(event.slot)
                request.cursor = event.rows  # Rewind

    def drain(self) -> None:
        """All that the engine said by now."""
        while True:
            try:
                self.take(self.rig.events.get_nowait())
            except queue.Empty:
                return

    def admit(self, slot: int, size: int) -> None:
        if slot in self.requests:
            return
        self.epoch += 1
        prompt = range(100 * self.epoch % 900, 100 * self.epoch % 900 + size + 1)
        request = Request(slot, self.epoch, prompt, self.rig.runner.spec.vocab_size)
        request.draw()
        self.requests[slot] = request
        self._send_admit(request)

    def _send_admit(self, request: Request) -> None:
        self.rig.send(Admit, self.session, request.slot, request.epoch, None, 0.0, 0, 0)

    def step(self, slot: int, count: int, harm: str = "") -> None:
        """A decode step of all slots; the context of `slot` may come to harm."""
        rig = self.rig
        requests = list(self.requests.values())
        rig.step += 1
        live = set(self.live)
        entries = tuple(
            PlanEntry(r.slot, r.epoch, 1 + count if r.slot in live else 1) for r in requests
        )
        rig.send(Plan, rig.step, self.session, True, entries, rig.step - 1)
        trees = rig.proposal(rig.step)  # exactly one per plan
        self.drain()
        assert set(trees) <= live
        for tree in trees.values():
            request = self.requests[tree.slot]
            if tree.slot != self.harmed:  # a record that never came leaves the anchor behind
                assert tree.tokens[0] == request.tokens[-1]
            assert 2 <= len(tree.tokens) <= 1 + count
        self.harmed = slot if harm else -1
        records = []
        for request in requests:
            request.draw(1 + count % 3)
            if request.slot == slot and harm == "lose":
                request.cursor += 1
            if request.slot == slot and harm == "repeat":
                request.cursor = max(0, request.cursor - count)
            record, rows = request.record(None if request.slot in live else 5 + count)
            if request.slot == slot and harm == "stale":
                record = replace(record, epoch=record.epoch - 1)
            records.append((record, rows))
        if harm == "tear" and records:
            record, rows = records[0]
            records[0] = (replace(record, count=record.count + 1), rows)
        rig.context(rig.step, *records)

    def release(self, slot: int) -> None:
        request = self.requests.pop(slot, None)
        if request is not None:
            self.live.discard(slot)
            self.rig.send(Release, slot, request.epoch)

    def reattach(self, die: bool) -> None:
        rig = self.rig
        if die:
            rig.end.end("the target died")
        else:
            rig.send(Detach, self.session, "")
        while not isinstance(event := rig.event(), Detached):
            self.take(event)
        assert event.session == self.session
        self.session += 1
        self.live.clear()
        rig.send(Attach, self.session, rig.step + 1)
        for request in self.requests.values():
            request.cursor = 0
            self._send_admit(request)
        rig.end = FakeEnd(self.session)
        rig.connect(self.session, rig.end)
        assert rig.event() == Attached(self.session, "grpc")

    def settle(self) -> None:
        """With nothing harmed any more every slot gets live and is drafted for."""
        for _ in range(60):
            self.step(-1, 3)
            if set(self.requests) == self.live:
                break
        self.step(-1, 3)
        self.step(-1, 3)
        assert self.live == set(self.requests)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(ACTIONS)
def test_random_commands(actions: list[tuple[str, int, int]]) -> None:
    with Rig(slots=SLOTS, pages=400, page_size=8, block_size=8) as rig:
        world = World(rig)
        for action, slot, number in actions:
            if action == "admit":
                world.admit(slot, number)
            elif action == "release":
                world.release(slot)
            elif action in ("reattach", "die"):
                world.reattach(action == "die")
            else:
                world.step(slot, number, "" if action == "step" else action)
        world.settle()
        for slot in list(world.requests):
            world.release(slot)
        rig.quiet()
        assert rig.runner.contexts[0].free_pages == 400
    assert rig.closed.empty()
