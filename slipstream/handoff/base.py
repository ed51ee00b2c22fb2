"""The handoff's messages and the interfaces of its two ends.

Messages pass through the host (`TargetEnd`, `DraftEnd`) or stay on GPUs (`DeviceTargetEnd`,
`DeviceDraftEnd`), where the same content lies in rings (`slipstream.handoff.layout`).

All awaits are always released: by the message, by the peer's `end`, by the peer's stream breaking,
or by retirement. Those of the host block the calling engine thread, and a released one returns
None; those of a device block its current stream, and a released one lets it read a ring entry of
another step, which counts as nothing. That step, and every later one of the session, is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class ContextRecord:
    """Rows of one slot: positions first_row .. first_row + count - 1.

    `anchor` is the slot's last committed token, meaningful when `caught_up`: the rows end at the
    slot's start.
    """

    slot: int
    epoch: int
    first_row: int
    count: int
    anchor: int
    caught_up: bool


@dataclass(frozen=True, slots=True)
class ContextMessage:
    """What the target publishes for one step; empty (no records) for a step without content.

    `rows` holds the context features of all records in order: raw little-endian, row-major, as many
    rows as the records' counts add up to, each of the session's feature width and element type.
    """

    step: int
    records: tuple[ContextRecord, ...] = ()
    rows: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class ProposedTree:
    """A tree for one slot; node 0 is the anchor the draft used, its parent is -1."""

    slot: int
    epoch: int
    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The trees of one step; a slot of the plan that is missing here has no drafts."""

    step: int
    trees: tuple[ProposedTree, ...] = ()
    drafted_ns: int = 0


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """What both ends must agree on when a session is connected."""

    feature_width: int
    feature_dtype: str
    vocab_size: int
    slots: int
    fingerprints: dict[str, str] = field(default_factory=dict)


class TargetEnd(Protocol):
    """The target's side of one session."""

    session: int
    transport: Literal["grpc"]

    @property
    def alive(self) -> bool:
        """False once the session ended, for whatever reason."""
        ...

    @property
    def reason(self) -> str:
        """Why the session ended; empty while alive."""
        ...

    def publish_context(self, message: ContextMessage) -> None:
        """Hands over a step's context; copies the rows before it returns. No-op once ended."""
        ...

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        """The proposal of `step`; earlier ones are dropped.

        `shape` is (slots, rows) of the plan: the watchdog keeps times by it and retires the session
        when the draft is too late.
        """
        ...

    def end(self, reason: str) -> None:
        """Tells the peer that every later step is empty and closes. Idempotent."""
        ...


class DraftEnd(Protocol):
    """The draft's side of one session."""

    session: int
    transport: Literal["grpc"]

    @property
    def alive(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def await_context(self, step: int) -> ContextMessage | None:
        """The context of exactly `step`; later ones wait, earlier ones are dropped."""
        ...

    def publish_proposal(self, proposal: Proposal) -> None:
        """Hands over a step's trees. No-op once not alive."""
        ...

    def end(self, reason: str) -> None:
        """Tells the peer that every later step is empty and closes. Idempotent."""
        ...


class DeviceTargetEnd(Protocol):
    """The target's side of one session whose messages stay on GPUs.

    `await_*` and `publish` put an operation on the current stream and return at once; no-ops once
    the session ended.
    """

    session: int
    transport: Literal["cuda_ipc"]
    which: int
    """The set of rings and flags."""
    one_gpu: bool
    """Whether the draft is on the same GPU, so that stamps of both are of one clock."""

    @property
    def alive(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def await_proposal(self, step: int) -> None:
        """The stream waits until the draft published its proposal of `step`."""
        ...

    def await_room(self, step: int) -> None:
        """The stream waits until the draft took the context of `step` - RING."""
        ...

    def publish(self, step: int) -> None:
        """The stream says that the context of `step`, and what it names, is in memory."""
        ...

    def passed(self, step: int, waited_ns: int) -> None:
        """The results of `step` are on the host; its stream waited so long for the proposal.

        Any thread; every step with one of the operations above, in order, also when the session
        ended meanwhile. The watchdog lives on it, and the release of waits goes on until the last.
        """
        ...

    def end(self, reason: str) -> None:
        """Tells the peer that every later step is empty, and releases every wait. Idempotent.

        Any thread; to be called also when the session ended for another reason.
        """
        ...


class DeviceDraftEnd(Protocol):
    """The draft's side of one session whose messages stay on GPUs; see `DeviceTargetEnd`."""

    session: int
    transport: Literal["cuda_ipc"]
    which: int

    @property
    def alive(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def await_context(self, step: int) -> None:
        """The stream waits until the target published the context of `step`."""
        ...

    def consumed(self, step: int) -> None:
        """The stream says that the context up to `step` was taken."""
        ...

    def publish(self, step: int) -> None:
        """The stream says that the proposal of `step` is in memory."""
        ...

    def planned(self, step: int) -> None:
        """The host says that everything of `step` is on the stream; also when not alive."""
        ...

    def passed(self, step: int) -> None:
        """The stream is through with `step`. Any thread; every step, in order."""
        ...

    def end(self, reason: str) -> None:
        """Tells the peer that every later step is empty, and releases every wait. Idempotent.

        Any thread; to be called also when the session ended for another reason.
        """
        ...

    def close(self) -> None:
        """Gives the set back: once, after `end`, when the stream is idle; the engine's thread."""
        ...
