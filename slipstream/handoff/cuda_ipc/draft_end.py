"""The draft's side of a session on devices."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.handoff.cuda_ipc.end import DeviceEnd
from slipstream.handoff.cuda_ipc.mapper import Seat
from slipstream.handoff.layout import Flag


class CudaDraftEnd(DeviceEnd):
    """`DeviceDraftEnd` over a mapping.

    The engine calls `planned` after the operations of each plan and `passed` once the stream is
    through with it, also when the session died meanwhile; `end` once, also then; `close` last.

    Attributes:
        memory: the mapping.
    """

    def __init__(
        self, session: int, first_step: int, seat: Seat, tell: Callable[[str], None]
    ) -> None:
        mapping = seat.memory
        super().__init__(
            session, first_step, seat.lane, tell, seat.times,
            (Flag.DRAFT_BEAT, Flag.TARGET_BEAT), (Flag.CONTEXT,),
        )  # fmt: skip
        self.memory = mapping
        self._seat = seat
        self._open = False  # operations of a plan are on the stream, `planned` is yet to come
        self._broken = False
        self._closed = False
        self._thread.start()

    def await_context(self, step: int) -> None:
        """The current stream waits for the context of `step`."""
        if self._begin():
            self._lane.wait(Flag.CONTEXT, step)

    def consumed(self, step: int) -> None:
        """The current stream says that the context up to `step` was taken."""
        if self._begin():
            self._lane.write(Flag.CONSUMED, step)

    def publish(self, step: int) -> None:
        """The current stream says that the proposal of `step` is in memory."""
        if self._begin():
            self._lane.write(Flag.PROPOSAL, step)

    def planned(self, step: int) -> None:
        """Everything of `step` is on the stream."""
        with self._lock:
            self._open = False
            self._on_stream = max(self._on_stream, step)
            alive = self._reason is None
        if alive:
            self._lane.store(Flag.PLANNED, step)

    def passed(self, step: int) -> None:
        """The stream is through with `step`. Any thread; every planned step, in order."""
        with self._lock:
            self._passed = max(self._passed, step)
        self._wake()

    def broke(self, reason: str) -> None:
        """The stream from the target is gone, and with it maybe the target."""
        self._broken = self._broken or self.alive
        self.retire(reason)

    def close(self) -> None:
        """The engine's thread, once, after `end` and when the session's stream is idle.

        Gives the set back and unmaps the memory if its target is gone, for which no wait of this
        process may be parked. `memory` is not to be used any more.
        """
        self.end("closed")
        with self._lock:
            self._closed = True
        self._woken.set()
        self._thread.join()
        self._seat.leave(self._broken, may_close=True)

    def _begin(self) -> bool:
        with self._lock:
            if self._reason is not None:
                return False
            self._open = True
            return True

    def _over(self) -> bool:
        return self._closed or (super()._over() and not self._open)

    def _late(self) -> str | None:
        if self._silence(self._times.lease):
            return f"the target's heartbeat is older than {self._times.lease:g} s"
        return None
