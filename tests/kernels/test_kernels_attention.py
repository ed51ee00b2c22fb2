"""Attention over device rows, Triton and plain, against the row-by-row reference in fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream.kernels import attention as attention_module
from slipstream.kernels.attention import TritonAttention, choose_splits
from slipstream.kernels.attention_tiles import AttentionScratch
from slipstream.layers.attention_device import DeviceAttention, TorchAttention
from slipstream.layers.attention_reference import paged_attention_reference
from slipstream.layers.device_rows import DeviceRows, Mask
from slipstream.layers.rows import RowBatch, pack_bits

WORDS = 2


class Case:
    """Ragged rows as device tensors, the same as a host batch, and a cache with holes of NaN."""

    def __init__(
        self,
        device: torch.device,
        counts: Sequence[int],
        starts: Sequence[int],
        *,
        kind: Mask = Mask.CHAIN,
        heads: int = 4,
        kv: int = 2,
        dim: int = 16,
        page_size: int = 4,
        padding: int = 3,
        entries: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.heads, self.kv, self.dim, self.page_size = heads, kv, dim, page_size
        self.kind, self.dtype = kind, dtype
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.total, number = sum(counts), len(counts)
        width = max(-(-(s + c) // page_size) for s, c in zip(starts, counts, strict=True)) + 1
        slots = rng.sample(range(number + 2), number)
        ids = torch.randperm((number + 2) * width, generator=generator).view(-1, width).int()
        positions, bits = [], []
        for start, count in zip(starts, counts, strict=True):
            parents = [rng.randrange(i) if kind == Mask.TREE and i else i - 1 for i in range(count)]
            depth, seen = [], []
            for i, parent in enumerate(parents):
                depth.append(depth[parent] + 1 if i else 0)
                seen.append((seen[parent] if i else 0) | 1 << i)
            positions += [start + d for d in depth]
            bits += [b & (1 << 64 * WORDS) - 1 for b in seen]
        self.batch = RowBatch.build(
            counts, starts, [ids[s].tolist() for s in slots], positions=positions,
            ancestors=pack_bits(bits, 64 * WORDS) if kind == Mask.TREE else None,
            bidirectional=kind == Mask.FULL,
        )  # fmt: skip
        capacity = self.total + padding
        rows = DeviceRows.allocate(capacity, entries or number + 1, ids.to(device), device, WORDS)
        rows.counts.copy_(torch.tensor([number, self.total]))
        rows.slots[:number] = torch.tensor(slots, dtype=torch.int32).to(device)
        rows.offsets.fill_(self.total)
        rows.offsets[: number + 1] = self.batch.row_offsets.to(device)
        rows.starts[:number] = torch.tensor(starts, dtype=torch.int32).to(device)
        rows.entries.fill_(-1)
        owner = torch.arange(number).repeat_interleave(torch.tensor(counts))
        rows.entries[: self.total] = owner.int().to(device)
        rows.positions[: self.total] = torch.tensor(positions, dtype=torch.int32).to(device)
        rows.bits[: self.total] = pack_bits(bits, 64 * WORDS).to(device)
        self.rows = rows
        pages = torch.full((2, ids.numel(), page_size, kv, dim), torch.nan)
        for e in range(number):
            for index in range(starts[e] + counts[e]):
                place = self.batch.pages[e][index // page_size], index % page_size
                pages[:, place[0], place[1]] = torch.randn(2, kv, dim, generator=generator)
        self.pages = pages.to(device, dtype)
        self.q = torch.randn(capacity, heads, dim, generator=generator).to(device, dtype)
        self.q[self.total :] = torch.nan

    @property
    def shape(self) -> tuple[int, int, int, int, torch.dtype]:
        return self.heads, self.kv, self.dim, self.page_size, self.dtype

    def triton(self, splits: int | None) -> TritonAttention:
        made = TritonAttention(self.rows, *self.shape, splits)
        poison(made.scratch)
        return made

    def run(self, attention: DeviceAttention, window: int | None = None) -> Tensor:
        out = torch.full_like(self.q, torch.nan).flatten(1)
        attention.plan(self.rows)
        return attention(
            self.q, self.pages[0], self.pages[1], self.rows, 0.3, window, self.kind, out
        )

    def check(self, out: Tensor, window: int | None = None) -> None:
        want = paged_attention_reference(
            self.q.cpu(), *self.pages.cpu(), self.batch, scale=0.3, window=window
        )
        loose = 2e-5 if self.dtype == torch.float32 else 4e-2
        got = out.cpu().view(out.shape[0], self.heads, self.dim)
        torch.testing.assert_close(
            got[: self.total].double(), want[: self.total], rtol=loose, atol=loose
        )
        assert not got[self.total :].any()  # nor NaN


def poison(scratch: AttentionScratch) -> None:
    scratch.tiles.fill_(-7)
    scratch.partial.fill_(torch.nan)
    scratch.lse.fill_(torch.nan)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", list(Mask))
def test_ragged_rows(kind: Mask, window: int | None, splits: int, device: torch.device) -> None:
    """One row, chains and trees of several tiles, an empty prefix, one shorter than the window."""
    case = Case(device, [1, 9, 20, 1, 4], [40, 0, 3, 0, 75], kind=kind)
    case.check(case.run(case.triton(splits), window), window)
    case.check(case.run(TorchAttention(case.rows, *case.shape), window), window)


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "page_size"),
    [(3, 3, 64, 16), (9, 3, 64, 4), (8, 2, 128, 16), (8, 1, 80, 1), (7, 1, 32, 32)],
)
def test_head_shapes_and_page_sizes(
    heads: int, kv: int, dim: int, page_size: int, device: torch.device
) -> None:
    for splits in (1, 4):
        case = Case(
            device, [1, 5], [70, 11], kind=Mask.TREE, heads=heads, kv=kv, dim=dim,
            page_size=page_size, seed=splits,
        )  # fmt: skip
        case.check(case.run(case.triton(splits), 60), 60)


@pytest.mark.parametrize("splits", [1, 2])
def test_trees_past_the_first_word(splits: int, device: torch.device) -> None:
    case = Case(device, [100, 2], [5, 9], kind=Mask.TREE, heads=2, kv=1)
    case.check(case.run(case.triton(splits)))


def test_a_chunk_longer_than_the_ancestor_sets(device: torch.device) -> None:
    case = Case(device, [150, 1], [10, 30], heads=2, kv=1, padding=0)
    case.check(case.run(case.triton(1), 40), 40)


@pytest.mark.parametrize("kind", list(Mask))
@pytest.mark.parametrize("splits", [1, 3])
def test_sixteen_bits(splits: int, kind: Mask, device: torch.device) -> None:
    """The interpreter cannot multiply bf16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    case = Case(device, [7, 1, 3], [100, 30, 0], kind=kind, dtype=dtype)
    case.check(case.run(case.triton(splits)))
    case.check(case.run(TorchAttention(case.rows, *case.shape)))


def test_tiles_cover_every_row_once(device: torch.device) -> None:
    """For as many entries as fit, and for a single one."""
    for counts, entries in (([1] * 9, 9), ([33], 1), ([16, 17, 1], 40), ([1, 40, 2, 8], 4)):
        starts = [3 * e + 1 for e in range(len(counts))]
        case = Case(device, counts, starts, padding=0, entries=entries)
        attention = case.triton(1)
        attention.plan(case.rows)
        tiles = attention.scratch.tiles.tolist()
        offsets, slots = case.rows.offsets.tolist(), case.rows.slots.tolist()
        want = [
            [count, first, offsets[e], starts[e], slots[e]]
            for e, count in enumerate(counts)
            for first in range(0, count, attention.tile)
        ]
        assert [tile[:5] for tile in tiles[: len(want)]] == want
        # Whoever goes round in any number of programs comes upon one.
        assert len(tiles) - len(want) >= attention._rounds
        assert all(tile[0] == 0 for tile in tiles[len(want) :])


def test_programs_go_round_when_tiles_are_many(device: torch.device) -> None:
    """Entries of one row each: more tiles than programs, with and without a merge."""
    counts = [1] * 9
    case = Case(device, counts, [7 * e for e in range(9)])
    for splits in (1, 2):
        attention = case.triton(splits)
        attention._rounds = 2
        case.check(case.run(attention))


def test_no_entry_gives_zeros(device: torch.device) -> None:
    """A graph may be replayed for its warm-up with nothing to do."""
    case = Case(device, [2], [3])
    case.rows.counts.zero_()
    case.rows.offsets.zero_()
    case.rows.entries.fill_(-1)
    for attention in (case.triton(1), case.triton(2), TorchAttention(case.rows, *case.shape)):
        assert not case.run(attention).any()


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (8, 1)])
def test_scratch_is_that_of_the_card(
    heads: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sized without memory is sized for the card all the same."""
    monkeypatch.setattr(
        attention_module, "_multiprocessors", lambda d: 4 if d.type == "meta" else 132
    )
    for entries, sizes in ((1, [16]), (32, [16, 64, 512]), (8, [8, 128])):
        tables = torch.zeros(entries, 4, dtype=torch.int32, device=device)
        rows = DeviceRows.allocate(sizes[-1], entries, tables, device, 1)
        made = TritonAttention.for_buckets(rows, sizes, *heads, 64, 16, torch.bfloat16)
        assert {size: made[size].splits for size in sizes} == {
            size: choose_splits(size, heads[1], 132) for size in sizes
        }


def test_buckets_share_scratch(device: torch.device) -> None:
    case = Case(device, [4, 3], [20, 9], padding=10)
    made = TritonAttention.for_buckets(case.rows, [8, 12, 17], *case.shape)
    assert len({id(attention.scratch) for attention in made.values()}) == 1
    for bucket in (17, 8, 12, 8):
        poison(made[bucket].scratch)
        rows, q = case.rows.first(bucket), case.q[:bucket]
        out = torch.full_like(q, torch.nan).flatten(1)
        made[bucket].plan(rows)
        made[bucket](q, *case.pages, rows, 0.3, None, Mask.CHAIN, out)
        case.check(out)
    with pytest.raises(ValueError, match="tiles"):
        TritonAttention(case.rows, *case.shape, 64, made[17].scratch)


def test_splits_fill_the_card() -> None:
    rows = (1, 16, 32, 64, 128, 256, 512, 2048)
    assert [choose_splits(r, 8, 132) for r in rows] == [16, 16, 16, 8, 4, 2, 1, 1]
    assert choose_splits(16, 3, 132) == 32
    assert choose_splits(16, 256, 132) == 1


def test_random_cases(device: torch.device, cases: int) -> None:
    """Few shapes, each of which compiles a kernel, and many lengths."""
    rng = random.Random(7)
    shapes = [(2, 1, 4, 1), (2, 2, 16, 2), (3, 1, 1, 5), (6, 2, 4, 3)]
    for seed in range(5 if cases < 1000 else 60):
        counts = [rng.choice([1, 1, 2, 7, 16, 40]) for _ in range(rng.randint(1, 5))]
        starts = [rng.choice([0, 1, 31, 32, 33, rng.randrange(200)]) for _ in counts]
        kind, window = rng.choice(list(Mask)), rng.choice([None, 1, 8, 64])
        heads, kv, page_size, splits = rng.choice(shapes)
        case = Case(
            device, counts, starts, kind=kind, heads=heads, kv=kv, page_size=page_size,
            padding=rng.choice([0, 1, 30]), seed=seed,
        )  # fmt: skip
        case.check(case.run(case.triton(splits), window), window)
