"""What kind of tree a request wants: the spec, its defaults and limits, its JSON and wire forms."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slipstream.errors import ConfigError, InvalidRequest
from slipstream.v1 import draft_pb2 as pb
from slipstream.wire import MAX_NODES

DEFAULT_WIDTH = 4
DEFAULT_BUDGET = 64
UNPINNED_BUDGET = 32
"""Budget when neither mode, width nor budget is given: the tree that is served by default."""


class TreeMode(StrEnum):
    """Order in which a tree takes its nodes."""

    CHAIN = "chain"
    TOP2GAP = "top2gap"
    ACCUM_LOGP = "accum_logp"
    BEST_FIRST = "best_first"


_TO_PROTO: dict[TreeMode, pb.TreeMode.ValueType] = {
    TreeMode.CHAIN: pb.TREE_MODE_CHAIN,
    TreeMode.TOP2GAP: pb.TREE_MODE_TOP2GAP,
    TreeMode.ACCUM_LOGP: pb.TREE_MODE_ACCUM_LOGP,
    TreeMode.BEST_FIRST: pb.TREE_MODE_BEST_FIRST,
}
_FROM_PROTO = {number: mode for mode, number in _TO_PROTO.items()}


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """How a request's trees are built.

    Attributes:
        width: children per node at most; 1 is the chain, whatever the mode.
        budget: nodes at most, root included.
        beta, gap0: steepness and centre of top2gap's fan-out curve.
        spine: whether the rank-0 path goes in first.
        shared_noise: at temperature > 0 the draft ranks candidates with the request's own noise.
    """

    mode: TreeMode
    width: int
    budget: int
    beta: float = 1.0
    gap0: float = 1.0
    spine: bool = True
    shared_noise: bool = True

    @property
    def is_chain(self) -> bool:
        """Whether trees of this spec are linear."""
        return self.width == 1 or self.mode is TreeMode.CHAIN

    def to_proto(self) -> pb.TreeSpec:
        return pb.TreeSpec(
            mode=_TO_PROTO[self.mode],
            width=self.width,
            budget=self.budget,
            beta=self.beta,
            gap0=self.gap0,
            spine=self.spine,
            shared_noise=self.shared_noise,
        )

    @classmethod
    def from_proto(cls, message: pb.TreeSpec, block_size: int) -> TreeSpec:
        """Raises InvalidRequest naming the field and the bad value."""
        mode = _FROM_PROTO.get(message.mode)
        if mode is None:
            raise InvalidRequest(f"tree mode {message.mode} is unknown", param="mode")
        spec = cls(
            mode=mode,
            width=message.width,
            budget=message.budget,
            beta=message.beta,
            gap0=message.gap0,
            spine=message.spine,
            shared_noise=message.shared_noise,
        )
        problem = _problem(spec, block_size)
        if problem is not None:
            raise InvalidRequest(problem[1], param=problem[0])
        return spec


def needed_budget(spec: TreeSpec, block_size: int) -> int:
    """The smallest budget a spec may have: the whole spine, else the root and one draft."""
    return max(2, block_size) if spec.spine else 2


def _problem(spec: TreeSpec, block_size: int) -> tuple[str, str] | None:
    """The first bad field and a sentence about it, or None."""
    if not 1 <= spec.width < MAX_NODES:
        return "width", f"width must be between 1 and {MAX_NODES - 1}, got {spec.width}"
    if spec.mode is TreeMode.CHAIN and spec.width != 1:
        return "width", f"a chain has width 1, got width {spec.width}"
    needed = needed_budget(spec, block_size)
    if spec.budget < needed:
        why = f"a spine of block size {block_size}" if spec.spine else "a draft"
        return "budget", (
            f"budget must be at least {needed} (root included) for {why}, got {spec.budget}"
        )
    if spec.budget > MAX_NODES:
        return "budget", f"budget must be at most {MAX_NODES}, got {spec.budget}"
    if not (math.isfinite(spec.beta) and spec.beta >= 0):
        return "beta", f"beta must be a number of at least 0, got {spec.beta}"
    if not math.isfinite(spec.gap0):
        return "gap0", f"gap0 must be a finite number, got {spec.gap0}"
    return None


def full_size(block_size: int, width: int) -> int:
    """Nodes, root included, of the tree with `width` children at each node above the last depth."""
    if width <= 1:
        return block_size
    return int((width**block_size - 1) // (width - 1))


def resolve_spec(
    mode: str | None = None,
    width: int | None = None,
    budget: int | None = None,
    *,
    block_size: int,
    beta: float = 1.0,
    gap0: float = 1.0,
    spine: bool = True,
    shared_noise: bool = True,
) -> TreeSpec:
    """Fills in what is not given and checks the rest.

    Mode: chain at width 1, else top2gap. Width: 1 for a chain; as many as the budget can use for
    best_first; else 4. Budget: block_size at width 1, else the smaller of the full tree and 64 (32
    when nothing at all is given), but never less than the spine needs; a budget above the full tree
    is cut to it.

    Raises ConfigError naming the key, the bad value and the number that is needed.
    """
    kind = _mode(mode, width)
    unpinned = mode is None and width is None and budget is None
    if width is None:
        if kind is TreeMode.CHAIN:
            width = 1
        elif kind is TreeMode.BEST_FIRST:
            width = max(1, (DEFAULT_BUDGET if budget is None else budget) - 1)
        else:
            width = DEFAULT_WIDTH
    full = full_size(block_size, width) if width < MAX_NODES else MAX_NODES
    if budget is None:
        wanted = UNPINNED_BUDGET if unpinned else DEFAULT_BUDGET
        budget = min(full, max(wanted, block_size)) if width > 1 else block_size
    spec = TreeSpec(kind, width, min(budget, full), beta, gap0, spine, shared_noise)
    problem = _problem(spec, block_size)
    if problem is not None:
        raise ConfigError(problem[1])
    return spec


def _mode(mode: str | None, width: int | None) -> TreeMode:
    if mode is None:
        return TreeMode.CHAIN if width == 1 else TreeMode.TOP2GAP
    try:
        return TreeMode(mode)
    except ValueError:
        raise ConfigError(f"tree must be one of {', '.join(TreeMode)}, got {mode!r}") from None


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "tree": (str,),
    "width": (int,),
    "budget": (int,),
    "beta": (int, float),
    "gap0": (int, float),
    "spine": (bool,),
    "shared_noise": (bool,),
}


def parse_speculative_config(json_text: str, block_size: int) -> TreeSpec:
    """A spec from a JSON object; its keys are those of `read_speculative_config`.

    Raises ConfigError for what that or `resolve_spec` refuses.
    """
    return resolve_spec(block_size=block_size, **read_speculative_config(json_text))


def read_speculative_config(json_text: str) -> dict[str, Any]:
    """The arguments for `resolve_spec` in a JSON object, for checks before a head is known.

    Its keys are the fields of TreeSpec, all optional; `tree` is another name of `mode`.

    Raises ConfigError naming an unknown key or a value of the wrong type.
    """
    try:
        given: Any = json.loads(json_text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"speculative config is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"speculative config must be a JSON object, got {json_text}")
    for key, value in given.items():
        if key not in _JSON_TYPES:
            raise ConfigError(
                f"speculative config has no key {key!r}; known are {', '.join(_JSON_TYPES)}"
            )
        types = _JSON_TYPES[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"speculative config: {key} has a wrong type, got {value!r}")
    if "mode" in given and "tree" in given:
        raise ConfigError("speculative config: give mode or tree, not both")
    if "tree" in given:
        given["mode"] = given.pop("tree")
    return given
