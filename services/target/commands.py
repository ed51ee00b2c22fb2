"""What the engine is told and what it answers, as the servicer decodes and encodes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeAlias

from services.target.runner import EntryResult, SlotAdmit
from slipstream.commands import Attached as Attached
from slipstream.commands import Detach as Detach
from slipstream.commands import Detached as Detached
from slipstream.commands import Rejected as Rejected
from slipstream.commands import Release as Release
from slipstream.v1 import common_pb2

Reject: TypeAlias = "common_pb2.RejectCode.ValueType"


class StepKind(StrEnum):
    """What a step computes; UNKNOWN is a plan that did not say."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes a slot."""

    number: int
    slot: int
    epoch: int
    request: SlotAdmit


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One slot of a plan: `first`, `count`, `last` for prefill; `nodes`, `replay` for decode, and
    `branches`, whether its proposal may.
    """

    slot: int
    epoch: int
    reserve: int
    first: int = 0
    count: int = 0
    last: bool = False
    nodes: int = 0
    replay: int = 0
    branches: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `received_ns`: monotonic clock when it came."""

    number: int
    step: int
    session: int
    kind: StepKind
    entries: Sequence[PlanEntry]
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """Connects a session with the draft at `address`."""

    number: int
    session: int
    first_step: int
    address: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """Sets a slot's publish cursor back to `rows`."""

    number: int
    slot: int
    epoch: int
    rows: int


Command = Admit | Plan | Release | Attach | Detach | Rewind


class Outcome(Enum):
    """What became of a plan entry."""

    DONE = "done"
    PADDING = "padding"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Ready:
    """A gateway may begin; its first step is `last_step` + 1."""

    last_step: int


@dataclass(frozen=True, slots=True)
class EntryDone:
    """One entry of a finished plan."""

    slot: int
    epoch: int
    outcome: Outcome
    result: EntryResult


@dataclass(frozen=True, slots=True)
class Times:
    """All in ns; see StepTimes."""

    queued: int = 0
    waited: int = 0
    computed: int = 0
    published: int = 0
    drafted: int = 0
    started: int = 0
    enqueued: int = 0
    handed: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """The result of one plan."""

    step: int
    kind: StepKind
    entries: Sequence[EntryDone]
    free_pages: int
    times: Times


Event = Ready | StepDone | Attached | Detached | Rejected
