"""The target's side of greetings: opens sessions, over device memory where that works."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from slipstream import channels
from slipstream.errors import PairError, PeerLost, ProtocolError, SlipstreamError
from slipstream.handoff import frames
from slipstream.handoff.base import PeerSpec
from slipstream.handoff.grpc_ends import GrpcTargetEnd, Outbox, report
from slipstream.handoff.watchdog import Watchdog
from slipstream.v1 import handoff_pb2, handoff_pb2_grpc

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc.export import Export
    from slipstream.handoff.cuda_ipc.lane import Lane

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Most seconds for reaching the draft and its answer to PeerHello."""

HANDOFFS = ("auto", "grpc", "cuda_ipc")
"""What an operator may ask for: device memory where it works, never, or nothing else."""

Done = Callable[[Any], None]


@dataclass(slots=True)
class _Greeting:
    """One session while it connects.

    Attributes:
        lane: the offered set while the greeting has it.
        reason: why the session cannot use device memory; empty while it can.
        one_gpu: whether the draft is on the target's.
    """

    session: int
    first_step: int
    spec: PeerSpec
    export: Export | None
    lane: Lane | None = None
    probe: int = 0
    reason: str = ""
    one_gpu: bool = False

    def give_up(self, reason: str, refused: bool = False) -> None:
        """The offered set is not used."""
        self.reason = self.reason or reason
        if self.lane is not None and self.export is not None:
            self.export.pool.give_up(self.lane, refused)
        self.lane = None


class GrpcConnector:
    """Opens sessions from the target's side, beside the step loop.

    `watchdog_ms` takes the place of the measured limits; `handoff` is one of HANDOFFS.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watchdog_ms: int | None = None,
        handoff: str = "auto",
    ) -> None:
        assert handoff in HANDOFFS, handoff
        self._loop = loop
        self._watchdog_ms = watchdog_ms
        self._handoff = handoff
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Done,
        export: Export | None = None,
    ) -> None:
        """Thread-safe; returns at once.

        `done` gets a TargetEnd, a PairError or a PeerLost, on the loop's thread. With an `export`
        it gets a DeviceTargetEnd; where that cannot be, a TargetEnd that says why, or, if nothing
        but device memory was asked for, a PeerLost.
        """
        greeting = _Greeting(session, first_step, spec, export)

        def begin() -> None:
            task = self._loop.create_task(self._session(greeting, address, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _session(self, greeting: _Greeting, address: str, done: Done) -> None:
        async with grpc.aio.insecure_channel(address, options=channels.client_options()) as channel:
            call = handoff_pb2_grpc.HandoffServiceStub(channel).Exchange()
            try:
                await asyncio.wait_for(self._greet(call, greeting), CONNECT_S)
                device = await self._probe(call, greeting)
            except BaseException as error:
                greeting.give_up(f"the greeting was broken off: {error}")
                call.cancel()
                if not isinstance(error, Exception):
                    raise  # cancelled: nobody listens any more
                done(_connect_error(address, error))
                return
            report(log, greeting.session, device is not None, greeting.reason)
            if device is not None:
                done(device.end)
                await device.run(call)
                return
            watchdog = Watchdog(self._watchdog_ms)
            end = GrpcTargetEnd(
                greeting.session, greeting.spec, self._loop, watchdog, greeting.reason
            )
            done(end)
            await end.run(call)

    async def _greet(self, call: Any, greeting: _Greeting) -> None:
        session, spec = greeting.session, greeting.spec
        offer = self._offer(greeting)
        await call.write(frames.hello_frame(session, greeting.first_step, spec, offer))
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise PeerLost(await call.details() or "it closed the stream")
        if answer.WhichOneof("frame") != "ready" or answer.ready.session != session:
            raise ProtocolError("the answer to PeerHello is not PeerReady")
        if greeting.lane is None or greeting.export is None:
            return
        if answer.ready.device:
            greeting.export.mapped = True
            gpu = greeting.export.gpu
            greeting.one_gpu = bool(gpu) and answer.ready.gpu_uuid == gpu
            await to_its_end(greeting.export.pool.met, greeting.lane, answer.ready.pid)
        else:
            greeting.give_up(answer.ready.reason or "the draft took no offer", refused=True)

    def _offer(self, greeting: _Greeting) -> handoff_pb2.DeviceOffer | None:
        """What is offered to the draft; nothing, with the reason, where there is nothing."""
        if self._handoff == "grpc":
            return None
        if greeting.export is None:
            if self._handoff == "cuda_ipc":
                greeting.reason = "the target shares no device memory"
            return None
        greeting.lane = greeting.export.pool.take()
        if greeting.lane is None:
            greeting.reason = "all sets of flags are in use"
            return None
        greeting.probe = secrets.randbits(61) | 1 << 61  # no step, and nothing a flag held before
        return greeting.export.offer(greeting.lane, greeting.probe)

    async def _probe(self, call: Any, greeting: _Greeting) -> _Device | None:
        """The session's device end if the round trip over memory and flags works."""
        lane, export = greeting.lane, greeting.export
        if lane is not None and export is not None:
            reason = await to_its_end(export.probe, lane, greeting.probe)
            if reason:
                greeting.give_up(reason)
            else:
                lane.reset(greeting.first_step - 1)
            if greeting.lane is not None or self._handoff == "auto":
                probed = handoff_pb2.PeerProbed(
                    session=greeting.session,
                    device=greeting.lane is not None,
                    reason=greeting.reason,
                )
                await call.write(handoff_pb2.TargetFrame(probed=probed))
        if greeting.lane is not None:
            return _Device(greeting, self._loop, self._watchdog_ms)
        if self._handoff == "cuda_ipc":
            raise PeerLost(f"cuda_ipc: {greeting.reason}")
        return None

    async def close(self) -> None:
        """Cancels what is still running."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Device:
    """A session whose messages stay on devices; its stream is the sign of life."""

    def __init__(
        self, greeting: _Greeting, loop: asyncio.AbstractEventLoop, watchdog_ms: int | None
    ) -> None:
        # Here and not above: who has no export needs neither torch nor numpy.
        from slipstream.handoff.cuda_ipc.target_end import CudaTargetEnd

        export, lane = greeting.export, greeting.lane
        assert export is not None and lane is not None
        self._session = greeting.session
        self._outbox = Outbox(loop)
        self.end = CudaTargetEnd(
            greeting.session, greeting.first_step, export, lane, self._tell, watchdog_ms,
            one_gpu=greeting.one_gpu,
        )  # fmt: skip
        export.pool.live(lane, self.end)
        greeting.lane = None

    def _tell(self, reason: str) -> None:
        frame = handoff_pb2.PeerEnd(session=self._session, reason=reason)
        self._outbox.send([handoff_pb2.TargetFrame(end=frame), None])

    async def run(self, call: Any) -> None:
        """Until either side ends, or the stream breaks."""
        writer = asyncio.create_task(self._write(call))
        try:
            frame = await call.read()
            if frame is not grpc.aio.EOF:
                kind = frame.WhichOneof("frame")
                ended = f"the draft ended the session: {frame.end.reason}"
                broke = f"the draft broke the protocol: unexpected frame {kind!r}"
                self.end.retire(ended if kind == "end" else broke)
        except grpc.aio.AioRpcError as error:
            self.end.retire(f"the stream to the draft broke: {error.details()}")
        finally:
            self.end.retire("the stream to the draft ended")
            writer.cancel()
            call.cancel()

    async def _write(self, call: Any) -> None:
        try:
            await self._outbox.write(call)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self.end.retire(f"the stream to the draft broke: {error}")


async def to_its_end(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a thread; returns, also when cancelled, only after it did."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _connect_error(address: str, error: Exception) -> SlipstreamError:
    if isinstance(error, TimeoutError):
        return PeerLost(f"no answer from the draft at {address} within {CONNECT_S:g} s")
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return PairError(error.details() or "the draft does not fit")
        return PeerLost(f"the draft at {address}: {error.details()}")
    return PeerLost(f"the draft at {address}: {error}")
