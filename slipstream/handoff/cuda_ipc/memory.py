"""The memory that target and draft share, and the tensors over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.handoff.cuda_ipc.driver import CudaError, Driver
from slipstream.handoff.cuda_ipc.segment import Segment
from slipstream.handoff.cuda_ipc.signals import CudaSignals, HostSignals, Signals
from slipstream.handoff.layout import HEAD_INTS, RECORD_INTS, RING, SETS, Layout

BLOCK = 2 << 20
"""Allocations of whole blocks of this size share them with nothing else."""


class Shared(Protocol):
    """What an engine sees of the memory, on either side."""

    layout: Layout
    device: torch.device
    features: Tensor  # (pages * page_size, width) of the layout's dtype
    tables: Tensor  # (slots, table_pages) int32
    records: Tensor  # (SETS * RING, 1 + slots, RECORD_INTS) int64
    heads: Tensor  # (SETS * RING, 1 + slots, HEAD_INTS) int64
    nodes: Tensor  # (SETS * RING, rows, 2) int32


@dataclass(slots=True)
class Region:
    """The shared memory in this process.

    Attributes:
        raw: (bytes,) uint8 over it.
        handle: what maps it elsewhere.
        close: gives it up; on a GPU no wait of this process may be parked.
    """

    raw: Tensor
    handle: bytes
    close: Callable[[], None]

    @property
    def address(self) -> int:
        return self.raw.data_ptr()


def allocate(size: int, device: torch.device, name: str) -> Region:
    """New memory, all zero; `name` is the segment's where it is the host's.

    Raises CudaError or ConfigError.
    """
    if device.type != "cuda":
        segment = Segment.create(name, size)
        return _host(segment, size, name.encode())
    driver = driver_of(device)
    address = driver.allocate(-(-size // BLOCK) * BLOCK)

    def close() -> None:
        driver.enter()
        driver.call("cuMemFree", address)

    try:
        return Region(_over(address, size, device), driver.handle(address), close)
    except CudaError:
        close()
        raise


def attach(handle: bytes, size: int, device: torch.device) -> Region:
    """Another process's memory. Raises CudaError or ConfigError."""
    if device.type != "cuda":
        return _host(Segment.open(handle.decode("ascii", "replace"), size), size, handle)
    driver = driver_of(device)
    address = driver.open(handle)

    def close() -> None:
        driver.enter()
        driver.call("cuIpcCloseMemHandle", address)

    try:
        if driver.size(address) < size:
            raise ConfigError(f"{driver.size(address)} bytes are shared, {size} were offered")
        return Region(_over(address, size, device), handle, close)
    except (CudaError, ConfigError):
        close()
        raise


def signals_of(segment: Segment, device: torch.device) -> Signals:
    """What waits and writes on `device`. Raises CudaError."""
    if device.type != "cuda":
        return HostSignals(segment)
    return CudaSignals(driver_of(device), device, segment)


def driver_of(device: torch.device) -> Driver:
    assert device.index is not None, "a device with a number"
    return Driver.of(device.index)


def numbered(device: torch.device) -> torch.device:
    """`device` with its number, which "cuda" alone leaves to the calling thread."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def gpu_uuid(device: torch.device) -> str:
    """The GPU's identity in every process; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def views(raw: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """features, tables, records, heads, nodes over `raw`; shapes as in `Shared`."""
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)

    def view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = dtype.itemsize
        for size in shape:
            count *= size
        return raw[at : at + count].view(dtype).view(shape)

    rings, entries = SETS * RING, 1 + layout.slots
    return (
        view(0, (layout.pages * layout.page_size, layout.width), dtype),
        view(layout.tables_at, (layout.slots, layout.table_pages), torch.int32),
        view(layout.records_at, (rings, entries, RECORD_INTS), torch.int64),
        view(layout.heads_at, (rings, entries, HEAD_INTS), torch.int64),
        view(layout.nodes_at, (rings, layout.rows, 2), torch.int32),
    )


def _host(segment: Segment, size: int, handle: bytes) -> Region:
    raw = torch.frombuffer(segment.buffer, dtype=torch.uint8, count=size)
    return Region(raw, handle, segment.close)


def _over(address: int, size: int, device: torch.device) -> Tensor:
    """(size,) uint8 on `device` over memory that torch did not allocate and will not free.

    Not through `__cuda_array_interface__`: a neighbour GPU's memory would get that GPU's label, or
    be copied.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
