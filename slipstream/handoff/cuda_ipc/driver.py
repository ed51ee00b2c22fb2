"""The few calls of the CUDA driver that the handoff needs.

`cuda.bindings` is imported when a GPU is used, not before: a server on a CPU has no need of it.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import threading
from functools import cache
from typing import Any

MASK = (1 << 64) - 1
"""The driver takes values unsigned and compares them as signed, cyclically."""

DEFAULT = 0
"""Of a wait: until the word is >= the value. Of a write: after a fence over the whole system, so
that whoever sees the value sees what the stream wrote before."""

REGISTER = 0x1 | 0x2
"""CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP."""

PEER_ACCESS = 0x1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may be a neighbour GPU's."""

NON_BLOCKING = 0x1
"""CU_STREAM_NON_BLOCKING: no implicit order with the legacy stream."""

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE; the bindings name the field of a handle in some versions only."""

BINDINGS = (12, 9, 1)
"""The first version whose calls let other threads run: a call that waits for a stream would else
keep the thread that ends the stream's wait from running."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""


class CudaError(RuntimeError):
    """A call of the driver failed; the message names it and the driver's error."""


class Driver:
    """The driver for one GPU, in its primary context, which is also torch's."""

    def __init__(self, index: int) -> None:
        try:
            self.api = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise CudaError(f"cuda.bindings is not installed: {error}") from error
        version = str(getattr(importlib.import_module("cuda.bindings"), "__version__", "0"))
        if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < BINDINGS:
            oldest = ".".join(map(str, BINDINGS))
            raise CudaError(f"cuda.bindings is {version}: {oldest} is the first that can be used")
        self._entered = threading.local()
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", index)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)

    @staticmethod
    @cache
    def of(index: int) -> Driver:
        """The one of this process for the GPU `index`, as CUDA_VISIBLE_DEVICES numbers it."""
        return Driver(index)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls `name` and returns what it gives beside its status. Raises CudaError."""
        try:
            status, *values = getattr(self.api, name)(*arguments)
        except (RuntimeError, AttributeError) as error:  # no driver, or one without this call
            raise CudaError(f"{name}: {error}") from error
        if int(status) != 0:
            raise CudaError(f"{name}: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def enter(self) -> None:
        """Makes the primary context current in the calling thread.

        Threads begin without one, and torch selects device 0 without a call to the driver.
        """
        if getattr(self._entered, "done", False):
            return
        if int(self.call("cuCtxGetCurrent")) != int(self._context):
            self.call("cuCtxSetCurrent", self._context)
        self._entered.done = True

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_`name`; 0 where the driver does not know it."""
        key = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if key is None else int(self.call("cuDeviceGetAttribute", key, self._device))

    def wait(self, stream: int, address: int, value: int) -> None:
        """`stream` waits until the word at `address` is >= `value`."""
        self.enter()
        self.call("cuStreamWaitValue64", stream, address, value & MASK, DEFAULT)

    def write(self, stream: int, address: int, value: int) -> None:
        """`stream` writes `value` after all that it did before is visible to everybody."""
        self.enter()
        self.call("cuStreamWriteValue64", stream, address, value & MASK, DEFAULT)

    def idle(self, stream: int) -> bool:
        """Whether everything on `stream` is done; does not block."""
        self.enter()
        status = int(self.api.cuStreamQuery(stream)[0])
        if status not in (0, NOT_READY):
            raise CudaError(f"cuStreamQuery: error {status}")
        return status == 0

    def allocate(self, size: int) -> int:
        """Address of `size` zero bytes, apart from torch's memory."""
        self.enter()
        address = int(self.call("cuMemAlloc", size))
        try:
            self.call("cuMemsetD8", address, 0, size)
            self.call("cuCtxSynchronize")
        except CudaError:
            self.call("cuMemFree", address)
            raise
        return address

    def handle(self, address: int) -> bytes:
        """What another process needs to map the allocation at `address`."""
        self.enter()
        structure = self.call("cuIpcGetMemHandle", address)
        return ctypes.string_at(structure.getPtr(), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation; its address here."""
        self.enter()
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"not a memory handle: {len(handle)} bytes")
        structure = self.api.CUipcMemHandle()
        ctypes.memmove(structure.getPtr(), handle, HANDLE_BYTES)
        return int(self.call("cuIpcOpenMemHandle", structure, PEER_ACCESS))

    def size(self, address: int) -> int:
        """Bytes of the allocation that begins at `address`."""
        self.enter()
        status, _, size = self.api.cuMemGetAddressRange(address)
        if int(status) != 0:
            raise CudaError(f"cuMemGetAddressRange: {getattr(status, 'name', status)}")
        return int(size)
