"""What the engine asks of whatever computes steps, and the words both speak.

The engine owns slots, pages, sessions and order; a runner owns tensors, the sampling state of each
slot, and nothing that another process named. Everything here is free of torch, so that a fake
runner needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from slipstream.grammar import Grammar
from slipstream.handoff.base import DeviceTargetEnd
from slipstream.params import SamplingParams
from slipstream.tree import Tree, repair
from slipstream.wire import MAX_NODES

if TYPE_CHECKING:
    from slipstream.handoff.cuda_ipc import Export


class Finish(StrEnum):
    """Why the target ended a request; the words of `slipstream.tree.cut`."""

    NONE = "none"
    STOP = "stop"
    LIMIT = "limit"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Measured time of one decode step of `slots` requests and `rows` rows in all."""

    slots: int
    rows: int
    ns: int


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What TargetReady says of a target.

    `feature_width` 0: no draft head was given, nothing can be published. `grammars`: requests with
    a grammar are served. `most_commits`: tokens that a slot may commit in one step, which is what
    a step that is on its way may have added to it.
    """

    model: str
    vocab_size: int
    max_model_len: int
    slots: int
    pages: int
    page_size: int
    max_nodes: int
    max_prefill_rows: int
    feature_width: int = 0
    feature_dtype: str = "float32"
    fingerprints: dict[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    decode_costs: tuple[CostPoint, ...] = ()
    dtype: str = "float32"
    grammars: bool = False
    most_commits: int = MAX_NODES

    @property
    def max_positions(self) -> int:
        """Most positions of one slot: committed tokens and the scratch of the last tree."""
        return self.max_model_len + self.max_nodes


@dataclass(frozen=True, slots=True)
class SlotAdmit:
    """A request that takes a slot; `limit` is its number of committed tokens at the end.

    `logprobs`: None for none, k for the drawn token's own and the k best; `prompt_logprobs`
    likewise of the prompt's tokens. `grammar`: what the answer may be, None for anything.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    limit: int
    min_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingParams
    logprobs: int | None
    publish: bool
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def only_scored(self) -> bool:
        """Whether no token is drawn: the request ends with its prefill."""
        return self.limit == self.known_len

    @property
    def known_len(self) -> int:
        """Tokens known at admission: what prefill covers."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """Positions first .. first + count - 1 of a slot's known tokens.

    `pages` is the slot's block table, valid during the call.
    """

    slot: int
    first: int
    count: int
    last: bool
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodeEntry:
    """One slot of a decode step; `anchor` sits at position `start`, its KV slot.

    `proposed` is what a peer wrote, tokens and parents, and may be anything: the runner repairs it
    to a tree of at most `nodes` nodes; None is plain decode, unless what a peer wrote is `linked`:
    it lies on the device, and branches at most where `branches` says so. The slot's pages hold
    start + nodes positions.

    A runner that runs ahead is told of `start` and `anchor` what was known when the step began:
    start may have grown since, and nothing may depend on the anchor.
    """

    slot: int
    start: int
    anchor: int
    nodes: int
    proposed: tuple[Sequence[int], Sequence[int]] | None
    pages: Sequence[int]
    linked: bool = False
    branches: bool = False

    @property
    def rows(self) -> int:
        """Most rows of this slot in the step."""
        return self.nodes if self.linked or self.proposed is not None else 1

    def tree(self, vocab_size: int) -> Tree:
        """The tree to verify; its node 0 is the anchor."""
        tokens, parents = self.proposed or ((), ())
        return repair(tokens, parents, nodes=self.nodes, vocab_size=vocab_size, anchor=self.anchor)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-softmax of raw logits at one token: its own, and the best (id, value) pairs."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class EntryResult:
    """What one entry committed.

    `accepted` counts draft nodes on the walked path before any cut at a stop id or the limit;
    `nodes` the rows verified (0 for prefill). `prompt_logprobs`: of the prompt's tokens after each
    row of a chunk, as far as there are such. With `finish` ERROR nothing was committed.
    """

    tokens: Sequence[int] = ()
    finish: Finish = Finish.NONE
    logprobs: Sequence[Logprob] = ()
    nodes: int = 0
    accepted: int = 0
    prompt_logprobs: Sequence[Logprob] = ()


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """Feature rows first .. first + count - 1 of a slot."""

    slot: int
    first: int
    count: int


class TargetRunner(Protocol):
    """Computes steps. Called by one thread; results are on the host when a call returns.

    Entries are valid: the engine has checked slots, lengths and pages. A prefill entry with `last`
    draws the token at position `first + count`, unless the request is `only_scored`: it then ends
    there with LIMIT. A decode entry draws, walks, cuts and commits KV,
    features and sampling state, so that the slot's rows are `start + len(tokens)` afterwards.
    """

    @property
    def spec(self) -> TargetSpec: ...

    def admit(self, slot: int, admit: SlotAdmit) -> None:
        """Takes the slot; the engine has checked every field but the grammar.

        Raises InvalidRequest, taking nothing, when the grammar cannot be compiled or the output so
        far does not follow it.
        """
        ...

    def release(self, slot: int) -> None:
        """Forgets the slot's request; its pages may be given to others at once."""
        ...

    def prefill(self, entries: Sequence[PrefillEntry]) -> list[EntryResult]: ...

    def decode(self, entries: Sequence[DecodeEntry]) -> list[EntryResult]: ...

    def features(self, spans: Sequence[FeatureSpan]) -> bytes | memoryview:
        """Feature rows of all spans in order, raw little-endian; valid until the next call."""
        ...

    def lengths(self, slot: int) -> tuple[int, int]:
        """(KV rows, feature rows) that the slot holds; feature rows = KV rows without a head."""
        ...


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """One entry of a plan.

    Attributes:
        most: context rows to publish at most.
        first_node: its first node among those of the whole plan.
        job: its place among the entries that the runner is given; -1: it is not.
        live: whether its rows end at an anchor after this step.
    """

    slot: int
    epoch: int
    most: int
    first_node: int
    job: int
    live: bool


@dataclass(frozen=True, slots=True)
class Link:
    """A step that a draft takes part in: every entry of its plan, in order.

    `awaits`: whether any of them may have a proposal.
    """

    end: DeviceTargetEnd
    step: int
    entries: Sequence[LinkEntry]
    awaits: bool


@dataclass(frozen=True, slots=True)
class Stamps:
    """When a step happened, in ns of its GPU's clock; `draft_*` of the draft's GPU, 0 without."""

    began: int = 0
    draft_began: int = 0
    draft_ended: int = 0
    ended: int = 0


class Flight(Protocol):
    """A step on its way."""

    def wait(self) -> None:
        """Until its results are on the host. Any one thread."""
        ...

    def results(self) -> Sequence[EntryResult]:
        """One for each entry; once, in the order of steps, by the thread that started it."""
        ...

    def stamps(self) -> Stamps: ...


class RunAheadRunner(TargetRunner, Protocol):
    """Starts a step before the ones before it have ended; nothing of that waits for the device.

    A step with a grammar is started when nothing else is on its way. `link`: what the step
    exchanges with a draft; its entries are all those of the plan, computed or not, and `entries`
    may be empty.
    """

    @property
    def shared(self) -> Export | None:
        """The memory that drafts may map; None: there is none."""
        ...

    def start_prefill(self, entries: Sequence[PrefillEntry], link: Link | None) -> Flight: ...

    def start_decode(self, entries: Sequence[DecodeEntry], link: Link | None) -> Flight: ...

    def rewind(self, slot: int, rows: int) -> None:
        """Sets the publish cursor of a slot, for the steps started from now on."""
        ...

    def rewind_all(self) -> None:
        """A new session begins: its draft was given nothing."""
        ...

    def at_rest(self) -> bool:
        """Nothing is on its way: what waits for the device can be done, for 10 ms or so.

        Returns whether that was all; else it is called again, should the pause go on.
        """
        ...
