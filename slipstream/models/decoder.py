"""The decoder layer that targets and draft heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.layers.linear import Linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope, Rotation

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q (T, heads, hd), k (T, kv, hd), v (T, kv, hd)) -> (T, heads, hd).

RoPE is applied; the callee owns cache, mask and window. On a CPU q and k are fp32 even when v and
the weights are bf16; any float type may be returned.
"""


class Shape(Protocol):
    """What a layer needs to know of its model's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


class Take(Protocol):
    """Hands out a tensor by name; it has the given shape."""

    def __call__(self, name: str, *shape: int) -> Tensor: ...


class DecoderLayer:
    """Pre-norm attention and SwiGLU, with q, k, v in one product and gate, up in another."""

    def __init__(self, index: int, shape: Shape, take: Take, prefix: str, rope: Rope) -> None:
        hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        self.index, self.rope = index, rope
        self.heads, self.kv, self.dim = shape.num_heads, shape.num_kv_heads, dim
        q_rows, kv_rows = self.heads * dim, self.kv * dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def vector(name: str, rows: int, present: bool) -> Tensor | None:
            return take(f"{name}.bias", rows) if present else None

        parts = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        self.qkv = Linear(
            torch.cat([take(f"{attention}{n}_proj.weight", rows, hidden) for n, rows in parts]),
            _joined(*(vector(f"{attention}{n}_proj", rows, shape.qkv_bias) for n, rows in parts)),
        )
        self.qk_norm = None
        if shape.qk_norm:
            norms = (("q", self.heads), ("k", self.kv))
            weights = [take(f"{attention}{n}_norm.weight", dim).expand(m, dim) for n, m in norms]
            self.qk_norm = RMSNorm(torch.cat(weights), shape.rms_norm_eps)
        self.o = Linear(
            take(f"{attention}o_proj.weight", hidden, q_rows),
            vector(f"{attention}o_proj", hidden, shape.o_bias),
        )
        self.gate_up = Linear(
            torch.cat([take(f"{mlp}{n}_proj.weight", inner, hidden) for n in ("gate", "up")]),
            _joined(*(vector(f"{mlp}{n}_proj", inner, shape.mlp_bias) for n in ("gate", "up"))),
        )
        self.down = Linear(
            take(f"{mlp}down_proj.weight", hidden, inner),
            vector(f"{mlp}down_proj", hidden, shape.mlp_bias),
        )
        eps = shape.rms_norm_eps
        self.input_norm = RMSNorm(take(f"{prefix}input_layernorm.weight", hidden), eps)
        self.post_norm = RMSNorm(take(f"{prefix}post_attention_layernorm.weight", hidden), eps)

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x (T, H) -> (T, H), the residual stream after the layer."""
        rows = x.shape[0]
        both = self.heads + self.kv
        qkv = self.qkv(self.input_norm(x)).view(rows, both + self.kv, self.dim)
        qk = qkv[:, :both]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = self.rope.rotate(qk, rotation)
        if x.device.type != "cpu":
            qk = qk.to(x.dtype)
        mixed = attend(self.index, qk[:, : self.heads], qk[:, self.heads :], qkv[:, both:])
        x = self.o(mixed.reshape(rows, -1).to(x.dtype), x)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up), x)


def _joined(*biases: Tensor | None) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return torch.cat(present) if present else None
