"""The slots as the engine keeps them: who occupies one, how far it is, which pages it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.target.commands import Reject
from services.target.pages import BlockTable, PagePool
from services.target.runner import Finish, SlotAdmit, TargetSpec
from slipstream.errors import InvalidRequest
from slipstream.v1 import common_pb2 as pb


class Refused(Exception):
    """A command or a plan entry cannot be carried out; becomes Rejected."""

    def __init__(self, code: Reject, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True)
class Slot:
    """One occupied slot.

    Invariant of a live slot: committed - 1 = KV rows = feature rows = start, cursor <= start. Until
    its prefill is complete `start` counts the rows prefilled and `committed` the tokens known.

    These say what is known. Steps on their way are in `planned` and `yields`: with them the slot is
    prefilled up to row `planned`, and may have `yields` more tokens.
    """

    number: int
    epoch: int
    admit: SlotAdmit
    table: BlockTable
    committed: int
    start: int = 0
    anchor: int = 0  # last committed token, once live
    live: bool = False
    finish: Finish = Finish.NONE
    cursor: int = 0  # feature rows given to the current session's draft
    planned: int = 0
    yields: int = 0

    @property
    def prefilled(self) -> bool:
        """Its prefill is complete, or on its way."""
        return self.planned >= self.admit.known_len

    @property
    def bound(self) -> int:
        """Rows that it has at most once all steps on their way have ended."""
        return min(max(self.start, self.planned) + self.yields, self.admit.limit)

    @property
    def finished(self) -> bool:
        """Ended by the target; its rows are padding until it is released."""
        return self.finish is not Finish.NONE

    @property
    def caught_up(self) -> bool:
        """The draft was given every row up to the anchor."""
        return self.live and self.cursor == self.start

    def publishable(self, most: int) -> int:
        """Feature rows to publish now, `most` being what this step allows."""
        return min(self.start - self.cursor, most) if self.admit.publish else 0

    def check(self, kv_rows: int, feature_rows: int) -> None:
        """Asserts the invariant, given what the runner holds."""
        held = (kv_rows, feature_rows, self.cursor <= self.start <= self.table.positions)
        assert held == (self.start, self.start, True), (
            f"slot {self.number}: start {self.start}, KV rows {kv_rows}, feature rows "
            f"{feature_rows}, cursor {self.cursor}, positions {self.table.positions}"
        )
        assert not self.live or self.committed - 1 == self.start, (
            f"slot {self.number}: committed {self.committed} - 1 != start {self.start}"
        )


class SlotTable:
    """Every slot of the target and the pages behind them.

    Invariant: pages of the slots + free pages = all pages.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self.pool = PagePool(spec.pages, spec.page_size)
        self._slots: list[Slot | None] = [None] * spec.slots
        self._last_epochs: list[int | None] = [None] * spec.slots

    def __iter__(self) -> Iterator[Slot]:
        return (slot for slot in self._slots if slot is not None)

    @property
    def empty(self) -> bool:
        """No slot is occupied."""
        return not any(slot is not None for slot in self._slots)

    def _in_range(self, number: int) -> None:
        if number >= self._spec.slots:
            raise Refused(
                pb.REJECT_CODE_SLOT_RANGE, f"slot: {number} is not in [0, {self._spec.slots})"
            )

    def find(self, number: int, epoch: int) -> Slot:
        """The occupied slot that a command names. Raises Refused."""
        self._in_range(number)
        slot = self._slots[number]
        if slot is None:
            raise Refused(pb.REJECT_CODE_SLOT_EMPTY, f"slot: {number} is empty")
        if slot.epoch != epoch:
            raise Refused(
                pb.REJECT_CODE_STALE_EPOCH,
                f"epoch: {epoch} is not that of slot {number}, {slot.epoch}",
            )
        return slot

    def holds(self, slot: Slot) -> bool:
        """Whether the slot is still occupied by this request."""
        return self._slots[slot.number] is slot

    def has_grammar(self, number: int) -> bool:
        """Whether the request in a slot, if there is one, has a grammar."""
        slot = self._slots[number] if number < len(self._slots) else None
        return slot is not None and slot.admit.grammar is not None

    def admit(self, number: int, epoch: int, request: SlotAdmit) -> None:
        """Occupies a slot; holds no pages yet. Raises Refused."""
        self._in_range(number)
        held = self._slots[number]
        if held is not None:
            raise Refused(
                pb.REJECT_CODE_STALE_EPOCH, f"slot: {number} is occupied by epoch {held.epoch}"
            )
        last = self._last_epochs[number]
        if last is not None and epoch <= last:
            raise Refused(
                pb.REJECT_CODE_STALE_EPOCH, f"epoch: {epoch} of slot {number} is not above {last}"
            )
        check_request(request, self._spec)
        table = BlockTable(self.pool)
        self._slots[number] = Slot(number, epoch, request, table, request.known_len)
        self._last_epochs[number] = epoch

    def release(self, slot: Slot) -> None:
        """Frees a slot and gives its pages back."""
        slot.table.release()
        self._slots[slot.number] = None

    def forget_epochs(self) -> None:
        """A new gateway counts epochs anew; every slot must be free."""
        assert self.empty, "epochs cannot be forgotten while a slot is occupied"
        self._last_epochs = [None] * self._spec.slots

    def check(self, lengths: Callable[[int], tuple[int, int]]) -> None:
        """Asserts the invariants; `lengths` is the runner's."""
        for slot in self:
            slot.check(*lengths(slot.number))
        self.pool.check(slot.table.pages for slot in self)


MAX_LOGPROBS = 20
"""Most alternatives per token."""


def check_request(request: SlotAdmit, spec: TargetSpec) -> None:
    """Raises Refused naming the field that cannot be served."""
    if not request.prompt_ids:
        raise Refused(pb.REJECT_CODE_LENGTH, "prompt_ids: empty")
    scored = request.prompt_logprobs is not None and not request.output_ids
    least = request.known_len + (0 if scored else 1)
    if not least <= request.limit <= spec.max_model_len:
        raise Refused(
            pb.REJECT_CODE_LENGTH,
            f"limit: {request.limit} is not above the {request.known_len} tokens given and at most "
            f"{spec.max_model_len}",
        )
    for name, ids in (
        ("prompt_ids", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_ids", request.stop_ids),
    ):
        if ids and max(ids) >= spec.vocab_size:
            raise Refused(
                pb.REJECT_CODE_BAD_VALUE, f"{name}: {max(ids)} is not in [0, {spec.vocab_size})"
            )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(request, name)
        if wanted is not None and wanted > MAX_LOGPROBS:
            raise Refused(pb.REJECT_CODE_BAD_VALUE, f"{name}: {wanted} is more than {MAX_LOGPROBS}")
    if request.grammar is not None and not spec.grammars:
        raise Refused(pb.REJECT_CODE_BAD_VALUE, "grammar: this target matches none")
    try:
        request.sampling.validate(spec.vocab_size)
    except InvalidRequest as error:
        raise Refused(pb.REJECT_CODE_BAD_VALUE, f"sampling: {error}") from error
