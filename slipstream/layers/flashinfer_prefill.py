"""Prefill attention by FlashInfer: chains whose lengths the host knows when it plans the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError

WORKSPACE = 128 << 20  # bytes, what FlashInfer's documentation recommends
IN_FLIGHT = 2  # steps that may be planned before the oldest one's copies are known to be done


@dataclass(slots=True)
class _Flight:
    """What one step's plan occupies until the device has copied it."""

    wrappers: dict[int | None, Any]  # by window
    pinned: Tensor  # int32
    copied: torch.cuda.Event


class FlashInferPrefill:
    """Causal attention over paged keys, `plan` once for a step, then a call per layer.

    Plans and calls must be issued on one stream, in the order of the steps. FlashInfer's kernels
    are compiled at the first plan: warm up with a plan and a call for every window.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        scale: float,
        windows: Iterable[int | None],
        *,
        device: torch.device | str,
        most_entries: int,
        most_pages: int,
        backend: str = "fa2",
    ) -> None:
        """Allocates for `most_entries` entries that hold `most_pages` pages together.

        Args:
            dtype: of queries, pages and output; 16 bits.
            windows: of all layers; one plan is made for each distinct one.
            backend: FlashInfer's own, `fa2`, `fa3` or `auto`.

        Raises ConfigError when FlashInfer is missing or has no kernel for `dtype`.
        """
        make = _wrapper_class()
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"prefill attention backend 'flashinfer' computes in bf16 or fp16, not in {dtype};"
                " choose 'triton' or 'torch'"
            )
        self._shape = (heads, kv_heads, head_dim, page_size)
        self._dtype, self._scale = dtype, scale
        self._most = (most_entries, most_pages)
        self._rows = 0
        distinct = list(dict.fromkeys(windows))
        # Kernels of one stream run one after the other: all may use one workspace for results.
        # The small one, which holds the plan, is each wrapper's own.
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        size = 3 * (most_entries + 1) + most_pages
        self._flights = [
            _Flight(
                {window: make(workspace, "NHD", backend=backend) for window in distinct},
                torch.empty(size, dtype=torch.int32, pin_memory=True),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            for _ in range(IN_FLIGHT)
        ]

    def plan(
        self, counts: Sequence[int], starts: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> None:
        """Prepares for entries of counts[e] rows after a prefix of starts[e] keys.

        Row i of an entry has its key at index start + i and sees the indices up to that, within the
        window. `pages` may list more pages than the keys need. Waits only if IN_FLIGHT steps have
        been planned and the device has not yet copied the oldest one's plan.
        """
        if len(counts) > self._most[0]:
            raise ValueError(f"{len(counts)} entries, planned for at most {self._most[0]}")
        flight = self._flights[0]
        self._flights = [*self._flights[1:], flight]
        flight.copied.synchronize()
        arrays = self._fill(flight.pinned, counts, starts, pages)
        heads, kv_heads, head_dim, page_size = self._shape
        for window, wrapper in flight.wrappers.items():
            wrapper.plan(
                *arrays,
                heads,
                kv_heads,
                head_dim,
                page_size,
                causal=True,
                sm_scale=self._scale,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                non_blocking=True,
            )
        flight.copied.record()
        self._rows = sum(counts)

    def _fill(
        self,
        pinned: Tensor,
        counts: Sequence[int],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row offsets, page offsets, pages and keys in the last page, all in the pinned buffer."""
        size, rows, used = self._shape[3], [0], [0]
        listed: list[int] = []
        last: list[int] = []
        for count, start, owned in zip(counts, starts, pages, strict=True):
            keys = start + count
            need = -(-keys // size)
            rows.append(rows[-1] + count)
            used.append(used[-1] + need)
            listed.extend(owned[:need])
            last.append(keys - (need - 1) * size)
        if len(listed) != used[-1] or used[-1] > self._most[1]:
            raise ValueError(
                f"{used[-1]} pages are needed, {len(listed)} given, {self._most[1]} allocated for"
            )
        views, at = [], 0
        for values in (rows, used, listed, last):
            view = pinned[at : at + len(values)]
            view.copy_(torch.tensor(values, dtype=torch.int32))
            views.append(view)
            at += len(values)
        return views[0], views[1], views[2], views[3]

    def __call__(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int | None, out: Tensor
    ) -> Tensor:
        """Writes the attention of q to `out` and returns it.

        Args:
            q: (R, heads, hd) contiguous; rows past the planned ones are padding.
            k_pages, v_pages: (pages, page_size, kv, hd) contiguous; own rows have been written.
            window: the layer's.
            out: (R, heads * hd) contiguous; zeros in padding rows.
        """
        rows, result = self._rows, out.view(q.shape)
        if rows < q.shape[0]:
            result[rows:].zero_()
        wrapper = self._flights[-1].wrappers[window]
        wrapper.run(q[:rows], (k_pages, v_pages), out=result[:rows])
        return out


def _wrapper_class() -> Any:
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise ConfigError(
            "--prefill-attention-backend flashinfer: the package flashinfer-python is missing"
            f" or broken ({error}); install it or choose 'triton' or 'torch'"
        ) from error
    return BatchPrefillWithPagedKVCacheWrapper
