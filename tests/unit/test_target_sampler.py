"""Drawing and walking a step's logits, and the cache that the walk commits to."""

from __future__ import annotations

import random

import pytest
import torch

from services.target.kv_cache import KVCache, flat_slots
from services.target.runner import Finish, SlotAdmit
from services.target.sampler import Sampler, Verify, logprobs, verify
from slipstream.params import SamplingParams
from slipstream.sampling import draw, tree_rows
from slipstream.tree import Tree, cut, walk

VOCAB = 97
PARAMS = {
    "greedy": SamplingParams(),
    "biased": SamplingParams(logit_bias={3: 5.0, 4: -5.0}),
    "penalised": SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3
    ),
    "hot": SamplingParams(temperature=1.0, seed=11),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=12),
    "all": SamplingParams(
        temperature=1.2, min_p=0.02, frequency_penalty=1.0, seed=13, choice=2, logit_bias={5: 2.0}
    ),
}


def random_tree(rng: random.Random, nodes: int, likely: list[list[int]]) -> Tree:
    """A tree whose tokens are often among the likely ones of the parent's row."""
    tree = Tree([rng.randrange(VOCAB)], [-1], [0])
    taken = set()
    while len(tree) < nodes:
        node = len(tree)
        parent = rng.randrange(max(0, node - 3), node)
        token = rng.choice([likely[parent][0], *likely[parent], rng.randrange(VOCAB)])
        if (parent, token) not in taken:
            taken.add((parent, token))
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.depths.append(tree.depths[parent] + 1)
    return tree


def admit(
    params: SamplingParams, prompt: list[int], output: list[int], **more: object
) -> SlotAdmit:
    fields = {"limit": 100, "min_tokens": 0, "stop_ids": frozenset(), "logprobs": None} | more
    return SlotAdmit(prompt, output, sampling=params, publish=True, **fields)  # type: ignore[arg-type]


def test_mixed_steps_equal_the_reference() -> None:
    assert sum(mixed_step(seed) for seed in range(8)) > 20, "too few drafts were accepted"


def mixed_step(seed: int) -> int:
    """One step of every kind of request; returns how many drafts were accepted."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests: list[Verify] = []
    rows: list[torch.Tensor] = []
    for params in PARAMS.values():
        nodes = rng.randint(1, 12)
        part = torch.randn(nodes, VOCAB) * 5
        tree = random_tree(rng, nodes, part.topk(3).indices.tolist())
        prompt = [rng.randrange(VOCAB) for _ in range(5)]
        output = [rng.randrange(VOCAB) for _ in range(3)]
        likely = frozenset(part[0].topk(2).indices.tolist())
        request = admit(
            params, prompt, output, limit=8 + rng.randint(1, 6), min_tokens=rng.choice([0, 4, 6]),
            stop_ids=likely, logprobs=3,
        )  # fmt: skip
        requests.append(Verify(Sampler.of(request), tree, 7, len(rows)))
        rows += list(part[: len(tree)])
    logits = torch.stack(rows)
    accepted = 0
    for request, got in zip(requests, verify(logits, requests), strict=True):
        s = request.sampler
        samplings = tree_rows(
            request.tree, 7, s.params, s.history, banned=s.stop_ids, banned_until=s.min_until
        )
        drawn = [draw(logits[request.first + i], row) for i, row in enumerate(samplings)]
        path = walk(request.tree, drawn)
        want = cut(
            request.tree, path, drawn, stop_ids=s.stop_ids, room=s.limit - 8,
            min_left=max(0, s.min_until - 8),
        )  # fmt: skip
        assert (got.path, got.tokens, got.finish) == (want.path, want.tokens, want.finish)
        assert got.accepted == len(path) - 1
        accepted += got.accepted
        lp = logprobs(logits, request, got)
        exact = torch.log_softmax(logits.double(), -1)
        assert len(lp) == len(got.tokens)
        for node, token, row in zip(got.path, got.tokens, lp, strict=True):
            assert row.logprob == pytest.approx(float(exact[request.first + node, token]), abs=1e-5)
            best = exact[request.first + node].topk(3)
            assert [t for t, _ in row.top] == best.indices.tolist()
    return accepted


def test_penalties_count_committed_tokens_once() -> None:
    sampler = Sampler.of(admit(PARAMS["penalised"], [1, 2], [3]))
    assert sampler.history is not None
    assert dict(sampler.history.output) == {3: 1}
    sampler.commit([3, 4])
    assert dict(sampler.history.output) == {3: 2, 4: 1}
    plain = Sampler.of(admit(PARAMS["greedy"], [1, 2], [3]))
    plain.commit([3])
    assert plain.history is None


def test_plain_is_only_what_an_argmax_decides() -> None:
    plain = {name: Sampler.of(admit(p, [1, 2], [])).plain(2) for name, p in PARAMS.items()}
    assert [name for name, is_plain in plain.items() if is_plain] == ["greedy"]
    early = Sampler.of(admit(PARAMS["greedy"], [1, 2], [], min_tokens=3))
    assert not early.plain(4) and early.plain(5)


def test_a_walk_without_room_for_its_path_is_cut() -> None:
    logits = torch.full((3, VOCAB), -1.0)
    for row, token in enumerate((5, 6, 7)):
        logits[row, token] = 1.0
    tree = Tree([4, 5, 6], [-1, 0, 1], [0, 1, 2])
    for limit, tokens, finish in (
        (10, [5, 6], Finish.LIMIT),
        (11, [5, 6, 7], Finish.LIMIT),
        (12, [5, 6, 7], Finish.NONE),
    ):
        request = admit(PARAMS["greedy"], [1] * 8, [], limit=limit)
        (got,) = verify(logits, [Verify(Sampler.of(request), tree, 7, 0)])
        assert (got.tokens, got.finish, got.accepted) == (tokens, finish, 2)


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(
        layers=2, kv_heads=2, head_dim=4, pages=6, page_size=4, dtype=torch.float32,
        feature_width=3, feature_dtype=dtype,
    )  # fmt: skip


def test_a_move_may_overwrite_what_it_reads() -> None:
    kv = cache()
    k, v = kv.layer(1)
    k.view(24, -1)[:] = torch.arange(24.0)[:, None]
    v.view(24, -1)[:] = -torch.arange(24.0)[:, None]
    pages = [3, 0]
    source = flat_slots(pages, [2, 4, 5], 4)
    assert source == [14, 0, 1]
    kv.move(source, flat_slots(pages, [1, 2, 4], 4))
    assert k.view(24, -1)[[13, 14, 0], 0].tolist() == [14.0, 0.0, 1.0]
    assert v.view(24, -1)[[13, 14, 0], 0].tolist() == [-14.0, 0.0, -1.0]
    kv.move([], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_read_back_as_raw_bytes(dtype: torch.dtype) -> None:
    kv = cache(dtype)
    rows = torch.randn(3, 3).to(dtype)
    kv.write_features(rows, [23, 4, 9])
    raw = bytes(kv.read_features([9, 23]))
    back = torch.frombuffer(bytearray(raw), dtype=dtype).view(2, 3)
    assert torch.equal(back, rows[[2, 0]])
    size = KVCache.page_bytes(2, 2, 4, 4, torch.float32, 3, dtype)
    assert size == 4 * (2 * 2 * 2 * 4 * 4 + 3 * dtype.itemsize)
