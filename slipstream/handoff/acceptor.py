"""The draft's side of greetings: serves the sessions that a gateway attached."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import PairError, PeerLost, ProtocolError, SlipstreamError
from slipstream.handoff import frames
from slipstream.handoff.base import PeerSpec
from slipstream.handoff.connector import CONNECT_S, Done
from slipstream.handoff.grpc_ends import GrpcDraftEnd, Outbox, report
from slipstream.v1 import handoff_pb2, handoff_pb2_grpc

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc.mapper import Mapper, Seat

log = logging.getLogger(__name__)

PROBED_S = 10.0
"""Most seconds from PeerReady to PeerProbed."""


@dataclass(slots=True)
class _Expected:
    first_step: int
    spec: PeerSpec
    done: Done
    timer: asyncio.TimerHandle
    mapper: Mapper | None


class GrpcAcceptor(handoff_pb2_grpc.HandoffServiceServicer):
    """Serves sessions on the draft's side: a target may come once the gateway attached it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._expected: dict[int, _Expected] = {}
        self._early: dict[int, asyncio.Event] = {}  # targets that came before their Attach

    def add_to(self, server: Any) -> None:
        """Registers HandoffService."""
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self, server)

    def expect(
        self,
        session: int,
        first_step: int,
        spec: PeerSpec,
        done: Done,
        timeout_s: float = 10.0,
        mapper: Mapper | None = None,
    ) -> None:
        """Thread-safe; returns at once. `done` gets a DraftEnd or an error, on the loop's thread.

        With a `mapper`, and where the target offers device memory, it is a DeviceDraftEnd.
        """

        def begin() -> None:
            timer = self._loop.call_later(timeout_s, self._give_up, session, timeout_s)
            self._expected[session] = _Expected(first_step, spec, done, timer, mapper)
            if session in self._early:
                self._early[session].set()

        self._loop.call_soon_threadsafe(begin)

    def forget(self, session: int) -> None:
        """Thread-safe: a target of `session` is refused from now on."""
        self._loop.call_soon_threadsafe(self._drop, session)

    def _drop(self, session: int) -> _Expected | None:
        expected = self._expected.pop(session, None)
        if expected is not None:
            expected.timer.cancel()
        return expected

    def _give_up(self, session: int, timeout_s: float) -> None:
        expected = self._drop(session)
        if expected is not None:
            expected.done(PeerLost(f"no target came for session {session} in {timeout_s:g} s"))

    async def _claim(self, session: int) -> _Expected | None:
        """What the gateway said of `session`; its Attach may come a little after the target."""
        if session not in self._expected:
            arrived = self._early.setdefault(session, asyncio.Event())
            try:
                await asyncio.wait_for(arrived.wait(), CONNECT_S / 2)
            except TimeoutError:
                return None
            finally:
                self._early.pop(session, None)
        return self._drop(session)

    async def Exchange(
        self, request_iterator: AsyncIterator[handoff_pb2.TargetFrame], context: Any
    ) -> AsyncIterator[handoff_pb2.DraftFrame]:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("frame") != "hello":
            raise ProtocolError("the first frame of a session must be PeerHello")
        hello = first.hello
        expected = await self._claim(hello.session)
        if expected is None:
            raise ProtocolError(f"session {hello.session}: no gateway attached it")
        wrong = frames.mismatch(hello, expected.first_step, expected.spec)
        if wrong is not None:
            error = PairError(wrong)
            expected.done(error)
            raise error
        async with aclosing(self._serve(hello, expected, request_iterator)) as frames_out:
            async for frame in frames_out:
                yield frame

    async def _serve(
        self, hello: handoff_pb2.PeerHello, expected: _Expected, incoming: AsyncIterator[Any]
    ) -> AsyncGenerator[handoff_pb2.DraftFrame, None]:
        seat: Seat | None = None
        try:
            seat, reason = await self._seat(hello, expected)
            ready = handoff_pb2.PeerReady(
                session=hello.session,
                device=seat is not None,
                reason=reason,
                pid=os.getpid(),
                gpu_uuid="" if expected.mapper is None else expected.mapper.gpu,
            )
            yield handoff_pb2.DraftFrame(ready=ready)
            if seat is not None:
                reason = await self._probed(incoming)
                if reason:
                    await self._abandon(seat)
                    seat = None
        except BaseException as error:  # the generator's exit as well
            if seat is not None:
                self._abandon(seat)
            expected.done(
                error
                if isinstance(error, SlipstreamError)
                else PeerLost(f"the target of session {hello.session} left while it connected")
            )
            raise
        report(log, hello.session, seat is not None, reason)
        device = None if seat is None else _Device(hello, seat, self._loop)
        stream = device or GrpcDraftEnd(hello.session, expected.spec, self._loop, reason)
        reader = asyncio.create_task(stream.read(incoming))
        try:
            expected.done(stream if device is None else device.end)
            async for frame in stream.outgoing():
                yield frame
        finally:
            stream.broke()
            reader.cancel()

    async def _seat(
        self, hello: handoff_pb2.PeerHello, expected: _Expected
    ) -> tuple[Seat | None, str]:
        """A place in the offered memory, this side of the probe under way; or why there is none."""
        if not hello.HasField("device"):
            return None, ""
        if expected.mapper is None:
            return None, "the draft maps no device memory"
        from slipstream.handoff.cuda_ipc.offer import Refused

        accept = asyncio.to_thread(expected.mapper.accept, hello.device, expected.spec)
        task = asyncio.ensure_future(accept)
        try:
            return await asyncio.shield(task), ""
        except Refused as refused:
            return None, str(refused)
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, task: asyncio.Future[Seat]) -> None:
        """The call ended while its seat was made."""
        if not task.cancelled() and task.exception() is None:
            self._abandon(task.result())

    def _abandon(self, seat: Seat) -> asyncio.Future[None]:
        """Begins at once, whether it is awaited or not."""
        # Probes share a stream: another one may be ahead of this until its own time is over.
        return self._loop.run_in_executor(None, seat.abandon, 3 * seat.times.probe)

    async def _probed(self, incoming: AsyncIterator[Any]) -> str:
        """Why the probe failed, from the target; empty if it did not."""
        try:
            frame = await asyncio.wait_for(anext(incoming, None), PROBED_S)
        except TimeoutError:
            raise PeerLost(f"no word of the probe within {PROBED_S:g} s") from None
        if frame is None:
            raise PeerLost("the target left while it connected")
        if frame.WhichOneof("frame") != "probed":
            raise ProtocolError("the frame after PeerReady is not PeerProbed")
        return "" if frame.probed.device else frame.probed.reason or "the probe failed"


class _Device:
    """A session whose messages stay on devices; its stream is the sign of life."""

    def __init__(
        self, hello: handoff_pb2.PeerHello, seat: Seat, loop: asyncio.AbstractEventLoop
    ) -> None:
        # Here and not above: who has no mapper needs neither torch nor numpy.
        from slipstream.handoff.cuda_ipc.draft_end import CudaDraftEnd

        self._session = hello.session
        self._outbox = Outbox(loop)
        self.end = CudaDraftEnd(hello.session, hello.first_step, seat, self._tell)

    def _tell(self, reason: str) -> None:
        frame = handoff_pb2.PeerEnd(session=self._session, reason=reason)
        self._outbox.send([handoff_pb2.DraftFrame(end=frame), None])

    async def read(self, incoming: AsyncIterator[Any]) -> None:
        """Waits for the target's last frame."""
        frame = await anext(incoming, None)
        if frame is None:
            self.end.broke("the target closed the stream")
        elif frame.WhichOneof("frame") == "end":
            self.end.retire(f"the target ended the session: {frame.end.reason}")
        else:
            kind = frame.WhichOneof("frame")
            self.end.retire(f"the target broke the protocol: unexpected frame {kind!r}")

    def outgoing(self) -> AsyncIterator[handoff_pb2.DraftFrame]:
        """Frames to write, until the session ends."""
        return self._outbox.until_closed()

    def broke(self) -> None:
        """The stream is gone."""
        self.end.broke("the stream from the target broke")
