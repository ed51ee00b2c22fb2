"""RMS norm, alone or with the addition to the residual stream before it, and the embedding.

Each kernel rounds where the plain layers do, so that in fp32 and in bf16 it differs from them only
by the order of a sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

EMBED_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Writes x / sqrt(mean(x^2) + eps) * weight of x (R, H), weight (H,), to out (R, H).

    All are contiguous. The norm is computed in fp32 and rounded once.
    """
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _rms_norm[(rows,)](x, weight, eps, out, HIDDEN=hidden, BLOCK=block, num_warps=_warps(block))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    tap: Tensor | None = None,
) -> None:
    """Adds x (R, H) to `residual` (R, H) in place and writes the norm of the sum to out (R, H).

    The sum is rounded to the residual's type and the norm is taken of what was rounded. All are
    contiguous but `tap` (R, H): columns of a wider tensor, which receive the new residual too.

    x may also be (P, R, H) fp32, the parts of a product: their sum, rounded to the residual's type,
    is what is added.
    """
    rows, hidden = residual.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        x, residual, weight, eps, out, residual if tap is None else tap,
        PARTS=x.shape[0] if x.dim() == 3 else 0, HIDDEN=hidden, TAP=tap is not None,
        TAP_STRIDE=0 if tap is None else tap.stride(0), BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def embed(ids: Tensor, embedding: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Writes embedding (V, H) of ids (R,) int32, times `scale`, to out (R, H), all contiguous.

    An id outside the table, as padding rows may hold, gives zeros.
    """
    vocabulary, hidden = embedding.shape
    grid = (ids.shape[0], triton.cdiv(hidden, EMBED_BLOCK))
    _embed[grid](
        ids, embedding, out, scale, HIDDEN=hidden, VOCABULARY=vocabulary, BLOCK=EMBED_BLOCK
    )


def head(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes the logits hidden (R, H) x weight (V, H)^T to out (R, V) fp32.

    On a GPU the products of a 16-bit type are added up and kept in fp32: logits rounded to bf16 tie
    where the model's do not. On a CPU they are rounded to the type first, as the plain layer does.
    """
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(hidden, weight.t()))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` writes."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The new residual and what `add_rms_norm` writes."""
    total = x + residual
    return total, rms_norm_reference(total, weight, eps)


def embed_reference(ids: Tensor, embedding: Tensor, scale: float = 1.0) -> Tensor:
    """What `embed` writes for ids inside the table."""
    return F.embedding(ids.long(), embedding) * scale


def _warps(block: int) -> int:
    """Sixteen elements a thread, as far as a program may grow."""
    return min(16, max(1, block // 512))


@triton.jit
def _normed(x, weight, lane, inside, eps, HIDDEN: tl.constexpr):
    """The norm of one row x, already in fp32 and zero outside, in fp32."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    return x * scale * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm(x, weight, eps, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < HIDDEN
    value = tl.load(x + row * HIDDEN + lane, mask=inside, other=0.0).to(tl.float32)
    result = _normed(value, weight, lane, inside, eps, HIDDEN)
    tl.store(out + row * HIDDEN + lane, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    x, residual, weight, eps, out, tap,
    PARTS: tl.constexpr, HIDDEN: tl.constexpr, TAP: tl.constexpr, TAP_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < HIDDEN
    at = row * HIDDEN + lane
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        whole = tl.num_programs(0).to(tl.int64) * HIDDEN  # elements of a part: a program has a row
        for part in tl.static_range(1, PARTS):
            added += tl.load(x + part * whole + at, mask=inside, other=0.0)
        added = added.to(residual.dtype.element_ty).to(tl.float32)
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    total = (added + before).to(residual.dtype.element_ty)
    tl.store(residual + at, total, mask=inside)
    if TAP:
        tl.store(tap + row * TAP_STRIDE + lane, total, mask=inside)
    result = _normed(total.to(tl.float32), weight, lane, inside, eps, HIDDEN)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed(
    ids, embedding, out, scale,
    HIDDEN: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < HIDDEN
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < VOCABULARY)
    given = lane < tl.where(known, HIDDEN, 0)
    value = tl.load(embedding + token * HIDDEN + lane, mask=given, other=0.0)
    value = value.to(tl.float32) * scale
    tl.store(out + row * HIDDEN + lane, value.to(out.dtype.element_ty), mask=inside)
