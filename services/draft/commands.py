"""What a gateway tells the draft's engine, and what the engine says back; see protos/draft.proto.

Every command carries `number`, its place in the gateway's stream, for a Rejected to name.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.commands import Attached as Attached
from slipstream.commands import Detach as Detach
from slipstream.commands import Detached as Detached
from slipstream.commands import Rejected as Rejected
from slipstream.commands import Release as Release
from slipstream.tree import TreeSpec


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes a slot; `tree` None means the server's default."""

    number: int
    session: int
    slot: int
    epoch: int
    tree: TreeSpec | None
    temperature: float
    seed: int
    choice: int


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One slot of a plan; `nodes` counts the root, 1 means that nothing is drafted.

    `rows`: context rows of the slot that the step publishes at most.
    """

    slot: int
    epoch: int
    nodes: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step; the context of all steps up to `after` is written before it drafts."""

    number: int
    step: int
    session: int
    decode: bool
    entries: tuple[PlanEntry, ...]
    after: int


@dataclass(frozen=True, slots=True)
class Attach:
    """A target will connect under this session."""

    number: int
    session: int
    first_step: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A command that no value of the types above can say; it is answered with Rejected."""

    number: int
    slot: int
    epoch: int
    reason: str


Command = Admit | Plan | Release | Attach | Detach | Malformed


@dataclass(frozen=True, slots=True)
class Live:
    """The draft has every context row of the slot."""

    session: int
    slot: int
    epoch: int
    rows: int


@dataclass(frozen=True, slots=True)
class Behind:
    """The draft lacks context rows from `rows` on."""

    session: int
    slot: int
    epoch: int
    rows: int
    reason: str


Event = Attached | Detached | Live | Behind | Rejected
