"""The memory and the flags that a target shares, allocated once."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.handoff.cuda_ipc.driver import CudaError
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.memory import (
    Region,
    allocate,
    gpu_uuid,
    numbered,
    signals_of,
    views,
)
from slipstream.handoff.cuda_ipc.offer import offer_of
from slipstream.handoff.cuda_ipc.pool import Pool
from slipstream.handoff.cuda_ipc.segment import Segment
from slipstream.handoff.cuda_ipc.times import TIMES, Times
from slipstream.handoff.layout import RELEASED, SETS, Flag, Layout, ring_entry
from slipstream.v1 import handoff_pb2

log = logging.getLogger(__name__)

PROBE_POLL_S = 2e-4


class Export:
    """One for the life of a target. Tensors as in `memory.Shared`, zero at first.

    Attributes:
        gpu: UUID; empty on a CPU.
        pool: its sets.
        mapped: whether a draft may have mapped it.
    """

    def __init__(
        self, layout: Layout, device: torch.device, export_id: int, region: Region,
        segment: Segment, times: Times,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.device = device
        self.times = times
        self.mapped = False
        self._closed = False
        self._id = export_id
        self._region = region
        self._segment = segment
        self.gpu = gpu_uuid(device)
        self._signals = signals_of(segment, device)
        lanes = [Lane(segment, self._signals, which) for which in range(SETS)]
        self.pool = Pool(lanes, segment.name, times)
        tensors = views(region.raw, layout)
        self.features, self.tables, self.records, self.heads, self.nodes = tensors

    @classmethod
    def create(cls, layout: Layout, device: torch.device, times: Times = TIMES) -> Export:
        """Allocates and exports; no wait of this process may be parked.

        Raises ConfigError with the reason when it cannot be done here.
        """
        device = numbered(device)
        export_id = secrets.randbits(63) | 1
        name = f"slipstream-{export_id:016x}"
        undo: list[Any] = []
        try:
            segment = Segment.create(f"{name}-flags", 8 * layout.flag_words)
            undo.append(segment.close)
            region = allocate(layout.bytes, device, f"{name}-memory")
            undo.append(region.close)
            return cls(layout, device, export_id, region, segment, times)
        except (CudaError, ConfigError) as error:
            for close in reversed(undo):
                close()
            raise ConfigError(f"no device memory to share: {error}") from error

    @property
    def free(self) -> int:
        """Sets that a session could take now."""
        return self.pool.free

    def offer(self, lane: Lane, probe: int) -> handoff_pb2.DeviceOffer:
        """What a draft needs to use the set of `lane`.

        The set shows the number, so that a draft that comes too late sees that it is another's.
        """
        lane.store(Flag.CONSUMED, probe)
        return offer_of(
            self.layout, self._id, self.gpu, self._region.handle, self._segment.name,
            lane.which, probe,
        )  # fmt: skip

    def probe(self, lane: Lane, number: int) -> str:
        """The target's half of a probe, when the draft enqueued its own; blocks.

        Empty if the number came back through memory and flags; else the reason, and the draft's
        side is released.
        """
        deadline = time.monotonic() + self.times.probe
        try:
            lane.ask(number, probe_address(self, lane))
            while time.monotonic() < deadline:
                if lane.load(Flag.PROPOSAL) == number and self._signals.idle():
                    return ""
                time.sleep(PROBE_POLL_S)
            reason = f"no answer to the probe within {self.times.probe:g} s"
        except CudaError as error:
            reason = f"the probe failed: {error}"
        lane.store(Flag.CONTEXT, RELEASED)
        return reason

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the sessions left and gives everything back, at the end of the process.

        For when nothing connects any more. Idempotent.

        The GPU's memory stays until the process ends where a draft may have mapped it: to free it
        before the draft closes it is undefined.
        """
        if self._closed:
            return
        if not self.pool.close("the target stops", timeout_s):
            log.warning("a stream is still parked: what is shared stays until the process ends")
            return
        self._closed = True
        self._signals.close()
        if not self.mapped or self.device.type != "cuda":
            self._region.close()
        self._segment.close()


def probe_address(memory: Any, lane: Lane) -> int:
    """Where a probe's number lies: the first word of the set's first heads."""
    return int(memory.heads[ring_entry(lane.which, 0), 0].data_ptr())
