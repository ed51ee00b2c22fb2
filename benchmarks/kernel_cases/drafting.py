"""The draft's own kernels: candidates of block rows, and trees grown from them."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.kernel_cases.bench import (
    FP32,
    QWEN,
    Bench,
    Case,
    Errors,
    Probe,
    differences,
    unequal,
)
from benchmarks.kernel_cases.draws import logits_of
from services.draft.candidates import MOST_SHARE, NOISE_SHARE, Block, choose
from services.draft.runner import Drafting
from slipstream.kernels.candidates import CandidateScratch, candidates
from slipstream.kernels.drafting import Blocks, Specs, spec_row
from slipstream.kernels.grow import NODE_CLASSES, NODE_INTS, grow
from slipstream.tree import TreeSpec, build_tree, candidates_needed, resolve_spec

BLOCK = 16
CHECKED = 2  # blocks whose candidates the reference finds too
MASK_ID = 7
RANKS = 32
CHAIN = resolve_spec("chain", block_size=BLOCK)
TREE = resolve_spec("top2gap", 7, 64, block_size=BLOCK)
LOGPROB_LIMIT = 1e-5


def _tables(bench: Bench, drafting: Drafting, blocks: int, nodes: int) -> tuple[Blocks, Specs]:
    """Blocks of BLOCK rows one after the other, slot e for block e, all of one kind."""
    block = Block(BLOCK - 1, 0, drafting)
    ints, reals = spec_row(
        drafting.tree, looked_at=block.width, noisy=block.noisy, seed=drafting.seed,
        share=NOISE_SHARE * drafting.temperature, most_share=MOST_SHARE,
    )  # fmt: skip
    fields = [
        [e, _start(e), 9, nodes, BLOCK, e * BLOCK, e * nodes, 0] for e in range(blocks)
    ]  # fmt: skip
    real = torch.tensor([reals] * blocks, dtype=torch.float64, device=bench.device)
    counts = bench.ints([blocks, blocks * BLOCK])
    return Blocks(counts, bench.ints(fields)), Specs(bench.ints([ints] * blocks), real)


def _start(block: int) -> int:
    return 100 + 7 * block


def _candidates(bench: Bench, drafting: Drafting, ranks: int, blocks: int) -> Probe:
    blocks, vocab = bench.size(blocks), bench.model(QWEN).vocab
    rows, nodes = blocks * BLOCK, max(BLOCK, drafting.tree.budget)
    moved = 4 * blocks * (BLOCK - 1) * vocab
    logits = [logits_of(bench, rows, vocab) for _ in range(bench.sets(moved))]
    table, specs = _tables(bench, drafting, blocks, nodes)
    entries = bench.ints([row // BLOCK for row in range(rows)])
    tokens = torch.full((rows, ranks), -7, dtype=torch.int32, device=bench.device)
    logprobs, found = torch.empty(rows, ranks, device=bench.device), bench.ints([-7] * rows)
    scratch = CandidateScratch.allocate(rows, vocab, ranks, bench.device)
    calls = [
        partial(
            candidates, part, entries, table, specs, tokens, logprobs, found, scratch,
            ranks=ranks, mask_id=MASK_ID,
        )
        for part in logits
    ]  # fmt: skip

    def check() -> Errors:
        calls[0]()
        own = [row for row in range(min(blocks, CHECKED) * BLOCK) if row % BLOCK]
        dense = logits[0][own].cpu()
        dense[:, MASK_ID] = -torch.inf
        wanted = choose(
            dense,
            [Block(BLOCK - 1, _start(e), drafting) for e in range(len(own) // (BLOCK - 1))],
        )
        needed = candidates_needed(drafting.tree)
        want = torch.tensor([ids for block in wanted for ids in block.tokens])
        errors = unequal([(tokens[own, :needed], want)])
        if ranks > 1:
            values = torch.tensor([lp for block in wanted for lp in block.logprobs])
            errors |= differences(logprobs[own, :needed].cpu(), values)
        return errors

    def plain(part: Tensor) -> object:
        if ranks == 1:
            return part.argmax(-1)
        return part.log_softmax(-1).topk(min(RANKS, vocab))

    torch_calls = [partial(plain, part) for part in logits]
    limit = LOGPROB_LIMIT if ranks > 1 else 0.0
    return Probe(calls, moved, check, dtype=FP32, limit=limit, torch=torch_calls)


def _grow(bench: Bench, spec: TreeSpec, blocks: int) -> Probe:
    blocks, nodes = bench.size(blocks), spec.budget
    rows, rng = blocks * BLOCK, bench.rng
    table, specs = _tables(bench, Drafting(spec), blocks, nodes)
    sizes = bench.ints([-7] * blocks)
    out = torch.full((blocks * nodes, NODE_INTS), -7, dtype=torch.int32, device=bench.device)
    # Sorted log-probabilities as of a sure head: a likely first, the others well below.
    lists = [
        list(
            accumulate([-rng.expovariate(2.0), *(-rng.expovariate(1.0) for _ in range(RANKS - 1))])
        )
        for _ in range(rows)
    ]
    logprobs = torch.tensor(lists, device=bench.device)
    ids = [[1000 * row + i for i in rng.sample(range(1000), RANKS)] for row in range(rows)]
    tokens, found = bench.ints(ids), bench.ints([candidates_needed(spec)] * rows)
    call = partial(
        grow, tokens, logprobs, found, table, specs, sizes, out,
        most_nodes=next(size for size in NODE_CLASSES if size >= nodes), block_size=BLOCK,
    )  # fmt: skip

    def check() -> Errors:
        call()
        values, needed = logprobs.tolist(), candidates_needed(spec)
        got, listed, wrong = sizes.tolist(), out.tolist(), 0
        for e in range(blocks):
            own = slice(e * BLOCK + 1, (e + 1) * BLOCK)
            lp = [row[:needed] for row in values[own]]
            tree = build_tree(spec, lp, ids[own], 9, nodes, BLOCK - 1)
            want = list(map(list, zip(tree.tokens, tree.parents, tree.depths, strict=True)))
            wrong += listed[e * nodes : e * nodes + got[e]] != want
        return {"wrong": wrong / blocks}

    moved = blocks * (8 * candidates_needed(spec) * (BLOCK - 1) + 4 * NODE_INTS * nodes)
    return Probe([call], moved, check)


_NOISY = Drafting(TREE, temperature=1.0, seed=2**63 + 12345)
_SPECS = {
    "chain 16": (CHAIN, 1),
    "top2gap 64": (TREE, 1),
    "top2gap 128": (resolve_spec("top2gap", 7, 128, block_size=BLOCK), 1),
    "best_first 64": (resolve_spec("best_first", 7, 64, block_size=BLOCK), 1),
    "32 x top2gap 64": (TREE, 32),
}

CASES = [
    *(
        Case(
            "candidates", kind, f"{blocks * (BLOCK - 1)}",
            partial(_candidates, drafting=drafting, ranks=ranks, blocks=blocks),
        )
        for kind, drafting, ranks in (
            ("chain", Drafting(CHAIN), 1),
            ("tree", Drafting(TREE), RANKS),
            ("tree, noise", _NOISY, RANKS),
        )
        for blocks in (1, 32)
    ),
    *(
        Case("grow", "", name, partial(_grow, spec=spec, blocks=blocks))
        for name, (spec, blocks) in _SPECS.items()
    ),
]  # fmt: skip
