"""Kernels of a draft's session on devices, against the plain session and plain lookups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.draft.commands import Admit, Attach, Behind, Event, Live, Release
from services.draft.peer_input import Ask, Edit, PeerInput, signed
from services.draft.runner import ContextRows, DraftSpec, NoPages
from services.draft.session import Session
from slipstream.handoff.base import ContextMessage, ContextRecord
from slipstream.handoff.layout import Layout
from slipstream.kernels.accept import accept, edit_slots
from slipstream.kernels.drafting import BLOCK_INTS, Blocks
from slipstream.kernels.gather import gather
from slipstream.kernels.grow import NODE_INTS
from slipstream.kernels.peer import STATE_INTS, VERDICT_INTS, VERDICTS
from slipstream.kernels.propose import open_blocks, put
from slipstream.layers.device_rows import DeviceRows
from slipstream.tree import resolve_spec
from tests.fakes.device_end import FakeMemory

SLOTS, VOCAB, B, WIDTH = 5, 100, 4, 24
WHICH = 2
TREE = resolve_spec(block_size=B)
LAYOUT = Layout(SLOTS, pages=12, page_size=4, table_pages=6, width=WIDTH, dtype="float32")


class RowsOnly:
    """A `DraftContext` that holds as many rows of a slot as it is told."""

    def __init__(self) -> None:
        self.capacity: dict[int, int] = {}
        self.written: list[tuple[int, int, int]] = []

    def admit(self, slot: int, drafting: object) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def reserve(self, slot: int, rows: int) -> None:
        if rows > self.capacity[slot]:
            raise NoPages

    def write(self, rows: Sequence[ContextRows]) -> None:
        self.written = [(part.slot, part.first_row, part.count) for part in rows]


class PlainRunner:
    """Opens one `RowsOnly`."""

    devices = None

    def __init__(self) -> None:
        self.spec = DraftSpec("", B, 0, True, VOCAB, 1, "bfloat16", SLOTS, 9, 4)
        self.context = RowsOnly()

    def open_context(self) -> Any:
        return self.context


class Taker:
    """A plain session, and the device's state of one, given the same."""

    def __init__(self, device: torch.device) -> None:
        self.runner = PlainRunner()
        self.plain = Session(Attach(1, 7, 1), self.runner)  # type: ignore[arg-type]
        self.memory = FakeMemory(LAYOUT, device)
        self.input = PeerInput(SLOTS, device)
        self.input.connect(self.memory, WHICH)

        def words(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, -3, dtype=kind, device=device)

        self.state = words(SLOTS, STATE_INTS)
        self.verdicts = words(VERDICTS, 1 + SLOTS, VERDICT_INTS)
        self.slots, self.starts, self.begins, self.done = (
            words(size, kind=torch.int32) for size in (SLOTS, SLOTS, SLOTS + 1, 1)
        )
        self.edits = {slot: Edit(reset=True) for slot in range(SLOTS)}
        self.step = 0

    def admit(self, slot: int, epoch: int, capacity: int) -> None:
        self.plain.admit(Admit(1, 7, slot, epoch, None, 0.0, 0, 0), TREE)
        self.runner.context.capacity[slot] = capacity
        self.edits[slot] = Edit(reset=True, held=epoch, capacity=capacity)

    def release(self, slot: int) -> None:
        before = {number for number, held in self.plain.slots.items() if held.starved}
        self.plain.release(Release(1, slot, self.plain.slots[slot].epoch))
        self.edits[slot] = Edit(reset=True)
        for number in before - {slot}:
            self.edits.setdefault(number, Edit()).feed = True
            self.edits[number].capacity = self.runner.context.capacity[number]

    def grow(self, slot: int, capacity: int) -> None:
        self.runner.context.capacity[slot] = capacity
        self.edits.setdefault(slot, Edit()).capacity = capacity

    def take(self, records: Sequence[ContextRecord], limit: int = 1 << 20) -> None:
        """Both take the records; the same events and the same fresh rows must come of them."""
        self.step += 1
        self.memory.write_records(WHICH, self.step, records)
        self.launch({self.step: limit})
        given = [record for record in records if record.count]
        self.runner.context.written = []
        size = self.runner.spec.row_bytes
        counts = [max(0, record.count) for record in given]
        # The plain session only believes records whose bytes are there.
        sound = [replace(r, count=c) for r, c in zip(given, counts, strict=True)]
        sound = [
            replace(r, first_row=-1) if was.count < 0 else r
            for r, was in zip(sound, given, strict=True)
        ]
        want = self.plain.take(ContextMessage(self.step, tuple(sound), bytes(size * sum(counts))))
        assert self.events() == [(type(event), event.slot, event.epoch, event.rows)  # type: ignore[union-attr]
                                 for event in want]  # fmt: skip
        assert self.fresh() == self.runner.context.written
        self.check_state()

    def launch(self, limits: dict[int, int]) -> None:
        self.input.send(self.step, 0, self.step, limits, [], self.edits)
        self.edits = {}
        edit_slots(self.input.plan, self.state, edits_at=self.input.edits_at)
        accept(
            self.input.peer, self.input.plan, self.state, self.verdicts, self.slots, self.starts,
            self.begins, self.done, vocab_size=VOCAB,
        )  # fmt: skip
        assert self.done.item() == 0
        assert self.input.plan[1].item() == self.step + 1

    def events(self) -> list[tuple[type[Event], int, int, int]]:
        words = self.verdicts[self.step % VERDICTS].tolist()
        assert words[0][0] == self.step
        return [
            (Live if code == 1 else Behind, slot, epoch % (1 << 64), rows)
            for slot, epoch, code, rows, *_ in words[1:]
            if slot >= 0 and code
        ]

    def fresh(self) -> list[tuple[int, int, int]]:
        begins = self.begins.tolist()
        parts = zip(self.slots.tolist(), self.starts.tolist(), begins, begins[1:], strict=False)
        return [(slot, start, end - at) for slot, start, at, end in parts if end > at]

    def check_state(self) -> None:
        for number, row in enumerate(self.state.tolist()):
            slot = self.plain.slots.get(number)
            assert bool(row[0]) == (slot is not None)
            if slot is not None:
                behind = None if row[5] == -(1 << 62) else row[5]
                assert row[1:3] == [signed(slot.epoch), slot.rows]
                assert (bool(row[4]), behind, bool(row[6])) == (
                    slot.live, slot.behind, slot.starved,
                )  # fmt: skip
                assert not slot.live or row[3] == slot.anchor


def records_for(taker: Taker, rng: random.Random) -> list[ContextRecord]:
    """Mostly what a target would say, and some that no target says."""
    records = []
    for number in rng.sample(range(SLOTS), rng.randint(0, SLOTS)):
        slot = taker.plain.slots.get(number)
        epoch, rows = (slot.epoch, slot.rows) if slot else (4, 3)
        values: dict[str, Any] = {
            "slot": number,
            "epoch": epoch,
            "first_row": rng.choice([rows, rows, rows, max(0, rows - 2), 0]),
            "count": rng.choice([0, 1, 2, 5]),
            "anchor": rng.randrange(VOCAB),
            "caught_up": rng.random() < 0.7,
        }
        if rng.random() < 0.25:
            wrong = rng.choice(
                [
                    {"epoch": epoch + 1},
                    {"epoch": rng.randrange(1 << 64)},
                    {"first_row": rows + 1},
                    {"first_row": -1},
                    {"anchor": VOCAB},
                    {"anchor": -1},
                    {"count": 40},
                ]
            )
            values |= wrong
        records.append(ContextRecord(**values))
    return records


def test_accept_is_take(device: torch.device, cases: int) -> None:
    rng = random.Random(4)
    taker = Taker(device)
    epoch = (1 << 64) - 20
    for _ in range(min(2000, 6 * cases)):
        for number in range(SLOTS):
            draw = rng.random()
            if number not in taker.plain.slots:
                if draw < 0.3:
                    epoch = (epoch + 1) % (1 << 64)
                    taker.admit(number, epoch, rng.randrange(40))
            elif draw < 0.04:
                taker.release(number)
            elif draw < 0.2:
                taker.grow(number, taker.runner.context.capacity[number] + rng.randrange(9))
        taker.take(records_for(taker, rng))


@pytest.mark.parametrize("wrong", ["step", "count", "negative", "nobody"])
def test_a_ring_entry_that_is_not_this_steps_says_nothing(device: torch.device, wrong: str) -> None:
    taker = Taker(device)
    taker.admit(0, 1, 20)
    taker.take([ContextRecord(0, 1, 0, 3, 5, True)])
    taker.step += 1
    good = ContextRecord(0, 1, 3, 2, 6, True)
    step = taker.step + (8 if wrong == "step" else 0)
    count = {"count": SLOTS + 1, "negative": -1}.get(wrong, 1)
    taker.memory.write_records(WHICH, step, [good], count)
    if wrong == "nobody":
        taker.input.connect(None)
    taker.launch({taker.step: 9})
    assert taker.events() == [] and taker.fresh() == []
    assert taker.verdicts[taker.step % VERDICTS, 0, 1].item() == -1
    taker.check_state()


def test_rows_beyond_what_was_planned_are_not_taken(device: torch.device) -> None:
    taker = Taker(device)
    for slot in range(3):
        taker.admit(slot, slot, 20)
    taker.step += 1
    records = [ContextRecord(slot, slot, 0, 4, 5, True) for slot in range(3)]
    taker.memory.write_records(WHICH, taker.step, records)
    taker.launch({taker.step: 9})
    assert taker.fresh() == [(0, 0, 4), (1, 0, 4)]
    kinds = [kind for kind, *_ in taker.events()]
    assert kinds == [Live, Live, Behind]


def test_huge_counts_do_not_wrap(device: torch.device) -> None:
    taker = Taker(device)
    taker.admit(0, 1, 20)
    for first, count in ((0, (1 << 63) - 1), ((1 << 63) - 1, 5), (-(1 << 63), 5), (0, -5)):
        taker.step += 1
        record = ContextRecord(0, 1, first, count, 5, True)
        taker.memory.write_records(WHICH, taker.step, [record])
        taker.launch({taker.step: 1 << 20})
        assert taker.fresh() == []
        assert taker.state[0, 2].item() == 0 and taker.state[0, 4].item() == 0


def test_slots_that_the_target_has_no_tables_of_are_nobodys(device: torch.device) -> None:
    taker = Taker(device)
    taker.memory = FakeMemory(replace(LAYOUT, slots=2), device)
    taker.input.connect(taker.memory, WHICH)
    for slot in (1, 2):
        taker.admit(slot, 1, 20)
    taker.step += 1
    records = [ContextRecord(slot, 1, 0, 3, 5, True) for slot in (2, 1)]
    taker.memory.write_records(WHICH, taker.step, records)
    taker.launch({taker.step: 9})
    assert taker.fresh() == [(1, 0, 3)]
    assert taker.events() == [(Live, 1, 1, 3)]


def test_gather_follows_the_targets_tables(device: torch.device) -> None:
    memory = FakeMemory(LAYOUT, device)
    memory.features.copy_(torch.randn(memory.features.shape))
    rng = random.Random(3)
    pages = rng.sample(range(12), 12)
    for slot in range(2):
        memory.tables[slot] = torch.tensor(pages[6 * slot : 6 * slot + 6])
    memory.tables[1, 2] = 12  # no page
    memory.tables[1, 3] = -1
    peer = PeerInput(SLOTS, device)
    peer.connect(memory, WHICH)
    parts = [(0, 3, 7), (2, 0, 0), (1, 0, 26), (0, 0, 0), (0, 0, 0)]  # slot, start, count
    begins = [0, 7, 7, 33, 33, 33]
    rows = DeviceRows.allocate(8, SLOTS, torch.zeros(1), device, 1)
    rows.slots.copy_(torch.tensor([slot for slot, *_ in parts]))
    rows.starts.copy_(torch.tensor([start for _, start, _ in parts]))
    features = torch.full((8, WIDTH), torch.nan, device=device)
    begins_at = torch.tensor(begins, dtype=torch.int32, device=device)
    want = []
    for entry, (slot, start, count) in enumerate(parts):
        for position in range(start, start + count):
            page = int(memory.tables[slot, position // 4]) if position < 24 else -1
            known = 0 <= page < 12
            row = memory.features[page * 4 + position % 4] if known else torch.zeros(WIDTH)
            want.append((entry, position, row.cpu()))
    for done in range(0, 40, 8):
        rows.entries.fill_(-5)
        at = torch.tensor([done], dtype=torch.int32, device=device)
        gather(peer.peer, begins_at, at, rows, features)
        assert rows.offsets.tolist() == [begin - done for begin in begins]
        part = want[done : done + 8]
        assert rows.entries.tolist() == [e for e, *_ in part] + [-1] * (8 - len(part))
        assert rows.positions.tolist() == [p for _, p, _ in part] + [0] * (8 - len(part))
        for row, (_, _, expected) in zip(features, part, strict=False):
            assert torch.equal(row.cpu(), expected)


def test_blocks_and_trees(device: torch.device) -> None:
    """Two passes of two blocks; the slot in between is not live, and one is another request's."""
    memory = FakeMemory(LAYOUT, device)
    peer = PeerInput(SLOTS, device)
    peer.connect(memory, WHICH)
    state = torch.zeros(SLOTS, STATE_INTS, dtype=torch.int64, device=device)
    epoch = (1 << 64) - 1
    for slot, (live, held) in enumerate([(1, 1), (0, 1), (1, 1), (1, 0), (1, 1)]):
        words = [held, signed(epoch - slot), 10 + slot, 50 + slot, live, 0, 0, 99]
        state[slot] = torch.tensor(words)
    asks = [
        Ask(0, epoch, 9, 4, 0, 0),
        Ask(1, epoch - 1, 9, 4, 9, 1),
        Ask(2, epoch - 2, 2, 2, 19, 3),
        Ask(4, epoch, 9, 4, 21, 4),
        Ask(3, epoch - 3, 9, 4, 30, 5),
    ]
    asks = asks[:4]
    memory.heads.fill_(77)
    blocks = Blocks(
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.zeros(2, BLOCK_INTS, dtype=torch.int32, device=device),
    )
    sizes = torch.tensor([3, 2], dtype=torch.int32, device=device)
    nodes = torch.arange(40 * NODE_INTS, dtype=torch.int32, device=device).view(40, NODE_INTS)
    peer.send(13, 5, 1, {}, asks, {})
    open_blocks(peer.peer, peer.plan, state, blocks, most=2)
    assert blocks.counts.tolist() == [1, 4]
    assert blocks.fields[0].tolist() == [0, 10, 50, 9, 4, 0, 0, 0]
    put(peer.peer, peer.plan, state, blocks, sizes, nodes, most=2)
    open_blocks(peer.peer, peer.plan, state, blocks, most=2)
    assert blocks.counts.tolist() == [1, 2]
    assert blocks.fields[0].tolist() == [2, 12, 52, 2, 2, 0, 19, 3]
    sizes[0] = 2
    put(peer.peer, peer.plan, state, blocks, sizes, nodes, most=2)
    trees = memory.read_trees(WHICH, 13, [9, 9, 1, 2, 9])
    assert trees == {
        0: (signed(epoch), [0, 3, 6], [1, 4, 7]),
        2: (signed(epoch - 2), [57, 60], [58, 61]),
    }
    others = [entry for entry in range(len(memory.heads)) if entry != WHICH * 8 + 13 % 8]
    assert (memory.heads[others] == 77).all() and (memory.nodes[others] == 0).all()
    peer.connect(None)
    memory.heads.fill_(5)
    peer.send(14, 5, 1, {}, asks, {})
    open_blocks(peer.peer, peer.plan, state, blocks, most=2)
    put(peer.peer, peer.plan, state, blocks, sizes, nodes, most=2)
    assert (memory.heads == 5).all()
