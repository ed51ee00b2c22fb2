"""The draft head against a plain implementation of its description, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.rows import RowBatch
from slipstream.models import ContextProjector, DraftHead, load_draft_config, write_random_model
from tests.tiny import MASK, Head, Pair, draft_config, make_draft, make_pair, make_target

PAGE = 16


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    dim = x.shape[-1]
    angle = positions[:, None].float() / theta ** (torch.arange(0, dim, 2).float() / dim)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Plain:
    """Context rows, then one block; every layer written out, no cache, no fusion."""

    def __init__(self, pair: Pair, value_scale: float = 1.0) -> None:
        self.w = load_file(pair.draft / "model.safetensors")
        target = load_file(pair.target / "model.safetensors")
        self.embedding = target["model.embed_tokens.weight"]
        self.head = target["lm_head.weight"]
        self.config = load_draft_config(pair.draft)
        self.value_scale = value_scale

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        bias = self.w.get(f"{name}.bias")
        return y if bias is None else y + bias

    def key_value(self, layer: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = self.linear(f"{layer}k_proj", x).view(len(x), 2, 16)
        v = self.linear(f"{layer}v_proj", x).view(len(x), 2, 16)
        k = rotated(norm(k, self.w[f"{layer}k_norm.weight"]), positions)
        return k, v * self.value_scale

    def features(self, taps: Tensor) -> Tensor:
        return norm(taps @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])

    def block(
        self, features: Tensor, ids: Tensor, causal: list[bool], windows: list[int | None],
        scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        start, n = len(features), len(ids)
        before, own = torch.arange(start), torch.arange(start, start + n)
        x = self.embedding[ids] * scale
        for index in range(self.config.num_layers):
            prefix = f"layers.{index}."
            attention = f"{prefix}self_attn."
            h = norm(x, self.w[f"{prefix}input_layernorm.weight"])
            q = self.linear(f"{attention}q_proj", h).view(n, 4, 16)
            q = rotated(norm(q, self.w[f"{attention}q_norm.weight"]), own)
            kc, vc = self.key_value(attention, features, before)
            kb, vb = self.key_value(attention, h, own)
            k, v = torch.cat([kc, kb]), torch.cat([vc, vb])
            mixed = self.attention(q, k, v, own, causal[index], windows[index])
            x = x + self.linear(f"{attention}o_proj", mixed.flatten(1))
            h = norm(x, self.w[f"{prefix}post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(self.linear(f"{prefix}mlp.gate_proj", h))
            x = x + self.linear(
                f"{prefix}mlp.down_proj", gate * self.linear(f"{prefix}mlp.up_proj", h)
            )
        return norm(x, self.w["norm.weight"])

    @staticmethod
    def attention(
        q: Tensor, k: Tensor, v: Tensor, own: Tensor, causal: bool, window: int | None
    ) -> Tensor:
        distance = own[:, None] - torch.arange(len(k))
        visible = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            visible &= distance >= 0
        if window is not None:
            visible &= distance.abs() < window
        out = torch.empty_like(q)
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / 4.0
            out[:, head] = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, head // 2]
        return out


def run_head(head: DraftHead, features: Tensor, ids: Tensor) -> Tensor:
    """The block through paged attention, as a draft server runs it."""
    c = head.config
    start, pages = len(features), [list(range(8))]
    shape = (c.num_layers, 8, PAGE, c.num_kv_heads, c.head_dim)
    k_pages, v_pages = torch.zeros(shape), torch.zeros(shape)
    context = RowBatch.build([start], [0], pages)
    k, v = head.context_kv(features, context.positions)
    for layer in range(c.num_layers):
        write_kv(k_pages[layer], v_pages[layer], k[layer], v[layer], context)
    batch = RowBatch.build([len(ids)], [start], pages)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        write_kv(k_pages[layer], v_pages[layer], k, v, batch)
        return paged_attention(
            q, k_pages[layer], v_pages[layer], batch, scale=c.scale, window=c.windows[layer],
            bidirectional=not c.causal[layer],
        )  # fmt: skip

    return head.block(ids, batch.positions, attend)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CASES: list[tuple[Head, dict[str, Any], list[bool], list[int | None]]] = [
    ("dflash", {}, [False, False], [None, None]),
    ("jetspec", {}, [True, True], [None, None]),
    ("dflash", SLIDING, [True, False], [6, None]),
    ("jetspec", SLIDING, [True, True], [6, None]),
    ("dflash", SLIDING | {"is_causal": False}, [False, False], [6, None]),
    ("dflash", {"is_causal": True}, [True, True], [None, None]),
    ("dflash", {"attention_bias": True}, [False, False], [None, None]),
]


@pytest.mark.parametrize(("kind", "config", "causal", "windows"), CASES)
def test_equals_the_plain_head(
    tmp_path: Path,
    kind: Head,
    config: dict[str, Any],
    causal: list[bool],
    windows: list[int | None],
) -> None:
    pair = make_pair(tmp_path, head=kind, draft_config=config)
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    assert list(head.config.causal) == causal
    assert list(head.config.windows) == windows
    assert head.config.all_causal == all(causal)
    plain = Plain(pair)
    taps = torch.randn(21, 2 * 48, generator=torch.manual_seed(5))
    features = ContextProjector.load(pair.draft, torch.float32)(taps)
    torch.testing.assert_close(features, plain.features(taps), rtol=1e-4, atol=1e-4)
    ids = torch.tensor([77] + [MASK] * 7)
    got = run_head(head, features, ids)
    want = plain.block(features, ids, causal, windows)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(got), want @ plain.head.T, rtol=1e-4, atol=1e-3)


def test_scales_and_soft_cap(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    section = draft_config(_target(pair), "dflash", 8)["dflash_config"]
    factors = {
        "attention_value_scale": 0.7, "input_embedding_scale": 3.0, "output_multiplier": 0.5,
        "final_logit_softcapping": 4.0,
    }  # fmt: skip
    make_draft(pair.draft, pair.target, config={"dflash_config": section | factors})
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    plain = Plain(pair, value_scale=0.7)
    features = torch.randn(9, 48, generator=torch.manual_seed(1))
    ids = torch.tensor([50] + [MASK] * 5)
    got = run_head(head, features, ids)
    want = plain.block(features, ids, [False] * 2, [None] * 2, scale=3.0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    logits = 4.0 * torch.tanh(want @ plain.head.T * 0.5 / 4.0)
    torch.testing.assert_close(head.logits(got), logits, rtol=1e-4, atol=1e-4)


def _target(pair: Pair) -> dict[str, Any]:
    import json

    value: dict[str, Any] = json.loads((pair.target / "config.json").read_text())
    return value


def test_a_causal_block_may_be_cut(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, head="jetspec")
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    features = torch.randn(9, 48, generator=torch.manual_seed(1))
    whole = run_head(head, features, torch.tensor([50] + [MASK] * 7))
    part = run_head(head, features, torch.tensor([50] + [MASK] * 2))
    torch.testing.assert_close(whole[:3], part, rtol=1e-5, atol=1e-5)


def test_context_rows_are_independent_of_their_company(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    features = torch.randn(12, 48, generator=torch.manual_seed(2))
    k, v = head.context_kv(features, torch.arange(12))
    assert k.shape == v.shape == (2, 12, 2, 16)
    tail_k, tail_v = head.context_kv(features[7:], torch.arange(7, 12))
    torch.testing.assert_close(k[:, 7:], tail_k, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v[:, 7:], tail_v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["model.", "encoder"])
def test_vendor_names_are_accepted(tmp_path: Path, prefix: str) -> None:
    pair = make_pair(tmp_path)
    taps = torch.randn(4, 2 * 48)
    want = ContextProjector.load(pair.draft, torch.float32)(taps)
    tensors = load_file(pair.draft / "model.safetensors")
    if prefix == "encoder":
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    else:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, pair.draft / "model.safetensors")
    assert torch.equal(ContextProjector.load(pair.draft, torch.float32)(taps), want)
    DraftHead.load(pair.draft, pair.target, torch.float32)


def test_bf16_stays_close(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, head="jetspec")
    features = torch.randn(9, 48, generator=torch.manual_seed(1))
    ids = torch.tensor([50] + [MASK] * 7)
    exact = run_head(DraftHead.load(pair.draft, pair.target, torch.float32), features, ids)
    rough = DraftHead.load(pair.draft, pair.target, torch.bfloat16)
    got = run_head(rough, features.bfloat16(), ids).float()
    assert (got - exact).norm() / exact.norm() < 0.05


def test_tied_target_lends_its_embedding(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, target_config={"tie_word_embeddings": True})
    head = DraftHead.load(pair.draft, pair.target, torch.float32)
    hidden = torch.randn(3, 48)
    want = hidden @ head.vocabulary.embedding.T
    torch.testing.assert_close(head.logits(hidden), want, rtol=1e-4, atol=1e-3)


def test_random_weights_fit_their_config(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    folder = write_random_model(pair.draft / "config.json", tmp_path / "random", torch.float32)
    DraftHead.load(folder, pair.target, torch.float32)
    ContextProjector.load(folder, torch.float32)


def test_works_for_every_family(tmp_path: Path) -> None:
    for kind in ("llama", "qwen2", "qwen3"):
        target = make_target(tmp_path / kind, kind)
        draft = make_draft(tmp_path / f"{kind}-draft", target)
        DraftHead.load(draft, target, torch.float32)
