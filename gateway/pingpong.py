"""Whether the slots run as one group or as two that take turns.

With two groups the target verifies one while the draft drafts the other. It pays when
max(2 v(n/2), v(n/2) + d(n/2) + r) < v(n) + d(n) + r, with v verify, d draft and r handoff times of
n slots, measured at start-up. Where target and draft share processors those times do not add up
that way: two groups are tried only after one group was measured, and then the measurements decide.
"""

from __future__ import annotations

from gateway.costs import HANDOFF_MS, StepCosts
from gateway.settings import PingPongMode

PATIENCE = 64
"""Decode plans between two decisions: changing costs a pause of the slots that move."""

_GAIN = 1.05
_TRIAL = 24  # cycles measured before the measurement decides
_RETRY = 4096  # decode plans after which what was measured is forgotten
_EWMA = 0.1


class _Cycle:
    """Mean time per token of all slots, run one way."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.samples = 0

    def observe(self, ms: float) -> None:
        self.samples += 1
        self.ms += (ms - self.ms) * max(_EWMA, 1 / self.samples)


class PingPong:
    """The decision, per number of slots."""

    def __init__(self, mode: PingPongMode, costs: StepCosts) -> None:
        self.most_groups = 1 if mode == "off" else 2
        self._mode = mode
        self._costs = costs
        self._groups = 1
        self._slots = 0
        self._until = 0
        self._plans = 0
        self._cycles: dict[tuple[int, int], _Cycle] = {}

    def groups(self, slots: int, nodes: int, attached: bool) -> int:
        """Groups for `slots` decoding slots of `nodes` rows; asked once per decode plan."""
        self._plans += 1
        if self._mode == "off" or slots < 2 or not attached:
            self._groups = 1
        elif self._mode == "on":
            self._groups = 2
        elif self._plans >= self._until or slots.bit_length() != self._slots.bit_length():
            self._until = self._plans + PATIENCE
            self._slots = slots
            self._groups = self._decide(slots, nodes)
        if self._plans % _RETRY == 0:
            self._cycles.clear()
        return self._groups

    def observe(self, groups: int, slots: int, ms: float, tokens: int) -> None:
        """A step of one group, `slots` in all groups, took `ms` and gave `tokens`."""
        if tokens > 0:
            key = (groups, slots.bit_length())
            self._cycles.setdefault(key, _Cycle()).observe(ms / tokens)

    def _decide(self, slots: int, nodes: int) -> int:
        one = self._cycles.get((1, slots.bit_length()))
        two = self._cycles.get((2, slots.bit_length()))
        if one is None or one.samples < _TRIAL:
            return 1  # nothing to compare with yet
        if two is not None and two.samples >= _TRIAL:
            keep = _GAIN if self._groups == 1 else 1.0
            return 2 if two.ms * keep < one.ms else 1
        return 2 if self.pays(slots, nodes) else 1

    def pays(self, slots: int, nodes: int) -> bool:
        """The formula above."""
        if nodes <= 1:
            return False
        half = (slots + 1) // 2
        verify, verify_half = (self._costs.verify_ms(n, n * nodes) for n in (slots, half))
        draft, draft_half = (self._costs.draft_ms(n, nodes) for n in (slots, half))
        together = verify + draft + HANDOFF_MS
        return _GAIN * max(2 * verify_half, verify_half + draft_half + HANDOFF_MS) < together
