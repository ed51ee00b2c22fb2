"""What a step costs: the servers' measurements at start-up, interpolated by slots and rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

HANDOFF_MS = 0.4
"""Context and proposal over the wire, before anything was measured."""

Point = tuple[int, int, float]
"""Slots, rows, ms."""

_FALLBACK: tuple[Point, ...] = ((1, 1, 10.0), (1, 16, 20.0), (8, 8, 15.0), (8, 128, 60.0))


class CostCurve:
    """Time of a step in ms by its slots and rows: linear between and beyond the measured points."""

    def __init__(self, points: Iterable[Point]) -> None:
        by_slots: dict[int, dict[int, float]] = {}
        for slots, rows, ms in points:
            by_slots.setdefault(slots, {})[rows] = ms
        self._slots = sorted(by_slots)
        self._curves = [sorted(by_slots[slots].items()) for slots in self._slots]

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._slots)

    def ms(self, slots: int, rows: int) -> float:
        """Expected time; at least a microsecond."""
        right = bisect_right(self._slots, slots)
        if right == 0 or right == len(self._slots):
            # Fewer or more slots than measured: rows decide.
            return max(_line(self._curves[max(right - 1, 0)], rows), 1e-3)
        low, high = self._slots[right - 1], self._slots[right]
        share = (slots - low) / (high - low)
        below = _line(self._curves[right - 1], rows)
        if share == 0:
            return max(below, 1e-3)
        return max(below + share * (_line(self._curves[right], rows) - below), 1e-3)


def _line(points: list[tuple[int, float]], rows: int) -> float:
    """Piecewise linear through `points`, flat to the left, never falling to the right."""
    if rows <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right(points, (rows, float("inf"))), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    if rows > x1:
        return y1 + max(slope, 0.0) * (rows - x1)
    return y0 + slope * (rows - x0)


class StepCosts:
    """Expected time of a whole decode step: draft, handoff and verify.

    Args:
        verify, draft: points measured by target and draft at start-up.
        block_size: rows of a draft block.
        causal: the draft computes only the depths that the plan needs.
    """

    def __init__(
        self,
        verify: Iterable[Point],
        draft: Iterable[Point],
        block_size: int,
        causal: bool,
    ) -> None:
        measured = CostCurve(verify)
        self._verify = measured if measured.known else CostCurve(_FALLBACK)
        self._draft = CostCurve(draft)
        self._block_size = block_size
        self._causal = causal

    def verify_ms(self, slots: int, rows: int) -> float:
        """The target's part."""
        return self._verify.ms(slots, rows)

    def draft_ms(self, slots: int, nodes: int) -> float:
        """The draft's part for `slots` trees of `nodes` nodes."""
        if nodes <= 1 or slots == 0:
            return 0.0
        depths = min(nodes, self._block_size) if self._causal else self._block_size
        if not self._draft.known:
            return 0.3 * self._verify.ms(slots, slots * depths)
        return self._draft.ms(slots, slots * depths)

    def step_ms(self, nodes: int, drafted: int, plain: int, paired: bool) -> float:
        """One decode step of `drafted` slots with `nodes` rows and `plain` ones with one.

        With ping-pong (`paired`) two groups share the cycle max(2 v, v + d + r), one step each.
        """
        verify = self._verify.ms(drafted + plain, drafted * nodes + plain)
        if nodes <= 1 or drafted == 0:
            return verify
        serial = verify + self.draft_ms(drafted, nodes) + HANDOFF_MS
        return max(verify, serial / 2) if paired else serial
