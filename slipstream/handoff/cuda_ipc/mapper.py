"""The draft's side of shared memory: each target's is mapped once."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack

import torch

from slipstream.errors import ConfigError
from slipstream.handoff.base import PeerSpec
from slipstream.handoff.cuda_ipc.driver import CudaError
from slipstream.handoff.cuda_ipc.export import PROBE_POLL_S, probe_address
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.memory import (
    attach,
    driver_of,
    gpu_uuid,
    numbered,
    signals_of,
    views,
)
from slipstream.handoff.cuda_ipc.offer import Refused, layout_of
from slipstream.handoff.cuda_ipc.peer import Peer
from slipstream.handoff.cuda_ipc.segment import Segment, owned, sweep
from slipstream.handoff.cuda_ipc.times import TIMES, Times
from slipstream.handoff.layout import RELEASED, Flag, Layout
from slipstream.v1 import handoff_pb2

log = logging.getLogger(__name__)


class Mapping:
    """A target's memory in this process. Tensors as in `memory.Shared`.

    Attributes:
        users: sessions on it; the mapper counts.
        broken: a session of it ended without the target saying so.
    """

    def __init__(
        self, offer: handoff_pb2.DeviceOffer, layout: Layout, device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        self.users = 0
        self.broken = False
        self.segment = Segment.open(offer.segment, 8 * layout.flag_words)
        try:
            self._region = attach(offer.memory_handle, layout.bytes, device)
            try:
                self.signals = signals_of(self.segment, device)
            except CudaError:
                self._region.close()
                raise
        except (CudaError, ConfigError):
            self.segment.close()
            raise
        self._peer = Peer(offer.pid, offer.segment)
        tensors = views(self._region.raw, layout)
        self.features, self.tables, self.records, self.heads, self.nodes = tensors

    @property
    def stale(self) -> bool:
        """Whether its target is gone; mapped again if it was only the connection."""
        return self.broken or self._peer.gone() or not owned(self.segment.name)

    def close(self) -> None:
        """No wait of this process may be parked; the tensors are not to be used any more."""
        with ExitStack() as last_first:  # what fails leaves nothing else open
            for held in (self._peer, self.segment, self._region, self.signals):
                last_first.callback(held.close)


class Seat:
    """One session's place in a mapping: a set, from the offer until `leave`."""

    def __init__(self, mapper: Mapper, mapping: Mapping, lane: Lane) -> None:
        self.memory = mapping
        self.lane = lane
        self.times = mapper.times
        self._mapper = mapper
        self._left = False
        self._lock = threading.Lock()

    def abandon(self, timeout_s: float) -> None:
        """No session begins: releases this side of the probe and leaves. Blocks; idempotent."""
        with self._lock:
            if self._left:
                return
            deadline = time.monotonic() + timeout_s
            while True:
                self.lane.store(Flag.CONTEXT, RELEASED)
                if self.memory.signals.idle():
                    break
                if time.monotonic() > deadline:
                    log.warning("a probe's stream cannot be released: its set is lost")
                    return
                time.sleep(PROBE_POLL_S)
            self._leave(broken=False, may_close=False)

    def leave(self, broken: bool, may_close: bool) -> None:
        """The set is the target's again. `may_close`: no wait of this process is parked."""
        with self._lock:
            self._leave(broken, may_close)

    def _leave(self, broken: bool, may_close: bool) -> None:
        if not self._left:
            self._left = True
            # The last store of this session: from here on the set may be another's.
            self.lane.store(Flag.DRAFT_BEAT, RELEASED)
            self._mapper.left(self.memory, broken, may_close)


class Mapper:
    """One for a draft's process; thread-safe.

    A target's memory stays mapped for its next session, and is unmapped once the target is gone:
    until then it is not free, and the target's next life may need it. Whoever leaves looks for
    that; while nobody has a session, a thread does.

    Attributes:
        gpu: UUID; empty on a CPU.
    """

    def __init__(self, device: torch.device, times: Times = TIMES) -> None:
        self.device = numbered(device)
        self.times = times
        self.gpu = gpu_uuid(self.device)
        self._mappings: dict[int, Mapping] = {}
        self._looking = False  # the thread runs
        self._closed = False
        self._lock = threading.Lock()

    @property
    def mapped(self) -> int:
        """Exports that are mapped now."""
        return len(self._mappings)

    def accept(self, offer: handoff_pb2.DeviceOffer, spec: PeerSpec) -> Seat:
        """Maps what `offer` says and enqueues this side of the probe; may block.

        Raises Refused with the reason; then the set is not touched any more.
        """
        layout = layout_of(offer, spec)
        try:
            self._check_gpu(offer.gpu_uuid)
            with self._lock:
                mapping = self._mapping(offer, layout)
                mapping.users += 1
        except (CudaError, ConfigError) as error:
            raise Refused(f"the target's memory cannot be mapped: {error}") from error
        lane = Lane(mapping.segment, mapping.signals, offer.set)
        if lane.load(Flag.CONSUMED) != offer.probe:
            self.left(mapping, broken=False, may_close=False)
            raise Refused("the offer is over")
        seat = Seat(self, mapping, lane)
        lane.store(Flag.DRAFT_BEAT, -os.getpid())
        try:
            lane.answer(probe_address(mapping, lane))
        except CudaError as error:
            seat.abandon(3 * self.times.probe)
            raise Refused(f"the probe cannot be enqueued: {error}") from error
        return seat

    def left(self, mapping: Mapping, broken: bool, may_close: bool) -> None:
        """A session left `mapping`; unmaps what nobody needs any more if it may."""
        with self._lock:
            mapping.users -= 1
            mapping.broken |= broken
            if may_close:
                self._unmap()
            if not self._looking and self._vacant:
                self._looking = True
                threading.Thread(target=self._look, name="handoff-vacant", daemon=True).start()

    def close(self) -> None:
        """At the end of the process: unmaps everything; no wait may be parked."""
        with self._lock:
            self._closed = True
            with ExitStack() as all_of_them:
                all_of_them.callback(self._mappings.clear)
                for mapping in self._mappings.values():
                    all_of_them.callback(mapping.close)

    @property
    def _vacant(self) -> bool:
        """Whether memory is mapped, and no session uses any: then nothing of ours is parked."""
        return bool(self._mappings) and not any(m.users for m in self._mappings.values())

    def _look(self) -> None:
        while True:
            time.sleep(self.times.vacant)
            with self._lock:
                if self._closed or not self._vacant:
                    self._looking = False
                    return
                try:
                    self._unmap()
                except CudaError as error:
                    log.warning("the memory of a target that is gone is not unmapped: %s", error)

    def _mapping(self, offer: handoff_pb2.DeviceOffer, layout: Layout) -> Mapping:
        if self._vacant:
            self._unmap()
        mapping = self._mappings.get(offer.export_id)
        if mapping is None:
            mapping = Mapping(offer, layout, self.device)
            self._mappings[offer.export_id] = mapping
        elif mapping.layout != layout or mapping.segment.name != offer.segment:
            raise ConfigError("the offer is not what is mapped under its number")
        return mapping

    def _unmap(self) -> None:
        for export_id, mapping in list(self._mappings.items()):
            if not mapping.users and mapping.stale:
                del self._mappings[export_id]
                mapping.close()
                sweep()

    def _check_gpu(self, target: str) -> None:
        if not target and not self.gpu:
            return
        if not target or not self.gpu:
            here, there = ("a GPU", "a CPU") if self.gpu else ("a CPU", "a GPU")
            raise Refused(f"the target runs on {there}, the draft on {here}")
        if target == self.gpu and not driver_of(self.device).attribute("MPS_ENABLED"):
            raise Refused("target and draft share a GPU without MPS")
