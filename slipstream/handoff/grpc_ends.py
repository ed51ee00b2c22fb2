"""The two ends of a session over a gRPC stream.

The engine threads only touch mailboxes and hand frames to the loop; the loop's coroutines read and
write the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from slipstream.errors import ProtocolError
from slipstream.handoff import frames
from slipstream.handoff.base import ContextMessage, PeerSpec, Proposal
from slipstream.handoff.mailbox import Mailbox
from slipstream.handoff.watchdog import Watchdog
from slipstream.v1 import handoff_pb2

log = logging.getLogger(__name__)


def report(log: logging.Logger, session: int, device: bool, reason: str) -> None:
    """Says which way a session goes, and why not over device memory if that was wanted."""
    if reason:
        log.warning("session %d over grpc, not cuda_ipc: %s", session, reason)
    else:
        log.info("session %d over %s", session, "cuda_ipc" if device else "grpc")


class Outbox:
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

    async def until_closed(self) -> AsyncIterator[Any]:
        """Every frame up to None."""
        while (frame := await self.next()) is not None:
            yield frame

    async def write(self, call: Any) -> None:
        """Writes to a stream that this side opened, until None."""
        async for frame in self.until_closed():
            await call.write(frame)
        await call.done_writing()


class GrpcTargetEnd:
    """`TargetEnd` over a stream to the draft; `fallback`: why not over device memory."""

    transport = "grpc"

    def __init__(
        self, session: int, spec: PeerSpec, loop: asyncio.AbstractEventLoop, watchdog: Watchdog,
        fallback: str = "",
    ) -> None:  # fmt: skip
        self.session = session
        self.fallback = fallback
        self._spec = spec
        self._watchdog = watchdog
        self._proposals: Mailbox[Proposal] = Mailbox()
        self._outbox = Outbox(loop)

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
            await self._outbox.write(call)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._proposals.close(f"the stream to the draft broke: {error}")


class GrpcDraftEnd:
    """`DraftEnd` over a stream that a target opened; `fallback`: why not over device memory."""

    transport = "grpc"

    def __init__(
        self, session: int, spec: PeerSpec, loop: asyncio.AbstractEventLoop, fallback: str = ""
    ) -> None:
        self.session = session
        self.fallback = fallback
        self._assembler = frames.ContextAssembler(session, spec)
        self._context: Mailbox[ContextMessage] = Mailbox()
        self._outbox = Outbox(loop)

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

    def outgoing(self) -> AsyncIterator[handoff_pb2.DraftFrame]:
        """Frames to write, until the session ends."""
        return self._outbox.until_closed()

    def broke(self) -> None:
        """The stream is gone."""
        self._context.close("the stream from the target broke")
