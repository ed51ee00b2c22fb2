"""The GPU's clock, for stamps that kernels leave beside their results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def now(REAL: tl.constexpr):
    """Nanoseconds of the GPU's global timer, a scalar int64; 0 unless REAL.

    All processes on one GPU read the same timer, which advances in steps of up to about a
    microsecond. The interpreter knows no such thing: REAL is False there.
    """
    if REAL:
        stamp = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        stamp = tl.full((), 0, tl.int64)
    return stamp
