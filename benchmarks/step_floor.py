"""No step is faster than its bytes over the copy bandwidth or its arithmetic over the matrix rate.

Bytes are weights that the step multiplies with (of the embedding only rows are read), keys and
values of the context, and features. Activations stay in caches and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.models import DraftConfig, ModelConfig
from slipstream.models.budget import (
    draft_token_bytes,
    draft_weight_bytes,
    target_token_bytes,
    target_weight_bytes,
)


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and operations that a step needs.

    Attributes:
        weights: bytes of weights, without fc.
        kv: bytes of keys and values, read and written.
        features: bytes of fc and of feature rows.
        operations: of matrix products and attention, two for each multiplication.
    """

    weights: float
    kv: float
    features: float
    operations: float

    def __add__(self, other: Floor) -> Floor:
        return Floor(
            self.weights + other.weights,
            self.kv + other.kv,
            self.features + other.features,
            self.operations + other.operations,
        )

    def ms(self, rates: Rates) -> float:
        """The larger of the two times."""
        moved = (self.weights + self.kv + self.features) / rates.copy
        return 1e3 * max(moved, self.operations / rates.matrix)

    def report(self, rates: Rates, measured_ms: float) -> dict[str, Any]:
        """Ready for JSON, with what `measured_ms` is of it, and of the weights alone."""
        floor, weights = self.ms(rates), 1e3 * self.weights / rates.copy
        return {
            "ms": round(floor, 4),
            "ratio": round(measured_ms / floor, 3),
            "weights_ms": round(weights, 4),
            "ratio_to_weights": round(measured_ms / weights, 3),
            "bytes": {
                "weights": int(self.weights), "kv": int(self.kv), "features": int(self.features)
            },
            "operations": int(self.operations),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes, and operations of matrix products, per second."""

    copy: float
    matrix: float


class Floors:
    """Floors of one pair; `item` bytes an element. Sliding windows are not looked at."""

    def __init__(self, config: ModelConfig, draft: DraftConfig, item: int) -> None:
        self._config, self._draft, self._item = config, draft, item
        matrix = config.vocab_size * config.hidden_size * item
        embedding = 0 if config.tie_word_embeddings else matrix
        self._head = matrix
        self._target = target_weight_bytes(config, None, item) - embedding
        self._fc = target_weight_bytes(config, draft, item) - self._target - embedding
        self._draft_weights = draft_weight_bytes(config, draft, item) - embedding
        self._feature = draft.hidden_size * item
        self._context = draft.hidden_size * draft_token_bytes(draft, item)  # all K and V as one

    def verify(self, slots: int, rows: int, context: float) -> Floor:
        """A decode step of `rows` rows in all; each slot commits one token."""
        kv = target_token_bytes(self._config, None, self._item)
        return Floor(
            weights=self._target,
            kv=(slots * context + rows) * kv,
            features=self._fc + slots * self._feature,
            operations=self._products(self._target + self._fc, rows)
            + self._attention(self._config, rows * context),
        )

    def draft(self, slots: int, context: float) -> Floor:
        """A block of each slot, after the rows of one token each were written."""
        draft, rows = self._draft, slots * self._draft.block_size
        kv = draft_token_bytes(draft, self._item)
        return Floor(
            weights=self._draft_weights,
            kv=(slots * (context + 1) + rows) * kv,
            features=slots * self._feature,
            operations=self._products(self._draft_weights - self._context, rows)
            + self._products(self._context, slots)
            + self._attention(draft, rows * context),
        )

    def prefill(self, rows: int, prefix: int, last: bool) -> Floor:
        """A chunk of one slot with features of all rows; the LM head counts where it is `last`."""
        layers = self._target - self._head
        kv = target_token_bytes(self._config, None, self._item)
        return Floor(
            weights=layers + (self._head if last else 0),
            kv=(prefix + rows) * kv,
            features=self._fc + rows * self._feature,
            operations=self._products(layers + self._fc, rows)
            + self._products(self._head, int(last))
            + self._attention(self._config, rows * (prefix + (rows + 1) / 2)),
        )

    def _products(self, weight_bytes: float, rows: int) -> float:
        return 2 * rows * weight_bytes / self._item

    @staticmethod
    def _attention(config: ModelConfig | DraftConfig, pairs: float) -> float:
        """Of so many pairs of a query row and a key row: scores, and their mix of the values."""
        return 4 * config.num_layers * config.num_heads * config.head_dim * pairs
