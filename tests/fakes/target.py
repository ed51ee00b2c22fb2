"""A target without a model: deterministic tokens, real engine, real gRPC.

`FakeTargetRunner` draws `next_token(previous, position)`, keeps a token per KV position in the
pages that the engine gave it and reads them back, so that wrong pages, lengths or paths fail at
once. `serve_fake` runs a whole server in the test's process; `python -m tests.fakes.target` runs
one as a process of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from services.target.runner import (
    CostPoint,
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    Finish,
    Logprob,
    PrefillEntry,
    SlotAdmit,
    TargetSpec,
)
from services.target.server import TargetServer, serve
from services.target.servicer import LEASE_S
from slipstream import serving
from slipstream.tree import Tree, cut, walk
from tests.fakes.busy import busy
from tests.fakes.encoding import (
    FEATURE_DTYPE,
    FEATURE_WIDTH,
    FINGERPRINTS,
    ROW_BYTES,
    encode_rows,
    next_token,
)


def drawn_token(previous: int, position: int, vocab: int, banned: Collection[int] = ()) -> int:
    """What the fake target draws at `position`; the next id that is not banned."""
    token = next_token(previous, position, vocab)
    while token in banned:
        token = (token + 1) % vocab
    return token


def expected_output(
    prompt: Sequence[int],
    limit: int,
    vocab: int,
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """Every output token of a request, whatever the batch, the trees or the chunks."""
    tokens = list(prompt)
    while len(tokens) < limit:
        early = len(tokens) - len(prompt) < min_tokens
        tokens.append(drawn_token(tokens[-1], len(tokens), vocab, stop_ids if early else ()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Slot:
    admit: SlotAdmit
    tokens: list[int]  # committed
    rows: int = 0
    table: list[int] | None = None


class FakeTargetRunner:
    """Checks what the engine says of every slot against its own books, in pages of its own.

    Attributes:
        calls: (kind, slots, rows) of every step.
        busy_s: time spent in steps.
        fail_next: raise in the next step.
        dead_end: output tokens after which a grammar allows no more; None: it always does.
    """

    def __init__(
        self,
        *,
        vocab: int = 1000,
        slots: int = 8,
        pages: int = 256,
        page_size: int = 16,
        max_model_len: int = 512,
        max_prefill_rows: int = 256,
        step_ms: float = 0.0,
        row_us: float = 0.0,
        prefill_ms: float | None = None,
        feature_width: int = FEATURE_WIDTH,
        eos_ids: tuple[int, ...] = (),
        paranoid: bool = True,
        grammars: bool = False,
    ) -> None:
        """`step_ms` is a decode step's time, `row_us` what each of its rows adds, `prefill_ms` a
        prefill step's (default: `step_ms`); `feature_width` pads the rows with zeros; `paranoid`
        reads a slot's whole prefix back in every step; `grammars` takes grammars and ignores them.
        """
        costs = [
            CostPoint(n, n * rows, int(1e6 * step_ms + 1e3 * row_us * n * rows))
            for n in (1, 2, 4, 8, 16, 32, 64)
            for rows in (1, 4, 8, 16, 32, 64)
            if n <= slots
        ]
        self.spec = TargetSpec(
            model="fake",
            vocab_size=vocab,
            max_model_len=max_model_len,
            slots=slots,
            pages=pages,
            page_size=page_size,
            max_nodes=256,
            max_prefill_rows=max_prefill_rows,
            feature_width=feature_width,
            feature_dtype=FEATURE_DTYPE,
            fingerprints=dict(FINGERPRINTS) if feature_width else {},
            eos_ids=eos_ids,
            decode_costs=tuple(costs),
            grammars=grammars,
        )
        self._step_s = step_ms / 1e3
        self._row_s = row_us / 1e6
        self._prefill_s = (step_ms if prefill_ms is None else prefill_ms) / 1e3
        self._paranoid = paranoid
        self._padding = bytes(max(0, 4 * feature_width - ROW_BYTES))
        self._kv = [-1] * (pages * page_size)
        self._slots: dict[int, _Slot] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.busy_s = 0.0
        self.fail_next = False
        self.dead_end: int | None = None

    def admit(self, slot: int, admit: SlotAdmit) -> None:
        assert slot not in self._slots, f"slot {slot} admitted twice"
        self._slots[slot] = _Slot(admit, [*admit.prompt_ids, *admit.output_ids])

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def prefill(self, entries: Sequence[PrefillEntry]) -> list[EntryResult]:
        began = self._begin("prefill", len(entries), sum(e.count for e in entries))
        results = []
        for entry in entries:
            slot = self._slots[entry.slot]
            assert entry.first == slot.rows, f"slot {entry.slot}: {entry.first} != {slot.rows}"
            end = entry.first + entry.count
            slot.table = list(entry.pages)
            for position in range(entry.first, end):
                self._write(slot, position, slot.tokens[position])
            slot.rows = end
            self._verify(slot)
            scores = self._scores(slot, entry.first, end)
            over = entry.last and slot.admit.only_scored
            if not entry.last or over:
                finish = Finish.LIMIT if over else Finish.NONE
                results.append(EntryResult(finish=finish, prompt_logprobs=scores))
                continue
            assert end == len(slot.tokens), f"slot {entry.slot}: last chunk ends at {end}"
            token = self._draw(slot, slot.tokens[-1], end)
            done = cut(
                Tree([slot.tokens[-1]], [-1], [0]), [0], [token],
                stop_ids=slot.admit.stop_ids, room=slot.admit.limit - end, min_left=0,
            )  # fmt: skip
            slot.tokens += done.tokens
            result = self._result(slot, done.tokens, Finish(done.finish))
            results.append(replace(result, prompt_logprobs=scores))
        self._end(began, self._prefill_s)
        return results

    def decode(self, entries: Sequence[DecodeEntry]) -> list[EntryResult]:
        rows = sum(e.rows for e in entries)
        began = self._begin("decode", len(entries), rows)
        results = [self._decode(self._slots[e.slot], e) for e in entries]
        self._end(began, self._step_s + rows * self._row_s)
        return results

    def _decode(self, slot: _Slot, entry: DecodeEntry) -> EntryResult:
        assert entry.start == slot.rows == len(slot.tokens) - 1
        assert entry.anchor == slot.tokens[-1]
        slot.table = list(entry.pages)
        given = len(slot.tokens) - len(slot.admit.prompt_ids)
        if slot.admit.grammar is not None and self.dead_end is not None and given >= self.dead_end:
            return EntryResult(finish=Finish.ERROR)
        tree = entry.tree(self.spec.vocab_size)
        tree.validate()
        assert tree.tokens[0] == entry.anchor
        self._verify(slot)
        start = entry.start
        for node, token in enumerate(tree.tokens):
            self._write(slot, start + node, token)
        drawn = [
            self._draw(slot, token, start + depth + 1)
            for token, depth in zip(tree.tokens, tree.depths, strict=True)
        ]
        path = walk(tree, drawn)[: self.spec.most_commits]
        room = slot.admit.limit - len(slot.tokens)
        done = cut(
            tree, path, drawn, stop_ids=slot.admit.stop_ids, room=room, min_left=0
        )  # a banned stop id is never drawn
        kept = [self._read(slot, start + node) for node in done.path]
        for i, token in enumerate(kept):
            self._write(slot, start + i, token)
        slot.tokens += done.tokens
        slot.rows += len(done.tokens)
        self._verify(slot)
        return self._result(slot, done.tokens, Finish(done.finish), len(tree), len(path) - 1)

    def _result(
        self, slot: _Slot, tokens: list[int], finish: Finish, nodes: int = 0, accepted: int = 0
    ) -> EntryResult:
        logprobs = _logprobs(tokens, slot.admit.logprobs)
        return EntryResult(tokens, finish, logprobs, nodes, accepted)

    def _scores(self, slot: _Slot, first: int, end: int) -> list[Logprob]:
        return _logprobs(slot.admit.prompt_ids[first + 1 : end + 1], slot.admit.prompt_logprobs)

    def _draw(self, slot: _Slot, previous: int, position: int) -> int:
        early = position - len(slot.admit.prompt_ids) < slot.admit.min_tokens
        banned = slot.admit.sampling.banned_ids | (slot.admit.stop_ids if early else frozenset())
        return drawn_token(previous, position, self.spec.vocab_size, banned)

    def features(self, spans: Sequence[FeatureSpan]) -> bytes:
        out = []
        for span in spans:
            slot = self._slots[span.slot]
            assert span.first + span.count <= slot.rows, f"{span} beyond {slot.rows} rows"
            tokens = [self._read(slot, span.first + i) for i in range(span.count)]
            rows = encode_rows(span.first, tokens)
            if self._padding:
                cuts = range(0, len(rows), ROW_BYTES)
                rows = b"".join(rows[i : i + ROW_BYTES] + self._padding for i in cuts)
            out.append(rows)
        return b"".join(out)

    def lengths(self, slot: int) -> tuple[int, int]:
        return self._slots[slot].rows, self._slots[slot].rows

    def _begin(self, kind: str, slots: int, rows: int) -> float:
        if self.fail_next:
            raise RuntimeError("the fake target was told to fail")
        self.calls.append((kind, slots, rows))
        return time.perf_counter()

    def _end(self, began: float, seconds: float) -> None:
        busy(began + seconds - time.perf_counter())
        self.busy_s += time.perf_counter() - began

    def _index(self, slot: _Slot, position: int) -> int:
        assert slot.table is not None
        size = self.spec.page_size
        return slot.table[position // size] * size + position % size

    def _write(self, slot: _Slot, position: int, token: int) -> None:
        self._kv[self._index(slot, position)] = token

    def _read(self, slot: _Slot, position: int) -> int:
        return self._kv[self._index(slot, position)]

    def _verify(self, slot: _Slot) -> None:
        if self._paranoid:
            held = [self._read(slot, i) for i in range(slot.rows)]
            assert held == slot.tokens[: slot.rows], "a page was written by somebody else"


def _logprobs(tokens: Sequence[int], wanted: int | None) -> list[Logprob]:
    """The log-probability of a token is minus its id; the best one is itself."""
    if wanted is None:
        return []
    return [Logprob(-float(t), [(t, -float(t))] * min(wanted, 1)) for t in tokens]


@asynccontextmanager
async def serve_fake(
    runner: FakeTargetRunner | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    lease_s: float = LEASE_S,
    watchdog_ms: int | None = None,
) -> AsyncIterator[TargetServer]:
    """A ready target server on the running loop; its address is `host:server.port`."""
    fake = runner or FakeTargetRunner()
    server = TargetServer(lambda: fake, watchdog_ms=watchdog_ms, lease_s=lease_s)
    await server.start(host, port)
    try:
        await server.wait_loaded()
        yield server
    finally:
        await server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    for name, default in (
        ("port", 0),
        ("vocab", 1000),
        ("slots", 8),
        ("pages", 4096),
        ("page-size", 16),
        ("max-model-len", 8192),
        ("max-prefill-rows", 512),
        ("feature-width", FEATURE_WIDTH),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--watchdog-ms", type=int)
    parser.add_argument("--eos-id", type=int, action="append", default=[])
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--row-us", type=float, default=0.0)
    parser.add_argument("--prefill-ms", type=float)
    parser.add_argument("--drain-s", type=float, default=5.0)
    args = parser.parse_args()
    runner = FakeTargetRunner(
        vocab=args.vocab,
        slots=args.slots,
        pages=args.pages,
        page_size=args.page_size,
        max_model_len=args.max_model_len,
        max_prefill_rows=args.max_prefill_rows,
        step_ms=args.step_ms,
        row_us=args.row_us,
        prefill_ms=args.prefill_ms,
        feature_width=args.feature_width,
        eos_ids=tuple(args.eos_id),
        paranoid=False,
    )
    return serving.run(
        serve(
            lambda: runner,
            args.host,
            args.port,
            watchdog_ms=args.watchdog_ms,
            drain_s=args.drain_s,
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
