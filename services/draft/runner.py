"""What the engine needs of a draft model: context pages per session, rows in, trees out.

`services.draft.model_runner` is the real one; the tests have one without a model. The engine
guarantees: calls of one DraftContext come from one thread, calls of all contexts of a runner never
overlap, rows of a slot are written in order without gaps, and `draft` is only asked for a slot
whose rows up to `start` are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.handoff.base import DeviceDraftEnd, PeerSpec
from slipstream.tree import Tree, TreeSpec
from slipstream.wire import DTYPES, ITEM_SIZE

if TYPE_CHECKING:
    from services.draft.session import DevicePart, Session


class NoPages(Exception):
    """A session has too few free context pages; nothing was changed."""


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What a draft model says of itself.

    Attributes:
        model: name for logs and for the gateway.
        block_size: anchor + drafts of one block.
        causal: every layer is block-causal, so a shorter block drafts the same.
        feature_width, feature_dtype: the context rows it takes.
        fingerprints: of fc, hidden_norm, embedding and lm_head.
        slots, pages, page_size: of one session.
        acceptance: expected acceptance by depth from the model's folder; empty when unknown.
    """

    model: str
    block_size: int
    mask_token_id: int
    causal: bool
    vocab_size: int
    feature_width: int
    feature_dtype: str
    slots: int
    pages: int
    page_size: int
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    acceptance: tuple[float, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one context row."""
        return self.feature_width * ITEM_SIZE[DTYPES[self.feature_dtype]]

    @property
    def peer(self) -> PeerSpec:
        """What a target must agree with."""
        return PeerSpec(
            feature_width=self.feature_width,
            feature_dtype=self.feature_dtype,
            vocab_size=self.vocab_size,
            slots=self.slots,
            fingerprints=dict(self.fingerprints),
        )


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Time of a draft step measured at start-up; `rows` are the block rows of the step."""

    slots: int
    rows: int
    ns: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a request wants its trees; temperature, seed and choice name its noise."""

    tree: TreeSpec
    temperature: float = 0.0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Raw context features of one slot: positions first_row .. first_row + count - 1."""

    slot: int
    first_row: int
    count: int
    rows: memoryview


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """A tree is wanted for `slot`: anchor at position `start`, at most `nodes` nodes (>= 2)."""

    slot: int
    start: int
    anchor: int
    nodes: int


class DraftContext(Protocol):
    """The draft's context cache of one session."""

    def admit(self, slot: int, drafting: Drafting) -> None:
        """Takes an empty slot."""
        ...

    def reserve(self, slot: int, rows: int) -> None:
        """Makes room for `rows` context rows in all, and for a block after them.

        Raises NoPages.
        """
        ...

    def write(self, rows: Sequence[ContextRows]) -> None:
        """Takes rows of reserved positions; the bytes are read before it returns."""
        ...

    def draft(self, entries: Sequence[DraftEntry]) -> list[Tree]:
        """One tree per entry, in order; changes nothing that a later call could see."""
        ...

    def release(self, slot: int) -> None:
        """Frees a slot and its pages."""
        ...

    def close(self) -> None:
        """Frees everything; the context is not used again."""
        ...


class DeviceEnd(DeviceDraftEnd, Protocol):
    """The draft's side of a session over memory that both processes map."""

    @property
    def memory(self) -> Any:
        """The target's, `slipstream.kernels.peer.Memory`; not used any more after `close`."""
        ...


class Devices(Protocol):
    """What a runner has whose sessions may stay on devices."""

    @property
    def mapper(self) -> Any:
        """Maps targets' memory; goes to where targets come in."""
        ...

    def connect(self, session: Session, end: DeviceEnd, tell: Callable[[Any], None]) -> DevicePart:
        """The session's part; `tell` is called on any thread with what it is to `settle`."""
        ...


class DraftRunner(Protocol):
    """A draft model, loaded."""

    spec: DraftSpec

    @property
    def devices(self) -> Devices | None:
        """None where every session goes through the host."""
        ...

    def open_context(self) -> DraftContext:
        """The cache of a new session, empty."""
        ...

    def warm_up(self, tree: TreeSpec) -> list[DraftCost]:
        """Runs every shape that serving will run, and says what steps cost for trees of `tree`."""
        ...
