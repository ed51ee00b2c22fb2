"""What the cases of `benchmarks.kernels` are made of."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Call, Clock
from slipstream.kernels.intake import TreeRows
from slipstream.layers.device_rows import DeviceRows
from slipstream.tree import Tree, ancestor_bits, split_words

PAGE = 16
DEEPEST = 15  # nodes of a tree below its root, as a head of block size 16 makes them
MOST_SETS = 24
BF16, FP32 = torch.bfloat16, torch.float32

Errors = dict[str, float]
"""`relative`: ||out - reference|| / ||reference||; `largest`: the largest difference / the largest
value; `wrong`: the share of numbers that are not equal."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shapes of a model."""

    name: str
    hidden: int
    heads: int
    kv: int
    dim: int
    inner: int
    vocab: int


QWEN = Model("Qwen3-8B", 4096, 32, 8, 128, 12288, 151_936)
SMOL = Model("SmolLM2", 576, 9, 3, 64, 1536, 49_152)
_TINY = {
    QWEN.name: Model(QWEN.name, 64, 4, 2, 16, 96, 500),
    SMOL.name: Model(SMOL.name, 48, 3, 1, 16, 80, 300),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One kernel on made inputs.

    Attributes:
        calls: the same work on inputs of their own.
        bytes, flops: that a call must move and compute.
        check: runs the first call and compares what it gave with the reference.
        limit: of the errors `relative` and `wrong`.
        torch: the same by torch, to be timed.
        graph: whether `calls` can be recorded.
        details: asked for more once the seconds of a call are known.
    """

    calls: Sequence[Call]
    bytes: float
    check: Callable[[], Errors]
    flops: float = 0.0
    dtype: torch.dtype = BF16
    limit: float = 0.0
    torch: Sequence[Call] | None = None
    graph: bool = True
    torch_graph: bool = True
    details: Callable[[Clock, float], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A probe by name; those of one name and kind differ in size."""

    name: str
    kind: str
    variant: str
    make: Callable[[Bench], Probe]


@dataclass(slots=True)
class Bench:
    """Makes inputs: fresh, random, and in as many sets as outgrow the L2 cache.

    Attributes:
        tiny: shapes for an interpreter.
        single: one set only, for a run that compiles.
    """

    device: torch.device
    tiny: bool = False
    single: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def size(self, number: int) -> int:
        """A number of rows, entries or keys; when tiny, its bits."""
        return number.bit_length() if self.tiny else number

    def model(self, model: Model) -> Model:
        return _TINY[model.name] if self.tiny else model

    def randn(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype).mul_(scale)

    def ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype)

    def sets(self, bytes_each: float) -> int:
        """How many sets of inputs of so many bytes are gone through in turn.

        Twice the L2 cache, but MOST_SETS at most: small activations are in the cache in a forward
        pass too.
        """
        if self.single:
            return 1
        if self.device.type == "cpu":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, min(MOST_SETS, math.ceil(2 * cache / bytes_each)))


def differences(out: Tensor, reference: Tensor) -> Errors:
    """How far `out` is from `reference`, of the same shape; NaN anywhere gives NaN."""
    got, want = out.double(), reference.double()
    apart = got - want
    return {
        "relative": float(apart.norm() / want.norm()),
        "largest": float(apart.abs().max() / want.abs().max()),
    }


def worst(*errors: Errors) -> Errors:
    """The largest of each kind."""
    names = {name for error in errors for name in error}
    return {name: max(error.get(name, 0.0) for error in errors) for name in sorted(names)}


def unequal(pairs: Sequence[tuple[Tensor, Tensor]]) -> Errors:
    """The share of unequal numbers in pairs of tensors."""
    wrong = sum(int((got != want.to(got.device)).sum()) for got, want in pairs)
    return {"wrong": wrong / sum(got.numel() for got, _ in pairs)}


def relative_limit(dtype: torch.dtype) -> float:
    """What rounding alone can do, with room; the interpreter cuts bf16 off in place of rounding."""
    if dtype == FP32:
        return 1e-5
    return 1e-2 if torch.cuda.is_available() else 2e-2


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of trees after prefixes of one length, as the host would lay them out."""

    rows: DeviceRows
    trees: TreeRows
    shapes: list[Tree]
    context: int

    @property
    def places(self) -> Tensor:
        """(R,) each row's place in the cache seen as (pages * PAGE) rows."""
        rows = self.rows
        entry = rows.entries.long()
        index = rows.starts[entry] + torch.arange(rows.capacity, device=entry.device)
        index = index - rows.offsets[entry]
        return rows.tables[rows.slots[entry].long(), index // PAGE].long() * PAGE + index % PAGE

    @property
    def pages(self) -> int:
        return self.rows.tables.numel()


def ragged(
    bench: Bench, entries: int, count: int, context: int, vocab: int, *, tree: bool
) -> Ragged:
    """`entries` entries of `count` rows, chains or trees, after `context` keys; pages shuffled."""
    shapes = [random_tree(bench.rng, count, vocab, chain=not tree) for _ in range(entries)]
    each = -(-(context + count) // PAGE)
    tables = torch.randperm(entries * each, device=bench.device).int().view(entries, each)
    words, total = -(-count // 64), entries * count
    rows = DeviceRows.allocate(total, entries, tables, bench.device, words)
    trees = TreeRows.allocate(total, entries, bench.device)
    depths = [d for shape in shapes for d in shape.depths]
    sets = [bits for shape in shapes for bits in split_words(ancestor_bits(shape.parents), words)]
    rows.counts.copy_(bench.ints([entries, total]))
    rows.slots.copy_(bench.ints(range(entries)))
    rows.offsets.copy_(bench.ints(range(0, total + 1, count)))
    rows.starts.fill_(context)
    rows.entries.copy_(bench.ints([entry for entry in range(entries) for _ in range(count)]))
    rows.positions.copy_(bench.ints(depths) + context)
    rows.bits.copy_(torch.tensor(sets))
    trees.ids.copy_(bench.ints([t for shape in shapes for t in shape.tokens]))
    trees.parents.copy_(bench.ints([p for shape in shapes for p in shape.parents]))
    trees.depths.copy_(bench.ints(depths))
    trees.used.fill_(count)
    return Ragged(rows, trees, shapes, context)


def random_tree(rng: random.Random, nodes: int, vocab: int, *, chain: bool) -> Tree:
    """A spine, then nodes below any that is not too deep; siblings differ."""
    tree, spine = Tree([rng.randrange(vocab)], [-1], [0]), min(DEEPEST, nodes // 2)
    taken: set[tuple[int, int]] = set()
    while len(tree) < nodes:
        parent = len(tree) - 1
        if not chain and parent >= spine:
            parent = rng.choice([n for n, depth in enumerate(tree.depths) if depth < spine])
        token = rng.randrange(vocab)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.depths.append(tree.depths[parent] + 1)
    return tree
