"""What waits for flags and writes them: streams of a GPU, or the calling thread on a CPU."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Protocol

import torch

from slipstream.handoff.cuda_ipc.driver import NON_BLOCKING, REGISTER, CudaError, Driver
from slipstream.handoff.cuda_ipc.segment import Segment

PROBE = 1
"""Value of CONTEXT that tells the draft's half of a probe to go on."""

POLL_S = 5e-5


class Signals(Protocol):
    """Operations on the words of one segment; `word` is an index among them.

    The two halves of a probe are enqueued on a stream of their own. `number` is a word as well,
    `address` is where the number lies in the shared memory.
    """

    def wait(self, word: int, value: int) -> None:
        """The current stream waits until `word` >= `value`."""
        ...

    def write(self, word: int, value: int) -> None:
        """The current stream writes `word` after everything before it is in memory."""
        ...

    def ask(self, number: int, address: int, context: int) -> None:
        """The target's half: copies the number to memory, then writes PROBE to `context`."""
        ...

    def answer(self, context: int, address: int, echo: int) -> None:
        """The draft's half: waits for PROBE in `context`, copies the number to the word `echo`."""
        ...

    def idle(self) -> bool:
        """Whether all halves enqueued here are through; does not block."""
        ...

    def close(self) -> None:
        """No wait of this process may be parked."""
        ...


class HostSignals:
    """The calling thread waits and writes."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._answers: list[threading.Thread] = []

    def wait(self, word: int, value: int) -> None:
        words = self._words
        while words[word] < value:
            time.sleep(POLL_S)

    def write(self, word: int, value: int) -> None:
        self._words[word] = value

    def ask(self, number: int, address: int, context: int) -> None:
        ctypes.c_int64.from_address(address).value = int(self._words[number])
        self._words[context] = PROBE

    def answer(self, context: int, address: int, echo: int) -> None:
        def run() -> None:
            self.wait(context, PROBE)
            self._words[echo] = ctypes.c_int64.from_address(address).value

        thread = threading.Thread(target=run, name="handoff-probe", daemon=True)
        self._answers = [old for old in self._answers if old.is_alive()] + [thread]
        thread.start()

    def idle(self) -> bool:
        return not any(thread.is_alive() for thread in self._answers)

    def close(self) -> None:
        pass


class CudaSignals:
    """Streams of a GPU wait and write: memory operations on the segment, registered with CUDA.

    Registered once, when nothing is parked, and only unregistered by `close`: that call waits for
    parked streams.
    """

    def __init__(self, driver: Driver, device: torch.device, segment: Segment) -> None:
        if not driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"):
            raise CudaError("the driver has no 64-bit memory operations on streams")
        self._driver = driver
        self._device = device
        self._segment = segment
        driver.enter()
        driver.call("cuMemHostRegister", segment.address, segment.size, REGISTER)
        try:
            self._base = int(driver.call("cuMemHostGetDevicePointer", segment.address, 0))
            # Not one of torch's: those come from a pool and two users may share one.
            self._stream = int(driver.call("cuStreamCreate", NON_BLOCKING))
        except CudaError:
            driver.call("cuMemHostUnregister", segment.address)
            raise

    def wait(self, word: int, value: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.wait(stream, self._base + 8 * word, value)

    def write(self, word: int, value: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.write(stream, self._base + 8 * word, value)

    def ask(self, number: int, address: int, context: int) -> None:
        self._driver.enter()
        source = self._segment.address + 8 * number
        self._driver.call("cuMemcpyHtoDAsync", address, source, 8, self._stream)
        self._driver.write(self._stream, self._base + 8 * context, PROBE)

    def answer(self, context: int, address: int, echo: int) -> None:
        self._driver.wait(self._stream, self._base + 8 * context, PROBE)
        target = self._segment.address + 8 * echo  # registered, so the copy is asynchronous
        self._driver.call("cuMemcpyDtoHAsync", target, address, 8, self._stream)

    def idle(self) -> bool:
        return self._driver.idle(self._stream)

    def close(self) -> None:
        self._driver.enter()
        self._driver.call("cuStreamDestroy", self._stream)
        self._driver.call("cuMemHostUnregister", self._segment.address)
