"""The target's side of a session on devices, with its watchdog."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slipstream.handoff.cuda_ipc.end import DeviceEnd
from slipstream.handoff.cuda_ipc.export import Export
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.times import Waits
from slipstream.handoff.layout import RING, Flag


class CudaTargetEnd(DeviceEnd):
    """`DeviceTargetEnd` over the sets of an export.

    The engine calls `passed` for every step for which it called `await_proposal`, `await_room` or
    `publish`, in order, also when the session died meanwhile; and `end` once, also then. Without
    these the release never stops and the set never comes back.

    Attributes:
        memory: the export.
    """

    def __init__(
        self, session: int, first_step: int, export: Export, lane: Lane,
        tell: Callable[[str], None], watchdog_ms: int | None = None, *, one_gpu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            session, first_step, lane, tell, export.times,
            (Flag.TARGET_BEAT, Flag.DRAFT_BEAT), (Flag.PROPOSAL, Flag.CONSUMED),
        )  # fmt: skip
        self.memory = export
        self.one_gpu = one_gpu
        self._waits = Waits(export.times, watchdog_ms)
        self._parked: deque[tuple[int, bool, float]] = deque()  # step, for a proposal, since
        self._passed_at = self._now()
        self._planned_step = -1  # the oldest step waited for, once the draft planned it
        self._planned_at = 0.0
        self._thread.start()

    def await_proposal(self, step: int) -> None:
        """The current stream waits for the proposal of `step`."""
        if self._operation(step):
            self._parked.append((step, True, self._now()))
            self._lane.wait(Flag.PROPOSAL, step)

    def await_room(self, step: int) -> None:
        """The current stream waits until the draft took the context of `step` - RING."""
        if self._operation(step):
            self._parked.append((step, False, self._now()))
            self._lane.wait(Flag.CONSUMED, step - RING)

    def publish(self, step: int) -> None:
        """The current stream says that the context of `step` is in memory."""
        if self._operation(step):
            self._lane.write(Flag.CONTEXT, step)

    def passed(self, step: int, waited_ns: int) -> None:
        """The stream is through with `step`; `waited_ns` counts where it awaited a proposal.

        Steps without an operation may be said too: the watchdog then knows better since when the
        stream waits.
        """
        with self._lock:
            self._passed = max(self._passed, step)
            self._passed_at = self._now()
            while self._parked and self._parked[0][0] <= step:
                at, proposal, _ = self._parked.popleft()
                if at == step and proposal and self._reason is None:
                    self._waits.observe(waited_ns / 1e9)
        self._wake()

    def _late(self) -> str | None:
        times = self._times
        if self._silence(times.stale):
            return f"the draft's heartbeat is older than {times.stale * 1e3:.0f} ms"
        with self._lock:
            if not self._parked:
                return None
            step, proposal, since = self._parked[0]
            since, limit = max(since, self._passed_at), self._waits.limit
        flag, value = (Flag.PROPOSAL, step) if proposal else (Flag.CONSUMED, step - RING)
        if self._lane.load(flag) >= value:
            return None  # it came: the step's own work takes its time
        if self._planned_step != step:
            # A step that the draft has not planned is the gateway's delay, not the draft's; but a
            # draft whose heart beats while its engine stands still plans nothing either.
            if self._lane.load(Flag.PLANNED) < step:
                if self._now() - since <= times.unplanned:
                    return None
                return f"the draft did not plan step {step} within {times.unplanned:g} s"
            self._planned_step, self._planned_at = step, self._now()
        if self._now() - max(since, self._planned_at) <= limit:
            return None
        what = f"no proposal for step {step}" if proposal else f"no room for step {step}"
        return f"{what} within {limit * 1e3:.0f} ms"
