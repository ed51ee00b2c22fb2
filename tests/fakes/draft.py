"""A draft without a model: it checks every context row and is right as often as it is told to be.

`python -m tests.fakes.draft` serves it; `serve` does so within a test.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.draft.runner import (
    ContextRows,
    DraftCost,
    DraftEntry,
    Drafting,
    DraftSpec,
    NoPages,
)
from services.draft.server import DraftServer
from services.draft.server import serve as serve_process
from slipstream import serving
from slipstream.tree import Tree, TreeSpec, build_tree, candidates_needed
from tests.fakes.busy import busy
from tests.fakes.encoding import (
    FEATURE_DTYPE,
    FEATURE_WIDTH,
    FINGERPRINTS,
    ROW_BYTES,
    decode_rows,
    mix,
    next_token,
)

VOCAB = 1000
BANNED = 4
"""A target that may not draw a stop id yet takes the next id: so far a token may be off."""
_RANKS = tuple(math.log(0.6 * 0.4**rank) for rank in range(256))


class WrongRow(AssertionError):
    """A context row is not the one that the fake target publishes for its position."""


@dataclass(slots=True)
class FakeSlot:
    """A slot's rows by position, and what is known of where its answer begins."""

    drafting: Drafting
    tokens: list[int] = field(default_factory=list)
    pages: int = 0
    answer: int | None = None  # position of the first token known to be drawn by the target


class FakeDraftContext:
    """Keeps tokens in place of K/V and checks them.

    Every row must come once, in order and at its position; every row from the first anchor on must
    hold the token that `next_token` gives after the row before it.
    """

    def __init__(self, runner: FakeDraftRunner) -> None:
        self._runner = runner
        self._free = runner.spec.pages
        self.slots: dict[int, FakeSlot] = {}
        runner.contexts.append(self)

    @property
    def free_pages(self) -> int:
        return self._free

    def admit(self, slot: int, drafting: Drafting) -> None:
        assert slot not in self.slots, f"slot {slot} is taken"
        assert len(self.slots) < self._runner.spec.slots
        self.slots[slot] = FakeSlot(drafting)

    def reserve(self, slot: int, rows: int) -> None:
        held, spec = self.slots[slot], self._runner.spec
        more = -(-(rows + spec.block_size) // spec.page_size) - held.pages
        if more > self._free:
            raise NoPages(f"{more} pages wanted, {self._free} free")
        if more > 0:
            held.pages += more
            self._free -= more

    def write(self, rows: Sequence[ContextRows]) -> None:
        for part in rows:
            held = self.slots[part.slot]
            values = self._runner.decode(part.rows)
            assert len(values) == part.count
            if part.first_row != len(held.tokens):
                raise WrongRow(f"row {part.first_row} came, {len(held.tokens)} was due")
            for token, position in values:
                self._check(held, token, position)
                held.tokens.append(token)
            assert len(held.tokens) + self._runner.spec.block_size <= (
                held.pages * self._runner.spec.page_size
            )
            self._runner.rows_written += part.count

    def _check(self, held: FakeSlot, token: int, position: int) -> None:
        if position != len(held.tokens):
            raise WrongRow(f"a row of position {position} at row {len(held.tokens)}")
        if held.answer is not None and position >= held.answer:
            self._runner.check_token(held.tokens[-1], token, position)

    def draft(self, entries: Sequence[DraftEntry]) -> list[Tree]:
        runner, began = self._runner, time.perf_counter()
        trees = [self._draft(entry) for entry in entries]
        busy(began + runner.draft_s - time.perf_counter())
        runner.drafted += len(entries)
        return trees

    def _draft(self, entry: DraftEntry) -> Tree:
        held, spec = self.slots[entry.slot], self._runner.spec
        assert entry.nodes >= 2
        assert entry.start == len(held.tokens), "a draft without all of its context"
        if held.answer is None:
            held.answer = entry.start
        runner = self._runner
        runner.check_token(held.tokens[-1], entry.anchor, entry.start)
        tree = held.drafting.tree
        count = candidates_needed(tree)
        tokens: list[list[int]] = []
        token = entry.anchor
        for depth in range(1, spec.block_size):
            position = entry.start + depth
            before, token = token, next_token(token, position, spec.vocab_size)
            row = [(token + 1 + r) % spec.vocab_size for r in range(count)]
            rank = runner.rank(before, position, count)
            if rank is not None:
                row[rank] = token
            tokens.append(row)
        lp = [_RANKS[:count]] * len(tokens)
        return build_tree(tree, lp, tokens, entry.anchor, entry.nodes)

    def release(self, slot: int) -> None:
        self._free += self.slots.pop(slot).pages

    def close(self) -> None:
        for slot in list(self.slots):
            self.release(slot)
        assert self._free == self._runner.spec.pages
        self._runner.contexts.remove(self)


class FakeDraftRunner:
    """`DraftRunner` without a model.

    Args:
        accept: probability that the best candidate of a depth is the target's token; half of the
            other cases have it at rank 1, where there is one.
        draft_ms: how long a draft step keeps a core busy.

    Attributes:
        drafted, rows_written: trees made and context rows taken so far, over all sessions.
        contexts: the contexts that are open.
    """

    def __init__(
        self,
        *,
        vocab: int = VOCAB,
        block_size: int = 16,
        accept: float = 0.7,
        draft_ms: float = 0.0,
        slots: int = 64,
        pages: int = 4096,
        page_size: int = 16,
        causal: bool = True,
        feature_width: int = FEATURE_WIDTH,
        seed: int = 0,
    ) -> None:
        self.spec = DraftSpec(
            model="fake",
            block_size=block_size,
            mask_token_id=vocab - 1,
            causal=causal,
            vocab_size=vocab,
            feature_width=feature_width,
            feature_dtype=FEATURE_DTYPE,
            slots=slots,
            pages=pages,
            page_size=page_size,
            fingerprints=FINGERPRINTS,
        )
        self.accept = accept
        self.draft_s = draft_ms / 1e3
        self._seed = seed
        self.drafted = 0
        self.rows_written = 0
        self.devices = None
        self.contexts: list[FakeDraftContext] = []

    def open_context(self) -> FakeDraftContext:
        return FakeDraftContext(self)

    def warm_up(self, tree: TreeSpec) -> list[DraftCost]:
        """Costs as if measured: every shape takes the configured time."""
        ns = int(self.draft_s * 1e9)
        rows = self.spec.block_size
        return [DraftCost(slots, slots * rows, ns) for slots in (1, self.spec.slots)]

    def decode(self, rows: memoryview) -> list[tuple[int, int]]:
        """(token, position) of every row; rows wider than FEATURE_WIDTH end in zeros."""
        size = self.spec.row_bytes
        if size == ROW_BYTES:
            return decode_rows(rows)
        cuts = range(0, len(rows), size)
        return decode_rows(b"".join(rows[i : i + ROW_BYTES] for i in cuts))

    def check_token(self, before: int, token: int, position: int) -> None:
        """Raises WrongRow unless the fake target draws `token` at `position` after `before`."""
        vocab = self.spec.vocab_size
        due = next_token(before, position, vocab)
        if (token - due) % vocab > BANNED:
            raise WrongRow(f"token {token} at {position}, {due} was due")

    def rank(self, before: int, position: int, count: int) -> int | None:
        """Where the right token stands among `count` candidates; None: it is not among them."""
        chance = mix(self._seed, before, position, 0xD12AF7) / 2**64
        if chance < self.accept:
            return 0
        return 1 if count > 1 and chance < (1 + self.accept) / 2 else None


@asynccontextmanager
async def serve(runner: FakeDraftRunner | None = None, **server: Any) -> AsyncIterator[DraftServer]:
    """A draft server of `runner` on 127.0.0.1, warm; `server` goes to DraftServer."""
    made = runner or FakeDraftRunner()
    draft = DraftServer(lambda: made, **server)
    await draft.start("127.0.0.1", 0)
    try:
        await draft.load()
        yield draft
    finally:
        await draft.stop(grace_s=1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    for name, default in (
        ("port", 0),
        ("vocab", VOCAB),
        ("block-size", 16),
        ("slots", 64),
        ("pages", 4096),
        ("page-size", 16),
        ("feature-width", FEATURE_WIDTH),
        ("max-sessions", 1),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--accept", type=float, default=0.7)
    parser.add_argument("--draft-ms", type=float, default=0.0)
    given = vars(parser.parse_args())
    host, port, sessions = (given.pop(name) for name in ("host", "port", "max_sessions"))
    return serving.run(
        serve_process(lambda: FakeDraftRunner(**given), host, port, max_sessions=sessions)
    )


if __name__ == "__main__":
    raise SystemExit(main())
