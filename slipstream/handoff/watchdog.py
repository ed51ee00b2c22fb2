"""How long a target waits for a proposal over `grpc` before it gives the session up."""

from __future__ import annotations

FLOOR_S = 2.0
FACTOR = 5.0
UNMEASURED_S = 10.0


class Watchdog:
    """Keeps the longest wait seen for each shape of step.

    A shape is (slots, rows), rows counted in powers of two: 33 rows take about as long as 40.
    """

    def __init__(self, fixed_ms: int | None = None) -> None:
        self._fixed = None if fixed_ms is None else fixed_ms / 1000
        self._longest: dict[tuple[int, int], float] = {}

    def limit(self, shape: tuple[int, int]) -> float:
        """Seconds to wait for a proposal of `shape`."""
        if self._fixed is not None:
            return self._fixed
        seen = self._longest.get(_bucket(shape))
        return UNMEASURED_S if seen is None else max(FLOOR_S, FACTOR * seen)

    def observe(self, shape: tuple[int, int], seconds: float) -> None:
        """Takes note of a wait that ended with a proposal."""
        key = _bucket(shape)
        self._longest[key] = max(seconds, self._longest.get(key, 0.0))


def _bucket(shape: tuple[int, int]) -> tuple[int, int]:
    slots, rows = shape
    return slots, rows.bit_length()
