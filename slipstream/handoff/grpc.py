"""The `grpc` transport: a stream per session, opened by the target and served by the draft.

The engine threads only touch mailboxes and hand frames to the loop; the loop's coroutines read and
write the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from slipstream import channels
from slipstream.errors import PairError, PeerLost, ProtocolError, SlipstreamError
from slipstream.handoff import frames
from slipstream.handoff.base import (
    ContextMessage,
    DraftEnd,
    PeerSpec,
    Proposal,
    TargetEnd,
)
from slipstream.handoff.mailbox import Mailbox
from slipstream.handoff.watchdog import Watchdog
from slipstream.v1 import handoff_pb2, handoff_pb2_grpc

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Most seconds for reaching the draft and its answer to PeerHello."""

Done = Callable[[Any], None]


class _Outbox:
    """Frames from an engine thread to the coroutine that writes the stream; None closes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, items: list[Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._put, items)
        except RuntimeError:  # the loop is closed: the process ends and so does the stream
            log.debug("dropped %d frames: the loop is closed", len(items))

    def _put(self, items: list[Any]) -> None:
        for item in items:
            self._queue.put_nowait(item)

    async def next(self) -> Any:
        return await self._queue.get()


class GrpcTargetEnd:
    """`TargetEnd` over a stream to the draft."""

    def __init__(
        self, session: int, spec: PeerSpec, loop: asyncio.AbstractEventLoop, watchdog: Watchdog
    ) -> None:
        self.session = session
        self._spec = spec
        self._watchdog = watchdog
        self._proposals: Mailbox[Proposal] = Mailbox()
        self._outbox = _Outbox(loop)

    @property
    def alive(self) -> bool:
        return not self._proposals.closed

    @property
    def reason(self) -> str:
        return self._proposals.reason

    def publish_context(self, message: ContextMessage) -> None:
        self._proposals.drop_below(message.step)  # steps without drafts asked for no proposal
        if self.alive:
            self._outbox.send(frames.context_frames(self.session, message, self._spec))

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        began = time.monotonic()
        limit = self._watchdog.limit(shape)
        try:
            proposal = self._proposals.take(step, limit)
        except TimeoutError:
            self.end(f"no proposal for step {step} within {limit:.3g} s")
            return None
        if proposal is not None:
            self._watchdog.observe(shape, time.monotonic() - began)
        return proposal

    def end(self, reason: str) -> None:
        if self.alive:
            self._proposals.close(reason)
            frame = handoff_pb2.PeerEnd(session=self.session, reason=reason)
            self._outbox.send([handoff_pb2.TargetFrame(end=frame), None])

    async def run(self, call: Any) -> None:
        """Reads and writes until either side ends; closes the mailbox with the reason."""
        writer = asyncio.create_task(self._write(call))
        try:
            await self._read(call)
        except ProtocolError as error:
            self._proposals.close(f"the draft broke the protocol: {error}")
        except grpc.aio.AioRpcError as error:
            self._proposals.close(f"the stream to the draft broke: {error.details()}")
        finally:
            self._proposals.close("the stream to the draft ended")
            writer.cancel()
            call.cancel()

    async def _read(self, call: Any) -> None:
        while True:
            frame = await call.read()
            if frame is grpc.aio.EOF:
                return
            kind = frame.WhichOneof("frame")
            if kind == "end":
                self._proposals.close(f"the draft ended the session: {frame.end.reason}")
                return
            if kind != "proposal":
                raise ProtocolError(f"unexpected frame {kind!r}")
            if not self._proposals.put(frames.read_proposal(self.session, frame.proposal)):
                raise ProtocolError("too many proposals nobody asked for")

    async def _write(self, call: Any) -> None:
        try:
            while (frame := await self._outbox.next()) is not None:
                await call.write(frame)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._proposals.close(f"the stream to the draft broke: {error}")


class GrpcConnector:
    """Opens sessions from the target's side, beside the step loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, watchdog_ms: int | None = None) -> None:
        self._loop = loop
        self._watchdog_ms = watchdog_ms
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Callable[[TargetEnd | SlipstreamError], None],
    ) -> None:
        """Thread-safe; returns at once.

        `done` gets the end, a PairError or a PeerLost, on the loop's thread.
        """

        def begin() -> None:
            task = self._loop.create_task(self._session(session, first_step, address, spec, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _session(
        self, session: int, first_step: int, address: str, spec: PeerSpec, done: Done
    ) -> None:
        async with grpc.aio.insecure_channel(address, options=channels.client_options()) as channel:
            call = handoff_pb2_grpc.HandoffServiceStub(channel).Exchange()
            try:
                await asyncio.wait_for(self._greet(call, session, first_step, spec), CONNECT_S)
            except Exception as error:
                call.cancel()
                done(_connect_error(address, error))
                return
            end = GrpcTargetEnd(session, spec, self._loop, Watchdog(self._watchdog_ms))
            done(end)
            await end.run(call)

    async def _greet(self, call: Any, session: int, first_step: int, spec: PeerSpec) -> None:
        await call.write(frames.hello_frame(session, first_step, spec))
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise PeerLost(await call.details() or "it closed the stream")
        if answer.WhichOneof("frame") != "ready" or answer.ready.session != session:
            raise ProtocolError("the answer to PeerHello is not PeerReady")

    async def close(self) -> None:
        """Cancels what is still running."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _connect_error(address: str, error: Exception) -> SlipstreamError:
    if isinstance(error, TimeoutError):
        return PeerLost(f"no answer from the draft at {address} within {CONNECT_S:g} s")
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return PairError(error.details() or "the draft does not fit")
        return PeerLost(f"the draft at {address}: {error.details()}")
    return PeerLost(f"the draft at {address}: {error}")


class GrpcDraftEnd:
    """`DraftEnd` over a stream that a target opened."""

    def __init__(self, session: int, spec: PeerSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.session = session
        self._assembler = frames.ContextAssembler(session, spec)
        self._context: Mailbox[ContextMessage] = Mailbox()
        self._outbox = _Outbox(loop)

    @property
    def alive(self) -> bool:
        return not self._context.closed

    @property
    def reason(self) -> str:
        return self._context.reason

    def await_context(self, step: int) -> ContextMessage | None:
        return self._context.take(step)

    def publish_proposal(self, proposal: Proposal) -> None:
        if self.alive:
            self._outbox.send([frames.proposal_frame(self.session, proposal)])

    def end(self, reason: str) -> None:
        if self.alive:
            self._context.close(reason)
            frame = handoff_pb2.PeerEnd(session=self.session, reason=reason)
            self._outbox.send([handoff_pb2.DraftFrame(end=frame), None])

    async def read(self, incoming: AsyncIterator[handoff_pb2.TargetFrame]) -> None:
        """Takes the target's frames until its side ends, then closes the mailbox and the outbox."""
        reason = "the target closed the stream"
        try:
            async for frame in incoming:
                kind = frame.WhichOneof("frame")
                if kind == "end":
                    reason = f"the target ended the session: {frame.end.reason}"
                    break
                if kind != "context":
                    raise ProtocolError(f"unexpected frame {kind!r}")
                message = self._assembler.feed(frame.context)
                if message is not None and not self._context.put(message):
                    raise ProtocolError("too much context nobody asked for")
        except ProtocolError as error:
            reason = f"the target broke the protocol: {error}"
        finally:
            self._context.close(reason)
            self._outbox.send([None])

    async def outgoing(self) -> AsyncIterator[handoff_pb2.DraftFrame]:
        """Frames to write, until the session ends."""
        while (frame := await self._outbox.next()) is not None:
            yield frame

    def broke(self) -> None:
        """The stream is gone."""
        self._context.close("the stream from the target broke")


@dataclass(slots=True)
class _Expected:
    first_step: int
    spec: PeerSpec
    done: Done
    timer: asyncio.TimerHandle


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
        done: Callable[[DraftEnd | SlipstreamError], None],
        timeout_s: float = 10.0,
    ) -> None:
        """Thread-safe; returns at once. `done` gets the end or an error, on the loop's thread."""

        def begin() -> None:
            timer = self._loop.call_later(timeout_s, self._give_up, session, timeout_s)
            self._expected[session] = _Expected(first_step, spec, done, timer)
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
        end = GrpcDraftEnd(hello.session, expected.spec, self._loop)
        reader = asyncio.create_task(end.read(request_iterator))
        try:
            ready = handoff_pb2.PeerReady(session=hello.session)
            yield handoff_pb2.DraftFrame(ready=ready)
            expected.done(end)
            async for frame in end.outgoing():
                yield frame
        finally:
            end.broke()
            reader.cancel()
