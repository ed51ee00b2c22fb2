"""The gated activation between the two products of an MLP."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Writes silu(gate) * up to out (R, I); gate_up (R, 2 * I) holds gate, then up.

    Both are contiguous. silu is computed in fp32 and rounded to the type before the product.
    """
    rows, inner = out.shape
    _silu_mul[(rows, triton.cdiv(inner, BLOCK))](gate_up, out, INNER=inner, BLOCK=BLOCK)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """What `silu_mul` writes."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _silu_mul(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < INNER
    source = gate_up + row * (2 * INNER) + lane
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + INNER, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * INNER + lane, (silu * up).to(out.dtype.element_ty), mask=inside)
