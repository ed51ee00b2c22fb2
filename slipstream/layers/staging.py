"""Fixed buffers between host and device: copies that nobody waits for before they must.

A copy reads its host buffer after the call returned. So host buffers are pinned rings, and one is
handed out again only when its last copy has finished.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RING = 3
"""Host buffers where nobody asks for more: whoever comes round waits for the oldest copy."""

Host = npt.NDArray[Any]


class _Slot:
    """One pinned buffer and the end of its last copy."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.array: Host = (
            self.tensor.view(torch.uint8) if dtype == torch.bfloat16 else self.tensor
        ).numpy()

    def recorded(self) -> None:
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None and not self.event.query():  # type: ignore[no-untyped-call]
            self.event.synchronize()

    def read(self) -> Host:
        self.wait()
        return self.array


class Upload:
    """Host data to a device buffer of fixed address.

    Attributes:
        device: the buffer; its content is that of the last `send` in stream order.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ring: int = RING
    ) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._ring = [_Slot(shape, dtype, device) for _ in range(ring)]
        self._next = 0

    def host(self) -> Host:
        """A host array to fill before `send`; bf16 shows as bytes. Waits if all are in flight."""
        slot = self._ring[self._next]
        slot.wait()
        return slot.array

    def send(self, count: int | None = None) -> Tensor:
        """Starts the copy of the first `count` elements along dimension 0 (None: all)."""
        slot = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        end = self.device.shape[0] if count is None else count
        self.device[:end].copy_(slot.tensor[:end], non_blocking=True)
        slot.recorded()
        return self.device


class Copied(Protocol):
    """A copy on its way to the host."""

    def read(self) -> Host:
        """The host array once the copy has finished; bf16 shows as bytes. Any thread."""
        ...


class Readback:
    """Device data to the host."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ring: int = RING
    ) -> None:
        """`ring`: copies that may be on their way, or not read yet."""
        self._ring = [_Slot(shape, dtype, device) for _ in range(ring)]
        self._next = 0

    def start(self, source: Tensor) -> Copied:
        """Starts the copy of `source`, the beginning of a buffer of this shape.

        What is read is valid until as many further starts as the ring is long.
        """
        slot = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        slot.tensor[: source.shape[0]].copy_(source, non_blocking=True)
        slot.recorded()
        return slot


def packed(parts: dict[str, int]) -> tuple[dict[str, slice], int]:
    """Where each part of a packed int32 buffer lies, 16-byte aligned, and the buffer's length."""
    spans: dict[str, slice] = {}
    at = 0
    for name, size in parts.items():
        spans[name] = slice(at, at + size)
        at += -(-size // 4) * 4
    return spans, at


def int32(array: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """`array` as int32."""
    return np.asarray(array, dtype=np.int32)
