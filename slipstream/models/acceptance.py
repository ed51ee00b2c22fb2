"""How far a head's drafts are accepted, as its model card says: a prior for planning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.models.config import read_json

FILE = "acceptance.json"


def read_acceptance(draft_folder: Path) -> list[float] | None:
    """Probability that the draft at depth 1, 2, ... is accepted given that all before it were.

    Chain drafts, greedy, averaged over the card's prompt sets. None when the head has no such file.
    Raises ConfigError when the file holds something else.
    """
    path = draft_folder / FILE
    if not path.exists():
        return None
    values: Any = read_json(path).get("chain")
    if not isinstance(values, list) or not all(
        isinstance(v, (int, float)) and 0.0 <= v <= 1.0 for v in values
    ):
        raise ConfigError(f"{path}: chain must be a list of probabilities, got {values!r}")
    return [float(v) for v in values]
