"""Keys, values and context features in pages: one page id addresses all three.

Rows are named by their flat slot, page id x page_size + offset. A verified tree lies in the slots
start + node until the commit moves the accepted path together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def flat_slots(pages: Sequence[int], positions: Sequence[int], page_size: int) -> list[int]:
    """Flat slots of `positions` in the block table `pages`."""
    return [pages[p // page_size] * page_size + p % page_size for p in positions]


class KVCache:
    """K and V of every layer, and the features beside them.

    Attributes:
        kv: (layers, 2, pages, page_size, kv_heads, head_dim), K before V; a layer's pages are NHD.
        features: (pages * page_size, width).
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        feature_width: int,
        feature_dtype: torch.dtype,
        device: torch.device | str = "cpu",
        features: Tensor | None = None,
    ) -> None:
        """`feature_width` 0: no features are kept. `features`: where to keep them, zero."""
        self.page_size = page_size
        shape = (layers, 2, pages, page_size, kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self._rows = self.kv.view(2 * layers, pages * page_size, kv_heads * head_dim)
        shape_of_features = (pages * page_size, feature_width)
        if features is None:
            features = torch.zeros(shape_of_features, dtype=feature_dtype, device=device)
        if features.shape != shape_of_features or features.dtype != feature_dtype:
            raise ValueError(f"features must be {shape_of_features} {feature_dtype}")
        self.features = features
        self._layers = [(self.kv[layer, 0], self.kv[layer, 1]) for layer in range(layers)]

    @staticmethod
    def page_bytes(
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        feature_width: int,
        feature_dtype: torch.dtype,
    ) -> int:
        """Bytes of one page, features included."""
        kv = 2 * layers * kv_heads * head_dim * dtype.itemsize
        return page_size * (kv + feature_width * feature_dtype.itemsize)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K pages and V pages of a layer."""
        return self._layers[index]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies KV rows of all layers from flat slots to flat slots.

        They go through a temporary: a target may be a source that has not been read yet.
        """
        if source:
            device = self._rows.device
            rows = self._rows.index_select(1, torch.tensor(source, device=device))
            self._rows.index_copy_(1, torch.tensor(target, device=device), rows)

    def write_features(self, rows: Tensor, target: Sequence[int]) -> None:
        """Puts feature rows (n, width) into flat slots."""
        index = torch.tensor(target, device=self.features.device)
        self.features.index_copy_(0, index, rows.to(self.features.dtype))

    def read_features(self, source: Sequence[int]) -> memoryview:
        """Feature rows of flat slots as raw little-endian bytes."""
        index = torch.tensor(source, device=self.features.device)
        rows = self.features.index_select(0, index).cpu()
        raw: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
        return raw.data.cast("B")
