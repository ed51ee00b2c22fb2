"""Handoff messages to protobuf frames and back, with every length checked."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from slipstream.errors import ProtocolError
from slipstream.handoff.base import (
    ContextMessage,
    ContextRecord,
    PeerSpec,
    Proposal,
    ProposedTree,
)
from slipstream.v1 import common_pb2, handoff_pb2
from slipstream.wire import DTYPE_NAMES, DTYPES, ITEM_SIZE, MAX_FRAME, MAX_NODES, PROTOCOL

I32 = "i"  # array typecode of int32 on every platform that torch runs on


def row_bytes(spec: PeerSpec) -> int:
    """Bytes of one context row."""
    return spec.feature_width * ITEM_SIZE[DTYPES[spec.feature_dtype]]


def hello_frame(
    session: int, first_step: int, spec: PeerSpec, offer: handoff_pb2.DeviceOffer | None = None
) -> handoff_pb2.TargetFrame:
    hello = handoff_pb2.PeerHello(
        protocol=PROTOCOL,
        session=session,
        first_step=first_step,
        feature_width=spec.feature_width,
        feature_dtype=DTYPES[spec.feature_dtype],
        vocab_size=spec.vocab_size,
        slots=spec.slots,
        fingerprints=common_pb2.Fingerprints(**spec.fingerprints),
        device=offer,
    )
    return handoff_pb2.TargetFrame(hello=hello)


def mismatch(hello: handoff_pb2.PeerHello, first_step: int, ours: PeerSpec) -> str | None:
    """The first value of `hello` that does not fit, named with both values."""
    theirs: list[tuple[str, object, object]] = [
        ("protocol", hello.protocol, PROTOCOL),
        ("first_step", hello.first_step, first_step),
        ("feature_width", hello.feature_width, ours.feature_width),
        ("feature_dtype", DTYPE_NAMES.get(hello.feature_dtype), ours.feature_dtype),
        ("vocab_size", hello.vocab_size, ours.vocab_size),
        ("fingerprint of fc", hello.fingerprints.fc, ours.fingerprints.get("fc", "")),
        (
            "fingerprint of hidden_norm",
            hello.fingerprints.hidden_norm,
            ours.fingerprints.get("hidden_norm", ""),
        ),
        (
            "fingerprint of embedding",
            hello.fingerprints.embedding,
            ours.fingerprints.get("embedding", ""),
        ),
        (
            "fingerprint of lm_head",
            hello.fingerprints.lm_head,
            ours.fingerprints.get("lm_head", ""),
        ),
    ]
    for name, target, draft in theirs:
        if target != draft:
            return f"{name}: the target has {target!r}, the draft {draft!r}"
    if hello.slots > ours.slots:
        return f"slots: the target has {hello.slots!r}, the draft {ours.slots!r}"
    return None


def context_frames(
    session: int, message: ContextMessage, spec: PeerSpec
) -> list[handoff_pb2.TargetFrame]:
    """`message` in frames of at most MAX_FRAME payload bytes, cut between rows."""
    size = row_bytes(spec)
    per_frame = max(1, MAX_FRAME // size) * size if size else 1
    rows = memoryview(message.rows).cast("B")
    starts = range(0, max(1, len(rows)), per_frame)
    frames = []
    for start in starts:
        part = rows[start : start + per_frame]
        frames.append(
            handoff_pb2.ContextFrame(
                session=session,
                step=message.step,
                rows=bytes(part),
                dtype=DTYPES[spec.feature_dtype],
                row_count=len(part) // size if size else 0,
                last=start == starts[-1],
            )
        )
    for record in message.records:
        frames[0].records.add(
            slot=record.slot,
            epoch=record.epoch,
            first_row=record.first_row,
            count=record.count,
            anchor=record.anchor,
            caught_up=record.caught_up,
        )
    return [handoff_pb2.TargetFrame(context=frame) for frame in frames]


class ContextAssembler:
    """Puts the frames of each step together again."""

    def __init__(self, session: int, spec: PeerSpec) -> None:
        self._session = session
        self._spec = spec
        self._row_bytes = row_bytes(spec)
        self._step: int | None = None
        self._records: tuple[ContextRecord, ...] = ()
        self._parts: list[bytes] = []

    def feed(self, frame: handoff_pb2.ContextFrame) -> ContextMessage | None:
        """The whole message once its last frame came.

        Raises ProtocolError on a frame that cannot be right.
        """
        if frame.session != self._session:
            raise ProtocolError(f"session {frame.session} on the stream of {self._session}")
        if self._step is not None and frame.step != self._step:
            raise ProtocolError(f"step {frame.step} within the frames of step {self._step}")
        if DTYPE_NAMES.get(frame.dtype) != self._spec.feature_dtype:
            raise ProtocolError(f"dtype {frame.dtype}, not {self._spec.feature_dtype}")
        if len(frame.rows) != frame.row_count * self._row_bytes:
            raise ProtocolError(
                f"{len(frame.rows)} bytes for {frame.row_count} rows of {self._row_bytes}"
            )
        if self._step is None:
            self._step = frame.step
            self._records = tuple(
                ContextRecord(r.slot, r.epoch, r.first_row, r.count, r.anchor, r.caught_up)
                for r in frame.records
            )
        self._parts.append(frame.rows)
        if not frame.last:
            return None
        return self._finish()

    def _finish(self) -> ContextMessage:
        assert self._step is not None
        rows = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        message = ContextMessage(self._step, self._records, rows)
        self._step, self._records, self._parts = None, (), []
        expected = sum(record.count for record in message.records) * self._row_bytes
        if len(rows) != expected:
            raise ProtocolError(
                f"step {message.step}: {len(rows)} bytes of rows, the records say {expected}"
            )
        return message


def proposal_frame(session: int, proposal: Proposal) -> handoff_pb2.DraftFrame:
    tokens, parents = array(I32), array(I32)
    frame = handoff_pb2.ProposalFrame(
        session=session, step=proposal.step, drafted_ns=proposal.drafted_ns
    )
    for tree in proposal.trees:
        frame.slots.add(slot=tree.slot, epoch=tree.epoch, nodes=len(tree.tokens))
        tokens.extend(tree.tokens)
        parents.extend(tree.parents)
    frame.tokens, frame.parents = tokens.tobytes(), parents.tobytes()
    return handoff_pb2.DraftFrame(proposal=frame)


def read_proposal(session: int, frame: handoff_pb2.ProposalFrame) -> Proposal:
    """The trees of `frame`, only cut apart: tokens and parents are repaired by whoever verifies.

    Raises ProtocolError when the arrays do not have the lengths that the slots say.
    """
    if frame.session != session:
        raise ProtocolError(f"session {frame.session} on the stream of {session}")
    total = sum(slot.nodes for slot in frame.slots)
    if not len(frame.tokens) == len(frame.parents) == 4 * total:
        raise ProtocolError(
            f"step {frame.step}: {len(frame.tokens)} bytes of tokens and {len(frame.parents)} of "
            f"parents for {total} nodes"
        )
    return Proposal(frame.step, tuple(_trees(frame)), frame.drafted_ns)


def _trees(frame: handoff_pb2.ProposalFrame) -> Iterator[ProposedTree]:
    tokens, parents = array(I32, frame.tokens), array(I32, frame.parents)
    at = 0
    for slot in frame.slots:
        end = at + slot.nodes
        if slot.nodes > MAX_NODES:
            raise ProtocolError(f"slot {slot.slot}: {slot.nodes} nodes, at most {MAX_NODES}")
        yield ProposedTree(slot.slot, slot.epoch, tokens[at:end].tolist(), parents[at:end].tolist())
        at = end
