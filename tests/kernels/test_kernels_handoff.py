"""The target's ends of the rings against plain references, whatever a draft wrote there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from slipstream.handoff.layout import HEAD_INTS, RECORD_INTS
from slipstream.kernels.handoff import (
    BEGAN,
    DONE,
    DRAFT_BEGAN,
    DRAFT_ENDED,
    LINK_COLUMNS,
    LINK_HEAD,
    STAMPS,
    Rings,
    StepLink,
    mark,
    publish_context,
    take_proposal,
)
from slipstream.kernels.walk import Walks, walk
from tests.kernels.test_kernels_walk import SLOTS, _check, _Entry, _random_entry, _rows, _state
from tests.kernels.test_kernels_walk import _trees as walk_trees

POISON = -7
RINGS, NODES = 3, 40
ENTRIES = 5  # of a plan at most
WILD = (-(2**63), -(2**31) - 1, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1)


@dataclass
class Planned:
    """An entry of a plan; `rows` of the step if it is computed."""

    slot: int
    epoch: int
    most: int
    first_node: int
    job: int
    live: bool
    rows: int = 1


@dataclass
class Plan:
    """A plan as the host says it."""

    ring: int
    step: int
    first_job: int = 0
    last: bool = True
    entries: list[Planned] = field(default_factory=list)

    def jobs(self) -> list[Planned]:
        return sorted((e for e in self.entries if e.job >= 0), key=lambda e: e.job)

    def link(self, device: torch.device) -> StepLink:
        head = [self.ring, self.step, len(self.entries), self.first_job, int(self.last)]
        table = torch.full((ENTRIES, LINK_COLUMNS), POISON, dtype=torch.int64)
        for row, e in enumerate(self.entries):
            said = [e.slot, e.epoch, e.most, e.first_node, e.job, int(e.live)]
            table[row, : len(said)] = torch.tensor(said)
        padded = torch.tensor(head + [POISON] * (LINK_HEAD - len(head)))
        return StepLink(padded.to(device), table.to(device))


def any_plan(rng: random.Random) -> Plan:
    """Entries of any slots, some of which are not computed."""
    plan = Plan(rng.choice([0, 1, 2, 2, -1, RINGS]), rng.randrange(1, 99))
    slots = rng.sample(range(SLOTS), rng.randint(0, ENTRIES))
    node = job = 0
    for slot in slots:
        computed, rows = rng.random() < 0.8, rng.randint(1, 9)
        plan.entries.append(
            Planned(
                slot if computed else rng.choice([slot, 99, 2**32 - 1]),
                rng.choice([1, 2, 2**40]), rng.choice([0, 1, 3, 9, 2**33]), node,
                job if computed else -1, rng.random() < 0.8, rows,
            )
        )  # fmt: skip
        node, job = node + rows, job + computed
    return plan


def any_rings(rng: random.Random, plan: Plan, device: torch.device) -> Rings:
    """Rings in which the plan's proposal is right, wrong or torn."""
    heads = torch.tensor(
        [rng.choice(WILD) for _ in range(RINGS * (1 + ENTRIES) * HEAD_INTS)], dtype=torch.int64
    ).view(RINGS, 1 + ENTRIES, HEAD_INTS)
    nodes = torch.tensor(
        [max(-(2**31), min(rng.choice(WILD), 2**31 - 1)) for _ in range(RINGS * NODES * 2)],
        dtype=torch.int32,
    ).view(RINGS, NODES, 2)
    if 0 <= plan.ring < RINGS:
        step = plan.step if rng.random() < 0.8 else plan.step - RINGS
        heads[plan.ring, 0] = torch.tensor([step, len(plan.entries), 11, 31])
        for row, e in enumerate(plan.entries):
            if rng.random() < 0.8:
                heads[plan.ring, 1 + row, :3] = torch.tensor(
                    [
                        e.slot + (rng.random() < 0.1),
                        e.epoch + (rng.random() < 0.1),
                        rng.choice([0, 1, e.rows, rng.randint(1, e.rows), e.rows + 1]),
                    ]
                )
    records = torch.full((RINGS, 1 + ENTRIES, RECORD_INTS), POISON, dtype=torch.int64)
    return Rings(records.to(device), heads.to(device), nodes.to(device))


def proposal(plan: Plan, rings: Rings, index: int) -> list[tuple[int, int]]:
    """The nodes that are taken of an entry: what the ring holds, if all of it is right."""
    if not 0 <= plan.ring < RINGS:
        return []
    entry = plan.entries[index]
    head = rings.heads[plan.ring, 1 + index].tolist()
    right = int(rings.heads[plan.ring, 0, 0]) == plan.step
    right = right and head[:2] == [entry.slot, entry.epoch] and 1 <= head[2] <= entry.rows
    end = entry.first_node + head[2]
    if not right or end > NODES:
        return []
    return [tuple(pair) for pair in rings.nodes[plan.ring, entry.first_node : end].tolist()]


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass
class Taken:
    """Outputs of `take_proposal`, poisoned."""

    counts: Tensor
    tokens: Tensor
    parents: Tensor
    stamps: Tensor

    @classmethod
    def make(cls, rows: int, device: torch.device) -> Taken:
        stamps = torch.full((STAMPS,), 77, dtype=torch.int64, device=device)
        return cls(
            ints([POISON] * ENTRIES, device), ints([POISON] * rows, device),
            ints([POISON] * rows, device), stamps,
        )  # fmt: skip


def take(plan: Plan, rings: Rings, part: list[Planned], device: torch.device) -> Taken:
    """Runs it over a part of the plan's jobs."""
    offsets = [0]
    for entry in part:
        offsets.append(offsets[-1] + entry.rows)
    taken = Taken.make(offsets[-1] + 3, device)
    take_proposal(
        plan.link(device), rings, ints([len(part), offsets[-1]], device),
        ints(offsets + [offsets[-1]] * (ENTRIES - len(part)), device),
        taken.counts, taken.tokens, taken.parents, taken.stamps,
    )  # fmt: skip
    return taken


def check_taken(plan: Plan, rings: Rings, part: list[Planned], taken: Taken) -> int:
    """Returns how many trees were taken."""
    counts = [POISON] * ENTRIES
    tokens, parents = [POISON] * len(taken.tokens), [POISON] * len(taken.tokens)
    at = found = 0
    for place, entry in enumerate(part):
        nodes = proposal(plan, rings, plan.entries.index(entry))
        if 0 <= plan.ring < RINGS:
            counts[place] = len(nodes)
        for index, (token, parent) in enumerate(nodes):
            tokens[at + index], parents[at + index] = token, parent
        found += len(nodes) > 0
        at += entry.rows
    assert taken.counts.tolist() == counts
    assert taken.tokens.tolist() == tokens and taken.parents.tolist() == parents
    return found


def test_any_proposal(device: torch.device, cases: int) -> None:
    rng, found, parts = random.Random(5), 0, 0
    for _ in range(cases * 3):
        plan = any_plan(rng)
        rings = any_rings(rng, plan, device)
        before = [rings.heads.clone(), rings.nodes.clone(), rings.records.clone()]
        jobs = plan.jobs()
        cut = rng.randint(0, len(jobs))
        for first, part in ((0, jobs[:cut]), (cut, jobs[cut:])):
            if first and not part:
                continue
            plan.first_job, plan.last = first, first > 0 or cut == len(jobs)
            taken = take(plan, rings, part, device)
            found += check_taken(plan, rings, part, taken)
            parts += first > 0
            right = 0 <= plan.ring < RINGS and int(rings.heads[plan.ring, 0, 0]) == plan.step
            stamps = taken.stamps.tolist()
            if first:
                assert stamps == [77] * STAMPS
            else:
                draft = [11, 31] if right else [0, 0]
                assert stamps[DRAFT_BEGAN : DRAFT_ENDED + 1] == draft
                assert stamps[DRAFT_ENDED + 1 :] == [77] * (STAMPS - 1 - DRAFT_ENDED)
                assert (stamps[BEGAN] != 77) and (stamps[BEGAN] == 0) == (device.type == "cpu")
        for tensor, old in zip((rings.heads, rings.nodes, rings.records), before, strict=True):
            assert torch.equal(tensor, old)
    assert found > cases // 2 and parts > cases // 2


@pytest.mark.parametrize("first_job", [0, 3])
def test_mark(device: torch.device, first_job: int) -> None:
    """A step without a proposal takes over nothing of the one before."""
    stamps = torch.full((STAMPS,), 77, dtype=torch.int64, device=device)
    mark(Plan(-1, 5, first_job).link(device), stamps)
    found = stamps.tolist()
    assert found[DRAFT_ENDED + 1 :] == [77] * (STAMPS - 1 - DRAFT_ENDED)
    if first_job:
        assert found == [77] * STAMPS
    else:
        assert found[BEGAN] != 77 and found[DRAFT_BEGAN : DRAFT_ENDED + 1] == [0, 0]


def records_of(
    plan: Plan, start: list[int], anchor: list[int], cursor: list[int]
) -> list[list[int]]:
    """The records of a plan; moves the cursors."""
    found = []
    for entry in plan.entries:
        place = entry.slot if 0 <= entry.slot < SLOTS else 0
        first = count = whole = 0
        if entry.job >= 0:
            first = cursor[place]
            count = max(0, min(start[place] - first, entry.most))
            cursor[place] += count
            whole = entry.live and first + count == start[place]
        found.append([entry.slot, entry.epoch, first, count, anchor[place], int(whole)])
    return found


def test_any_context(device: torch.device, cases: int) -> None:
    rng, moved = random.Random(6), 0
    for _ in range(cases * 3):
        plan = any_plan(rng)
        plan.last = rng.random() < 0.8
        start = [rng.randrange(50) for _ in range(SLOTS)]
        cursor = [rng.choice([0, rows, max(0, rows - 2)]) for rows in start]
        anchor = [rng.randrange(1000) for _ in range(SLOTS)]
        rings = any_rings(rng, plan, device)
        heads, nodes = rings.heads.clone(), rings.nodes.clone()
        stamps = torch.tensor([5, 11, 31, 77, 77, 77, 77, 77], device=device)
        given = (ints(start, device), ints(anchor, device), ints(cursor, device))
        publish_context(plan.link(device), rings, *given, stamps)
        assert given[0].tolist() == start and given[1].tolist() == anchor
        assert stamps.tolist()[:DONE] == [5, 11, 31, 77]
        *done, ended = stamps.tolist()[DONE:]
        assert done == [5, 11, 31] and (ended == 0) == (device.type == "cpu")
        want = torch.full_like(rings.records, POISON)
        if 0 <= plan.ring < RINGS and plan.last:
            before = list(cursor)
            rows = records_of(plan, start, anchor, cursor)
            moved += before != cursor
            want[plan.ring, 0, :4] = torch.tensor([plan.step, len(plan.entries), 5, ended])
            for index, record in enumerate(rows):
                want[plan.ring, 1 + index, :6] = torch.tensor(record)
        assert torch.equal(rings.records, want)
        assert given[2].tolist() == cursor
        assert torch.equal(rings.heads, heads) and torch.equal(rings.nodes, nodes)
    assert moved > cases // 2


def test_a_slot_twice_in_a_plan(device: torch.device) -> None:
    """The second time it is not computed: nothing is published of it."""
    plan = Plan(1, 4, entries=[Planned(2, 1, 5, 0, 0, True), Planned(2, 1, 5, 1, -1, False)])
    rings = any_rings(random.Random(1), plan, device)
    start, anchor, cursor = (ints([value] * SLOTS, device) for value in (9, 3, 4))
    stamps = torch.zeros(STAMPS, dtype=torch.int64, device=device)
    publish_context(plan.link(device), rings, start, anchor, cursor, stamps)
    assert rings.records[1, 1, :6].tolist() == [2, 1, 4, 5, 3, 1]
    assert rings.records[1, 2, :6].tolist() == [2, 1, 0, 0, 3, 0]
    assert cursor.tolist() == [4, 4, 9, 4, 4, 4]


class _Cut(_Entry):
    """An entry whose walk may give so many tokens."""

    most_commits = 3

    def path(self) -> list[int]:
        return super().path()[: self.most_commits]


def test_walks_end_where_a_step_may_commit_no_more(device: torch.device, cases: int) -> None:
    rng, cut = random.Random(8), 0
    for _ in range(cases):
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS - 1))
        most = rng.choice((1, 2, 3, 5))
        entries: list[_Entry] = []
        for slot in slots:
            drawn = _random_entry(rng, slot, 20)
            entry = _Cut(**{name: getattr(drawn, name) for name in drawn.__dataclass_fields__})
            entry.most_commits = most
            cut += len(drawn.path()) > most
            entries.append(entry)
        capacity = max(23, sum(entry.rows for entry in entries))
        rows = _rows(entries, capacity, device)
        trees, tokens = walk_trees(entries, capacity, device)
        state, before = _state(entries, device), _state(entries, device)
        walks = Walks.allocate(capacity, SLOTS, 23, device)
        walk(rows, trees, tokens, state, walks, most_commits=most)
        _check(entries, state, before, walks)
    assert cut > cases // 2
