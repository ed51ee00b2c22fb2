"""A stack of decoder layers run by the kernels, in buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.activation import silu_mul
from slipstream.kernels.norm import add_rms_norm, rms_norm
from slipstream.kernels.rope_kv import rope_table, rope_write
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.linear import Linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope
from slipstream.models.decoder import DecoderLayer

Attend = Callable[[int, Tensor], Tensor]
"""attend(layer, q (R, heads, hd)) -> (R, heads * hd) contiguous; own keys have been written."""

Pages = Callable[[int], tuple[Tensor, Tensor]]
"""pages(layer) -> its keys and values, (pages, page_size, kv, hd) each."""


class FusedLinear:
    """The unpacked weight of a `Linear`, multiplied into a given buffer."""

    def __init__(self, linear: Linear) -> None:
        self.weight, self.bias = linear.plain.t(), linear.bias  # (in, out)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes x (R, in) W^T + b to out (R, out) and returns it."""
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    qkv: FusedLinear
    o: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    q_norm: Tensor | None  # (hd,)
    k_norm: Tensor | None
    qk_eps: float
    input_norm: RMSNorm
    post_norm: RMSNorm

    @classmethod
    def of(cls, layer: DecoderLayer) -> _Layer:
        norm = layer.qk_norm
        return cls(
            index=layer.index,
            qkv=FusedLinear(layer.qkv),
            o=FusedLinear(layer.o),
            gate_up=FusedLinear(layer.gate_up),
            down=FusedLinear(layer.down),
            q_norm=None if norm is None else norm.weight[0],
            k_norm=None if norm is None else norm.weight[layer.heads],
            qk_eps=0.0 if norm is None else norm.eps,
            input_norm=layer.input_norm,
            post_norm=layer.post_norm,
        )


class FusedDecoder:
    """Up to `capacity` rows through all layers and the final norm.

    Attributes:
        cos_sin: `rope_table` of the model.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rope: Rope,
        positions: int,
        capacity: int,
    ) -> None:
        """For absolute positions below `positions`; takes the layers' weights as they are."""
        first, weight = layers[0], norm.weight
        self._layers = [_Layer.of(layer) for layer in layers]
        self._norm = norm
        self.capacity, self.hidden_size = capacity, weight.shape[0]
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv, first.dim
        self.cos_sin = rope_table(rope, positions)

        def buffer(*shape: int) -> Tensor:
            return torch.empty(capacity, *shape, dtype=weight.dtype, device=weight.device)

        self._normed = buffer(self.hidden_size)
        self._added = buffer(self.hidden_size)
        self._qkv = buffer(first.qkv.out_features)
        self._q = buffer(first.heads, first.dim)
        self._gate_up = buffer(first.gate_up.out_features)
        self._gated = buffer(first.down.in_features)

    @torch.inference_mode()
    def forward(
        self,
        x: Tensor,
        rows: DeviceRows,
        attend: Attend,
        pages: Pages,
        taps: Sequence[int] = (),
        taps_out: Tensor | None = None,
        value_scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """One pass over R rows; nothing waits for the device.

        Args:
            x: (R, H) contiguous, embedded: becomes the residual stream after the last layer.
            rows: of R rows.
            attend: called once a layer, after the rows' keys and values were written to its pages.
            pages: the layer's cache.
            taps: layers whose output, not normed, is wanted.
            taps_out: (R, K * H) contiguous, receives the K taps in the order of `taps`.
            value_scale: factor on the values.
            out: (R, H) contiguous, for the result; by default a buffer that the next pass
                overwrites.

        Returns (R, H) after the final norm. Rows without an entry hold whatever comes of their x,
        and touch no page.
        """
        count = x.shape[0]
        columns = {} if taps_out is None else _columns(taps, taps_out, self.hidden_size)
        normed, added, qkv, q, gate_up, gated = (
            buffer[:count]
            for buffer in (
                self._normed, self._added, self._qkv, self._q, self._gate_up, self._gated
            )
        )  # fmt: skip
        norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        entrance = self._layers[0].input_norm
        rms_norm(x, entrance.weight, entrance.eps, normed)
        for layer, following in zip(self._layers, norms, strict=True):
            layer.qkv(normed, qkv)
            rope_write(
                qkv, self.cos_sin, layer.q_norm, layer.k_norm, layer.qk_eps, q,
                *pages(layer.index), rows, value_scale,
            )  # fmt: skip
            layer.o(attend(layer.index, q), added)
            post = layer.post_norm
            add_rms_norm(added, x, post.weight, post.eps, normed)
            silu_mul(layer.gate_up(normed, gate_up), gated)
            layer.down(gated, added)
            target = normed if following is not self._norm or out is None else out
            tap = columns.get(layer.index)
            add_rms_norm(added, x, following.weight, following.eps, target, tap)
        return normed if out is None else out


def _columns(taps: Sequence[int], out: Tensor, hidden: int) -> dict[int, Tensor]:
    """Of each tapped layer its columns of `out`."""
    return {layer: out[:, i * hidden : (i + 1) * hidden] for i, layer in enumerate(taps)}
