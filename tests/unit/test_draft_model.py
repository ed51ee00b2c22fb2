"""The draft's model runner against a plain recomputation of the head from its tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.draft import model_runner
from services.draft.context_cache import ContextCache
from services.draft.loading import load_runner
from services.draft.model_runner import ModelContext, ModelRunner
from services.draft.runner import ContextRows, DraftEntry, Drafting, NoPages
from services.draft.settings import DraftSettings
from slipstream.errors import ConfigError, PairError
from slipstream.tree import TreeSpec, build_tree, candidates_needed, resolve_spec
from tests.tiny import MASK, Pair, make_draft, make_pair

B = 8
CHAIN = resolve_spec("chain", block_size=B)
TREE = resolve_spec("top2gap", 4, 16, block_size=B)
WIDE = resolve_spec("best_first", None, 24, block_size=B, spine=False)
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "jetspec": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "both_ways": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 11,
        "is_causal": False,
    },
}


def pair_of(folder: Path, kind: str, **changed: Any) -> Pair:
    head = "jetspec" if kind == "jetspec" else "dflash"
    return make_pair(folder, "llama", head, block_size=B, draft_config=KINDS[kind] | changed)


def load(pair: Pair, **flags: Any) -> ModelRunner:
    values = {"slots": 6, "pages": 64, "page_size": 4, "dtype": "float32", "threads": 1} | flags
    return load_runner(DraftSettings(model=str(pair.target), draft=str(pair.draft), **values))


class Reference:
    """The head by the book: no cache, no pages, one request, dense masks."""

    def __init__(self, pair: Pair, causal: Sequence[bool], windows: Sequence[int | None]) -> None:
        self.c = json.loads((pair.draft / "config.json").read_text())
        self.w = load_file(pair.draft / "model.safetensors")
        target = load_file(pair.target / "model.safetensors")
        self.embedding, self.head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        self.causal, self.windows = causal, windows
        self.mask_id = self.c["dflash_config"]["mask_token_id"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()
        return scaled * self.w[name]

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = x.shape[-1]
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = positions[:, None].double() / self.c["rope_theta"] ** powers
        angles = torch.cat([angles, angles], -1)[:, None]
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return (x * angles.cos() + half * angles.sin()).float()

    def heads(self, x: Tensor, name: str) -> Tensor:
        return (x @ self.w[name + ".weight"].T).unflatten(-1, (-1, self.c["head_dim"]))

    def logits(self, features: Tensor, anchor: int, rows: int = B) -> Tensor:
        """Of every row of the block after `features`, (rows, vocabulary)."""
        start = len(features)
        before, own = torch.arange(start), torch.arange(start, start + rows)
        x = self.embedding[[anchor] + [self.mask_id] * (rows - 1)]
        for i in range(self.c["num_hidden_layers"]):
            p = f"layers.{i}.self_attn."
            h = self.norm(x, f"layers.{i}.input_layernorm.weight")
            q = self.rope(self.norm(self.heads(h, p + "q_proj"), p + "q_norm.weight"), own)
            keys, values = [], []
            for rows_in, positions in ((features, before), (h, own)):
                k = self.norm(self.heads(rows_in, p + "k_proj"), p + "k_norm.weight")
                keys.append(self.rope(k, positions))
                values.append(self.heads(rows_in, p + "v_proj"))
            x = x + self.attend(i, q, torch.cat(keys), torch.cat(values), start, p)
            h = self.norm(x, f"layers.{i}.post_attention_layernorm.weight")
            gate, up = (h @ self.w[f"layers.{i}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = (
                x
                + (torch.nn.functional.silu(gate) * up)
                @ self.w[f"layers.{i}.mlp.down_proj.weight"].T
            )
        return self.norm(x, "norm.weight") @ self.head.T

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, start: int, prefix: str) -> Tensor:
        rows, keys = q.shape[0], k.shape[0]
        query, key = torch.arange(start, start + rows)[:, None], torch.arange(keys)[None]
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if self.causal[i]:
            seen &= key <= query
        window = self.windows[i]
        if window is not None:
            seen &= (query - key).abs() < window
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.c["head_dim"] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ (
            self.w[prefix + "o_proj.weight"].T
        )


def reference_of(pair: Pair, kind: str) -> Reference:
    causal = {
        "dflash": [False, False],
        "jetspec": [True, True],
        "sliding": [True, False],
        "both_ways": [False, False],
    }[kind]
    window = KINDS[kind].get("sliding_window")
    return Reference(pair, causal, [window, None])


def features_of(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))


def put(context: ModelContext, slot: int, features: Tensor, first: int = 0) -> None:
    context.reserve(slot, first + len(features))
    raw = memoryview(features.numpy().tobytes())
    context.write([ContextRows(slot, first, len(features), raw)])


def tree_of(spec: TreeSpec, logits: Tensor, entry: DraftEntry, mask_id: int) -> list[list[int]]:
    """The tree that the builders make of full log-softmaxes."""
    rows = logits[1 : min(B, entry.nodes)].clone()
    rows[:, mask_id] = -torch.inf
    top = rows.log_softmax(-1).topk(candidates_needed(spec))
    tree = build_tree(spec, top.values.tolist(), top.indices.tolist(), entry.anchor, entry.nodes)
    return [tree.tokens, tree.parents]


@pytest.mark.parametrize("kind", list(KINDS))
def test_batched_paged_blocks_equal_the_plain_head(tmp_path: Path, kind: str) -> None:
    pair = pair_of(tmp_path, kind)
    runner, reference = load(pair), reference_of(pair, kind)
    context = runner.open_context()
    lengths = {0: 13, 3: 5, 5: 30}
    features = {slot: features_of(n, slot) for slot, n in lengths.items()}
    for slot, spec in zip(lengths, (CHAIN, TREE, WIDE), strict=True):
        context.admit(slot, Drafting(spec))
    for first in range(0, 30, 4):  # pages of the three alternate
        for slot, rows in features.items():
            if first < len(rows):
                put(context, slot, rows[first : first + 4], first)
    entries = [DraftEntry(5, 30, 7, 24), DraftEntry(0, 13, 9, 5), DraftEntry(3, 5, 200, 16)]
    counts = [context.block_rows(entry.nodes) for entry in entries]
    hidden = context.forward(entries, counts)
    logits = runner.head.logits(hidden).split(counts)
    specs = {0: CHAIN, 3: TREE, 5: WIDE}
    trees = context.draft(entries)
    for entry, found, tree in zip(entries, logits, trees, strict=True):
        expected = reference.logits(features[entry.slot], entry.anchor)
        torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-4)
        assert [tree.tokens, tree.parents] == tree_of(
            specs[entry.slot], expected, entry, reference.mask_id
        )
        assert len(tree) <= entry.nodes


def test_a_causal_block_may_be_cut_and_a_bidirectional_may_not(tmp_path: Path) -> None:
    for kind, cut in (("jetspec", 3), ("dflash", B)):
        context = load(pair_of(tmp_path / kind, kind)).open_context()
        context.admit(0, Drafting(CHAIN))
        put(context, 0, features_of(10, 1))
        assert context.block_rows(3) == cut
        entry = DraftEntry(0, 10, 9, 3)
        whole, part = context.forward([entry], [B]), context.forward([entry], [3])
        same = torch.allclose(whole[:3], part, rtol=1e-5, atol=1e-5)
        assert same == (kind == "jetspec")
        full = DraftEntry(0, 10, 9, B)
        assert context.draft([entry])[0].tokens == context.draft([full])[0].tokens[:3]


def test_context_is_written_once_and_blocks_are_scratch(tmp_path: Path) -> None:
    runner = load(pair_of(tmp_path, "dflash"), max_sessions=2)
    features = features_of(21, 1)
    entry = DraftEntry(0, 21, 9, B)
    at_once, by_step = runner.open_context(), runner.open_context()
    for context in (at_once, by_step):
        context.admit(0, Drafting(TREE))
    put(at_once, 0, features)
    put(by_step, 0, features[:6])
    before = None
    for first, last in ((6, 9), (9, 10), (10, 18), (18, 21)):
        by_step.draft([DraftEntry(0, first, 11, B)])  # its block lies where rows come next
        assert before is None or torch.equal(before, rows_of(by_step.cache, first))
        put(by_step, 0, features[first:last], first)
        before = rows_of(by_step.cache, last)
    torch.testing.assert_close(rows_of(by_step.cache, 21), rows_of(at_once.cache, 21))
    torch.testing.assert_close(by_step.forward([entry], [B]), at_once.forward([entry], [B]))
    assert torch.equal(before, rows_of(by_step.cache, 21))


def rows_of(cache: ContextCache, count: int) -> Tensor:
    """K of slot 0's first `count` positions, in all layers."""
    pages = cache.table(0, count)
    return cache.k[:, pages].flatten(1, 2)[:, :count].clone()


def test_a_chain_runs_no_tree_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = load(pair_of(tmp_path, "jetspec")).open_context()
    for slot, temperature in ((0, 0.0), (1, 0.9)):
        context.admit(slot, Drafting(CHAIN, temperature, 5))
        put(context, slot, features_of(10, slot))

    def never(*_: Any) -> Any:
        raise AssertionError("tree code ran")

    for module, name in (
        (model_runner, "build_tree"),
        ("slipstream.tree.heap", "grow_by_parent"),
        ("slipstream.tree.heap", "grow_best_first"),
        ("slipstream.layers.rows", "pack_bits"),
        ("slipstream.layers.rows", "unpack_bits"),
        ("services.draft.candidates", "log_mass"),
    ):
        target = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{target}.{name}", never)
    for tree in context.draft([DraftEntry(0, 10, 9, B), DraftEntry(1, 10, 9, B)]):
        assert tree.parents == list(range(-1, B - 1))


@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_the_mask_token_never_wins(
    tmp_path: Path, spec: TreeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(pair_of(tmp_path, "dflash"))
    plain = runner.head.logits
    monkeypatch.setattr(
        runner.head, "logits", lambda h: plain(h).index_fill_(1, torch.tensor([MASK]), 99.0)
    )
    context = runner.open_context()
    context.admit(0, Drafting(spec))
    put(context, 0, features_of(10, 0))
    assert runner.spec.mask_token_id == MASK
    assert MASK not in context.draft([DraftEntry(0, 10, 9, 16)])[0].tokens


def test_noise_changes_what_is_drafted_and_names_its_request(tmp_path: Path) -> None:
    context = load(pair_of(tmp_path, "jetspec")).open_context()
    features = features_of(10, 0)
    admitted = [(1.0, 5, 0), (1.0, 5, 0), (1.0, 6, 0), (1.0, 5, 1), (0.0, 5, 0)]
    for slot, drafting in enumerate(admitted):
        context.admit(slot, Drafting(TREE, *drafting))
        put(context, slot, features)
    trees = context.draft([DraftEntry(slot, 10, 9, 16) for slot in range(5)])
    assert trees[0] == trees[1]
    assert len({tuple(tree.tokens) for tree in trees}) == 4


def test_many_slots_share_the_logits_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "LOGIT_ROWS", 10)
    runner = load(pair_of(tmp_path, "dflash"))
    context = runner.open_context()
    entries = [DraftEntry(slot, 5, 9, 3 + slot) for slot in range(6)]
    for entry in entries:
        context.admit(entry.slot, Drafting(TREE))
        put(context, entry.slot, features_of(5, entry.slot))
    assert context.draft(entries) == [context.draft([entry])[0] for entry in entries]


def test_pages_come_and_go(tmp_path: Path) -> None:
    runner = load(pair_of(tmp_path, "dflash"), pages=8)
    context = runner.open_context()
    with pytest.raises(RuntimeError, match="open"):
        runner.open_context()
    context.admit(0, Drafting(CHAIN))
    context.admit(1, Drafting(CHAIN))
    context.reserve(0, 12)  # 12 rows and a block of 8: 5 pages of 4
    assert context.cache.free_pages == 3
    with pytest.raises(NoPages):
        context.reserve(1, 5)
    assert context.cache.free_pages == 3
    context.release(0)
    context.reserve(1, 5)
    context.close()
    assert runner.open_context().cache.free_pages == 8


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_warm_up_measures_real_steps(tmp_path: Path, kind: str) -> None:
    runner = load(pair_of(tmp_path, kind), slots=3, pages=200)
    costs = runner.warm_up(TREE)
    assert {cost.slots for cost in costs} == {1, 2}
    assert all(cost.ns > 0 for cost in costs)
    assert runner.open_context().cache.free_pages == 200


def test_what_a_runner_says_of_itself(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, "jetspec")
    (pair.draft / "acceptance.json").write_text(json.dumps({"chain": [0.75, 0.5]}))
    spec = load(pair).spec
    assert (spec.block_size, spec.causal, spec.mask_token_id) == (B, True, 3)
    assert (spec.feature_width, spec.feature_dtype, spec.vocab_size) == (48, "float32", 320)
    assert spec.acceptance == (0.75, 0.5)
    assert spec.model == "draft"
    assert set(spec.fingerprints) == {"fc", "hidden_norm", "embedding", "lm_head"}
    assert load(pair, pages=None).spec.pages == 6 * (512 + B) // 4


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    pair = pair_of(tmp_path / "one", "dflash")
    other = make_pair(tmp_path / "two", "llama", vocab=352, block_size=B)
    with pytest.raises(PairError, match="320.*352|352.*320"):
        load(Pair(other.target, pair.draft))
    with pytest.raises(ConfigError, match="nowhere"):
        load(Pair(pair.target, tmp_path / "nowhere"))
    odd = make_draft(tmp_path / "odd", pair.target, config={"colour": 1})
    with pytest.raises(ConfigError, match="colour"):
        load(Pair(pair.target, odd))
