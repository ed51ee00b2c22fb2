"""Target and draft of one pair in one process, their slots filled, driven step by step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from services.draft.loading import load_runner as load_draft
from services.draft.runner import ContextRows, DraftEntry, Drafting, DraftRunner
from services.draft.settings import DraftSettings
from services.target.loading import load_runner as load_target
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    Finish,
    PrefillEntry,
    SlotAdmit,
    TargetRunner,
)
from services.target.settings import TargetSettings
from slipstream import accelerator
from slipstream.accelerator import Place
from slipstream.layers.graphs import Graphs, Work
from slipstream.params import SamplingParams
from slipstream.tree import Tree, TreeSpec
from slipstream.wire import MAX_NODES

GROWTH = 256
"""Positions that the steps of one case may commit in a slot."""

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """What is loaded and where; the shares are parts of one GPU's memory."""

    target: Path
    draft: Path
    device: str
    slots: int
    max_model_len: int
    target_share: float = 0.75
    draft_share: float = 0.15


@dataclass(frozen=True, slots=True)
class Loaded:
    """Both runners, and what it took to make them."""

    target: TargetRunner
    draft: DraftRunner
    startup: dict[str, Any]


def load(setup: Setup) -> Loaded:
    """Through the servers' own loading code, with weights that are made up."""
    common: dict[str, Any] = {
        "model": str(setup.target),
        "draft": str(setup.draft),
        "device": setup.device,
        "slots": setup.slots,
        "page_size": PAGE_SIZE,
        "random_weights": True,
        "warmup": False,
    }
    on_gpu = setup.device != "cpu"
    if not on_gpu:  # only the logic is tried there
        common |= {"dtype": "float32", "threads": 1}
    target_share = setup.target_share if on_gpu else None
    startup: dict[str, Any] = {}
    with _start("target", startup, on_gpu):
        target = load_target(
            TargetSettings(**common, max_model_len=setup.max_model_len, memory_share=target_share)
        )
    # Pages for what the target can hold: the head's default is its target's whole window.
    pages = setup.slots * -(-(setup.max_model_len + MAX_NODES) // PAGE_SIZE)
    with _start("draft", startup, on_gpu), _beside(setup.draft_share if on_gpu else None):
        draft = load_draft(DraftSettings(**common, pages=pages))
    return Loaded(target, draft, startup)


@contextmanager
def _start(name: str, startup: dict[str, Any], on_gpu: bool) -> Iterator[None]:
    """Measures the start of one server: `Graphs.capture` is all that is recorded."""
    capture, spent = Graphs.capture, list[float]()

    def timed(graphs: Graphs, work: Work) -> Work:
        began = time.perf_counter()
        try:
            return capture(graphs, work)
        finally:
            spent.append(time.perf_counter() - began)

    began, before = time.perf_counter(), _memory() if on_gpu else {}
    with mock.patch.object(Graphs, "capture", timed):
        yield
    whole = time.perf_counter() - began
    startup[name] = {
        "seconds": round(whole, 2),
        "load_and_warm_up_s": round(whole - sum(spent), 2),
        "record_s": round(sum(spent), 2),
        "graphs": len(spent),
        **{
            key: round(held - before[key], 3) for key, held in (_memory() if on_gpu else {}).items()
        },
    }
    print(f"{name} started: {startup[name]}", flush=True)


def _memory() -> dict[str, float]:
    """GiB that torch holds, and that the whole GPU has given away."""
    free, total = torch.cuda.mem_get_info()
    return {
        "torch_gib": torch.cuda.memory_reserved() / 2**30,
        "device_gib": (total - free) / 2**30,
    }


@contextmanager
def _beside(share: float | None) -> Iterator[None]:
    """Lets a server load into `share` of the GPU beside what this process holds there already.

    A server takes its share to be all that its process may hold, and checks that it is free.
    """
    if share is None:
        yield
        return
    find = accelerator.find_place

    def find_beside(device: str, dtype: str, _: float | None) -> Place:
        place = find(device, dtype)
        return replace(place, share=accelerator.used(place) / place.total + share)

    with mock.patch.object(accelerator, "find_place", find_beside):
        yield


class PieceClock:
    """GPU time of a step's recorded pieces, by events on the stream around each of them.

    A piece's time has the gap in which the GPU waits for its launch where nothing is queued.
    """

    def __init__(self, step: Any) -> None:
        """`step`: a DeviceStep or a DraftStep, whose `_work` has the pieces by key."""
        self._work: dict[tuple[object, ...], Work] = step._work
        self._seen: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Pieces that run inside are measured."""
        plain = dict(self._work)
        self._work.update({key: partial(self._run, str(key[0]), plain[key]) for key in plain})
        try:
            yield
        finally:
            self._work.update(plain)

    def _run(self, name: str, piece: Work) -> None:
        begin, end = _event(), _event()
        begin.record()
        piece()
        end.record()
        self._seen.append((name, begin, end))

    def read(self) -> dict[str, float]:
        """ms by piece since the last `read`; `busy`, their sum; `span`, from first to last."""
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        seen[-1][2].synchronize()
        times: dict[str, float] = {}
        for name, begin, end in seen:
            times[name] = times.get(name, 0.0) + begin.elapsed_time(end)
        times["busy"] = sum(times.values())
        times["span"] = seen[0][1].elapsed_time(seen[-1][2])
        return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Row:
    """One slot: its tokens as far as any context goes, and where it stands."""

    ids: list[int]
    pages: range
    start: int = 0
    anchor: int = 0


class Rig:
    """The slots of both runners, filled with random prompts of `length` tokens."""

    def __init__(self, loaded: Loaded, length: int, seed: int = 0) -> None:
        self.target, self.draft = loaded.target, loaded.draft
        self.context = loaded.draft.open_context()
        self.length = length
        self._random = random.Random(seed)
        spec = loaded.target.spec
        held = min(spec.pages // spec.slots, -(-spec.max_positions // spec.page_size))
        if held * spec.page_size < length + GROWTH + spec.max_nodes:
            raise ValueError(f"{held} pages of a slot are too few for a context of {length}")
        self.rows = [
            Row(self.tokens(length), range(slot * held, (slot + 1) * held))
            for slot in range(spec.slots)
        ]
        self._feature_row = memoryview(b"")
        target_step = getattr(self.target, "_step", None)
        draft_step = getattr(self.draft, "step", None)
        self.target_clock = PieceClock(target_step) if self.on_gpu and target_step else None
        self.draft_clock = PieceClock(draft_step) if self.on_gpu and draft_step else None

    @property
    def on_gpu(self) -> bool:
        step = getattr(self.target, "_step", None)
        return step is not None and step.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def tokens(self, count: int) -> list[int]:
        """Different ones as far as the vocabulary goes, so that no two siblings are equal."""
        vocab = self.target.spec.vocab_size
        found: list[int] = []
        while len(found) < count:
            found += self._random.sample(range(vocab), min(vocab, count - len(found)))
        return found

    def fill(self, tree: TreeSpec) -> None:
        """Prefills every slot in chunks, and gives the draft the features."""
        self.draft_as(tree)
        most = self.target.spec.max_prefill_rows
        for slot, row in enumerate(self.rows):
            self._admit(slot, self.length)
            for first in range(0, self.length, most):
                count = min(most, self.length - first)
                last = first + count == self.length
                self.target.prefill([PrefillEntry(slot, first, count, last, row.pages)])
                raw = memoryview(self.target.features([FeatureSpan(slot, first, count)])).cast("B")
                self.context.write([ContextRows(slot, first, count, raw)])
        size = self.draft.spec.row_bytes
        self._feature_row = memoryview(bytes(raw[:size]))

    def _admit(self, slot: int, length: int) -> None:
        limit = self.target.spec.max_model_len
        request = SlotAdmit(
            self.rows[slot].ids[:length], (), limit, 0, frozenset(), SamplingParams(), None, True
        )
        self.target.admit(slot, request)

    def empty(self) -> None:
        """Frees every slot, and the draft's context."""
        self.context.close()
        for slot in range(len(self.rows)):
            self.target.release(slot)

    def refill(self, tree: TreeSpec) -> None:
        """Fills what `empty` freed."""
        self.context = self.draft.open_context()
        self.fill(tree)

    def readmit(self, slot: int, length: int) -> None:
        """Gives the slot to a new request for the first `length` tokens; its pages keep theirs."""
        self.target.release(slot)
        self._admit(slot, length)

    def rewind(self, slots: int, length: int) -> None:
        """Puts the first slots back to a context of `length` tokens: the last is prefilled anew."""
        for slot in range(slots):
            self.readmit(slot, length)
        entries = [
            PrefillEntry(slot, length - 1, 1, True, self.rows[slot].pages) for slot in range(slots)
        ]
        for row, result in zip(self.rows, self.target.prefill(entries), strict=False):
            row.start, row.anchor = length, result.tokens[0]

    def draft_as(self, tree: TreeSpec) -> None:
        """Admits all slots to the draft anew; each gets the pages that it had."""
        self.context.close()
        self.context = self.draft.open_context()
        for slot in range(len(self.rows)):
            self.context.admit(slot, Drafting(tree))
            self.context.reserve(slot, self.length + GROWTH)

    # One step of the first slots

    def proposals(self, nodes: Sequence[int], depth: int) -> list[DecodeEntry]:
        """Random trees of so many nodes, `depth` levels at most; 1 is plain decode."""
        return [
            self.entry(slot, count, self.tree(count, depth) if count > 1 else None)
            for slot, count in enumerate(nodes)
        ]

    def tree(self, nodes: int, depth: int) -> Tree:
        """A chain of `depth` nodes, then nodes below any that are not the deepest."""
        parents, depths = [-1], [0]
        while len(parents) < nodes:
            if len(parents) < depth:
                parent = len(parents) - 1
            else:
                parent = self._random.choice([n for n, d in enumerate(depths) if d < depth - 1])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return Tree(self.tokens(nodes), parents, depths)

    def entry(self, slot: int, nodes: int, tree: Tree | None) -> DecodeEntry:
        """The decode entry of a slot where it stands."""
        row = self.rows[slot]
        if row.start > self.length + GROWTH:
            raise RuntimeError(f"slot {slot} has grown to {row.start}")
        proposed = None if tree is None else (tree.tokens, tree.parents)
        return DecodeEntry(slot, row.start, row.anchor, nodes, proposed, row.pages)

    def advance(self, results: Sequence[EntryResult]) -> None:
        """Moves the first slots on by what they committed."""
        for row, result in zip(self.rows, results, strict=False):
            if result.finish is not Finish.NONE or not result.tokens:
                raise RuntimeError(f"a slot at {row.start} ended: {result}")
            row.start += len(result.tokens)
            row.anchor = result.tokens[-1]

    def context_rows(self, slots: int) -> list[ContextRows]:
        """The last row of each slot's context, as if it had just been accepted."""
        return [
            ContextRows(slot, self.rows[slot].start - 1, 1, self._feature_row)
            for slot in range(slots)
        ]

    def draft_entries(self, slots: int, nodes: int) -> list[DraftEntry]:
        """Asks for a tree of each slot where it stands."""
        return [
            DraftEntry(slot, row.start, row.anchor, nodes)
            for slot, row in enumerate(self.rows[:slots])
        ]

    def hand_over(self, slots: int, before: Sequence[int]) -> None:
        """Features of what was committed since starts `before`, from the target to the draft."""
        spans = [
            FeatureSpan(slot, before[slot], self.rows[slot].start - before[slot])
            for slot in range(slots)
        ]
        raw, size = memoryview(self.target.features(spans)).cast("B"), self.draft.spec.row_bytes
        parts, at = [], 0
        for span in spans:
            end = at + span.count * size
            parts.append(ContextRows(span.slot, span.first, span.count, raw[at:end]))
            at = end
        self.context.write(parts)
