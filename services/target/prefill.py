"""Attention of prefill steps that are launched piece by piece: FlashInfer's, or the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from services.target.device_step import Attend, DeviceStep
from services.target.kv_cache import KVCache
from services.target.runner import PrefillEntry
from slipstream.layers.attention_device import TorchAttention
from slipstream.layers.device_rows import Mask
from slipstream.layers.flashinfer_prefill import FlashInferPrefill
from slipstream.models import ModelConfig


class PrefillAttention(Protocol):
    """Prepares the attention of one prefill step."""

    def plan(self, entries: Sequence[PrefillEntry], rows: int) -> Attend:
        """For `entries` in a bucket of `rows` rows; called before the step's rows are laid out.

        What it returns computes (layer, q of all rows) -> (R, heads * hd).
        """
        ...


class FlashInferAttention:
    """FlashInfer with one plan for each distinct window."""

    def __init__(
        self, config: ModelConfig, step: DeviceStep, cache: KVCache, most_pages: int
    ) -> None:
        """`most_pages`: that the entries of one step hold together. Raises ConfigError."""
        self._windows, self._cache, self._out = config.windows, cache, step.mixed
        self._attend = FlashInferPrefill(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            cache.page_size,
            cache.kv.dtype,
            config.scale,
            config.windows,
            device=step.device,
            most_entries=step.rows.most_entries,
            most_pages=most_pages,
        )

    def plan(self, entries: Sequence[PrefillEntry], rows: int) -> Attend:
        self._attend.plan(
            [entry.count for entry in entries],
            [entry.first for entry in entries],
            [entry.pages for entry in entries],
        )

        def attend(layer: int, q: Tensor) -> Tensor:
            return self._attend(
                q, *self._cache.layer(layer), self._windows[layer], self._out[:rows]
            )

        return attend


class PlainAttention:
    """The plain version over the rows on the device."""

    def __init__(self, config: ModelConfig, step: DeviceStep, cache: KVCache) -> None:
        self._config, self._step, self._cache = config, step, cache

    def plan(self, entries: Sequence[PrefillEntry], rows: int) -> Attend:
        config, laid_out = self._config, self._step.rows.first(rows)
        plain = TorchAttention(
            laid_out, config.num_heads, config.num_kv_heads, config.head_dim,
            self._cache.page_size, self._cache.kv.dtype,
        )  # fmt: skip
        planned = False

        def attend(layer: int, q: Tensor) -> Tensor:
            nonlocal planned
            if not planned:  # only now do the rows lie on the device
                plain.plan(laid_out)
                planned = True
            return plain(
                q, *self._cache.layer(layer), laid_out, config.scale, config.windows[layer],
                Mask.CHAIN, self._step.mixed[:rows],
            )  # fmt: skip

        return attend
