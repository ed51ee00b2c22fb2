"""A stack of decoder layers run by the kernels, in buffers that are allocated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.activation import silu_mul
from slipstream.kernels.norm import add_rms_norm, rms_norm
from slipstream.kernels.rope_kv import PlacedRows, rope_table, rope_write
from slipstream.layers.device_rows import DeviceRows
from slipstream.layers.linear import Linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope
from slipstream.models.decoder import DecoderLayer

Attend = Callable[[int, Tensor], Tensor]
"""attend(layer, q (R, heads, hd)) -> (R, heads * hd) contiguous; own keys have been written."""

Pages = Callable[[int], tuple[Tensor, Tensor]]
"""pages(layer) -> its keys and values, (pages, page_size, kv, hd) each."""

MOST_PARTS = 8
PART_INPUTS = 1024
"""Least inputs of a part: fewer, and it is over before its weights flow."""

PARTS_ROWS = 32
"""Most rows of a product in parts: with more there are tiles enough."""

TILE_OUTPUTS = 128


def choose_parts(inputs: int, outputs: int, multiprocessors: int) -> int:
    """Into how many parts the sums of a product of few rows are cut, so that all fill the card.

    Tiles of the outputs alone would leave multiprocessors without weights to read. A library cuts
    such sums itself and then adds the parts up in a kernel of their own; here `add_rms_norm` does.
    """
    tiles, parts = -(-outputs // TILE_OUTPUTS), 1
    while (
        2 * parts <= MOST_PARTS
        and 2 * parts * tiles <= multiprocessors
        and inputs % (2 * parts) == 0
        and inputs // (2 * parts) >= PART_INPUTS
    ):
        parts *= 2
    return parts


class FusedLinear:
    """The unpacked weight of a `Linear`, multiplied into a given buffer.

    Attributes:
        parts: of its sums, which `in_parts` leaves apart.
    """

    def __init__(self, linear: Linear, parts: int = 1) -> None:
        weight, self.bias, self.parts = linear.plain, linear.bias, parts
        self.weight = weight.t()  # (in, out)
        cut = weight.view(weight.shape[0], parts, -1)
        self._parts = cut.permute(1, 2, 0)  # (parts, in / parts, out)

    def in_parts(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes to out (parts, R, out) fp32 the products of each part of x (R, in); no bias.

        Both are contiguous; the sum over the parts is x W^T.
        """
        cut = x.view(x.shape[0], self.parts, -1).transpose(0, 1)
        if x.is_cuda and x.dtype != torch.float32:
            return torch.bmm(cut, self._parts, out_dtype=torch.float32, out=out)
        return torch.bmm(cut.float(), self._parts.float(), out=out)

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
    def of(cls, layer: DecoderLayer, multiprocessors: int) -> _Layer:
        """`multiprocessors`: of the card whose products are cut into parts; 0: none is."""
        norm = layer.qk_norm

        def cut(linear: Linear) -> FusedLinear:
            if linear.bias is not None:
                return FusedLinear(linear)
            size = linear.in_features, linear.out_features
            return FusedLinear(linear, choose_parts(*size, multiprocessors))

        return cls(
            index=layer.index,
            qkv=FusedLinear(layer.qkv),
            o=cut(layer.o),
            gate_up=FusedLinear(layer.gate_up),
            down=cut(layer.down),
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
        multiprocessors: int | None = None,
    ) -> None:
        """For absolute positions below `positions`; takes the layers' weights as they are.

        `multiprocessors`: see `choose_parts`; by default the GPU's, for weights of 16 bits.
        """
        first, weight = layers[0], norm.weight
        if multiprocessors is None:
            multiprocessors = _multiprocessors(weight)
        self._layers = [_Layer.of(layer, multiprocessors) for layer in layers]
        self._norm = norm
        self.capacity, self.hidden_size = capacity, weight.shape[0]
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv, first.dim
        self.cos_sin = rope_table(rope, positions)
        self._placed = PlacedRows.allocate(capacity, self.cos_sin)

        def buffer(*shape: int) -> Tensor:
            return torch.empty(capacity, *shape, dtype=weight.dtype, device=weight.device)

        self._normed = buffer(self.hidden_size)
        self._added = buffer(self.hidden_size)
        self._qkv = buffer(first.qkv.out_features)
        self._q = buffer(first.heads, first.dim)
        self._gate_up = buffer(first.gate_up.out_features)
        self._gated = buffer(first.down.in_features)
        parts = max(max(layer.o.parts, layer.down.parts) for layer in self._layers)
        rows = min(capacity, PARTS_ROWS) if parts > 1 else 0
        self._parts = torch.empty(parts * rows * self.hidden_size, device=weight.device)

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
        page_size = pages(self._layers[0].index)[0].shape[1]
        placed = self._placed.first(count).find(rows, self.cos_sin, page_size)
        rms_norm(x, entrance.weight, entrance.eps, normed)
        for layer, following in zip(self._layers, norms, strict=True):
            layer.qkv(normed, qkv)
            rope_write(
                qkv, placed, layer.q_norm, layer.k_norm, layer.qk_eps, q, *pages(layer.index),
                value_scale,
            )  # fmt: skip
            mixed = self._product(layer.o, attend(layer.index, q), added)
            post = layer.post_norm
            add_rms_norm(mixed, x, post.weight, post.eps, normed)
            silu_mul(layer.gate_up(normed, gate_up), gated)
            mixed = self._product(layer.down, gated, added)
            target = normed if following is not self._norm or out is None else out
            tap = columns.get(layer.index)
            add_rms_norm(mixed, x, following.weight, following.eps, target, tap)
        return normed if out is None else out

    def _product(self, linear: FusedLinear, x: Tensor, out: Tensor) -> Tensor:
        """x W^T + b, in parts or in `out`, for `add_rms_norm`."""
        rows = len(x)
        if linear.parts == 1 or rows > PARTS_ROWS:
            return linear(x, out)
        shape = linear.parts, rows, self.hidden_size
        return linear.in_parts(x, self._parts[: math.prod(shape)].view(shape))


def _multiprocessors(weight: Tensor) -> int:
    """Of the GPU that multiplies by `weight`; 0 where a product is not cut into parts."""
    if not weight.is_cuda or weight.dtype == torch.float32:
        return 0
    return torch.cuda.get_device_properties(weight.device).multi_processor_count


def _columns(taps: Sequence[int], out: Tensor, hidden: int) -> dict[int, Tensor]:
    """Of each tapped layer its columns of `out`."""
    return {layer: out[:, i * hidden : (i + 1) * hidden] for i, layer in enumerate(taps)}
