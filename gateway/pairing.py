"""What target and draft said of themselves, whether they fit, and what planning needs of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gateway.acceptance import Acceptance
from gateway.cell import Peer
from gateway.costs import Point, StepCosts
from gateway.links import check_pair, check_protocol
from gateway.nodes import NodeChooser
from gateway.pingpong import PingPong
from gateway.request import GenerateParams, ModelInfo
from gateway.settings import SchedulerSettings
from slipstream.errors import InvalidRequest, PairError
from slipstream.tree import TreeSpec, resolve_spec
from slipstream.v1 import common_pb2, draft_pb2, target_pb2
from slipstream.wire import ITEM_SIZE, MAX_FRAME


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pair gives the planner; `replay_rows` context rows fit the bytes a step may replay."""

    chooser: NodeChooser
    pingpong: PingPong
    block_size: int
    replay_rows: int


class Pairing:
    """The answers to Hello of both servers.

    Attributes:
        fits: both are there and fit.
        handoff_address: where targets reach the draft; valid once `fits`.
        info: what is served; its tree is how requests' trees are built.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.fits = False
        self.handoff_address = ""
        self.info: ModelInfo | None = None
        self._settings = settings
        self._target: target_pb2.TargetReady | None = None
        self._draft: draft_pb2.DraftReady | None = None
        self._shape: Shape | None = None
        self._shape_of: tuple[bytes, bytes] = (b"", b"")

    def target_ready(self, ready: target_pb2.TargetReady) -> ModelInfo:
        """Raises ProtocolError when it speaks another version."""
        check_protocol(Peer.TARGET, ready.protocol)
        self._target = ready
        self.info = ModelInfo(
            model=ready.model,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            eos_ids=tuple(ready.eos_ids),
            dtype=ready.dtype,
            slots=ready.slots,
            pages=ready.pages,
            page_size=ready.page_size,
            grammars=ready.grammars,
        )
        return self.info

    def draft_ready(self, ready: draft_pb2.DraftReady) -> None:
        """Raises ProtocolError when it speaks another version."""
        check_protocol(Peer.DRAFT, ready.protocol)
        self._draft = ready

    def target_lost(self) -> None:
        """The target must say anew what it is."""
        self._target, self.fits = None, False

    def draft_lost(self) -> None:
        """The draft must say anew what it is."""
        self._draft, self.fits = None, False

    def pair(self) -> Shape | None:
        """What both give together; None while one is missing.

        Raises PairError naming both values, ConfigError when the tree asked for is not possible.
        """
        target, draft = self._target, self._draft
        self.fits = False
        if target is None or draft is None:
            return None
        check_pair(target, draft)
        spec = self._spec(draft)
        self.handoff_address = draft.handoff_address or self._settings.draft or ""
        known = target_pb2.TargetReady()
        known.CopyFrom(target)
        known.ClearField("last_step")
        shape_of = (known.SerializeToString(), draft.SerializeToString())
        if self._shape is None or shape_of != self._shape_of:
            self._shape, self._shape_of = self._make(target, draft, spec), shape_of
        assert self.info is not None
        self.info = replace(self.info, block_size=draft.block_size, tree=spec)
        self.fits = True
        return self._shape

    def tree_of(self, params: GenerateParams) -> TreeSpec:
        """How a request's trees are built; only once `fits`."""
        info = self.info
        assert info is not None and info.tree is not None
        try:
            return params.tree(info.tree, info.block_size)
        except InvalidRequest:  # the draft came back with less than the request was checked by
            return info.tree

    def _spec(self, draft: draft_pb2.DraftReady) -> TreeSpec:
        """The tree of the cell: as the settings ask, else the draft's own."""
        wanted = self._settings
        try:
            if wanted.tree is None and wanted.width is None and wanted.budget is None:
                return TreeSpec.from_proto(draft.tree, draft.block_size)
        except InvalidRequest as error:
            raise PairError(f"tree: the draft offers one that is not possible: {error}") from error
        return resolve_spec(
            wanted.tree,
            wanted.width,
            wanted.budget,
            block_size=draft.block_size,
            beta=draft.tree.beta,
            gap0=draft.tree.gap0,
            spine=draft.tree.spine,
            shared_noise=draft.tree.shared_noise,
        )

    def _make(
        self, target: target_pb2.TargetReady, draft: draft_pb2.DraftReady, spec: TreeSpec
    ) -> Shape:
        block = draft.block_size
        costs = StepCosts(
            _points(target.decode_costs), _points(draft.draft_costs), block, draft.causal
        )
        # With a spine the first block_size nodes of every tree are its rank-0 path.
        chain = block if spec.is_chain or spec.spine else 1
        chooser = NodeChooser(
            costs,
            Acceptance(block, draft.acceptance, chain),
            spec.budget,
            block,
            target.max_nodes,
            self._settings.pin_nodes,
        )
        row_bytes = target.feature_width * ITEM_SIZE.get(target.feature_dtype, 4)
        return Shape(
            chooser,
            PingPong(self._settings.ping_pong, costs),
            block,
            max(MAX_FRAME // max(row_bytes, 1), 1),
        )


def _points(costs: Iterable[common_pb2.CostPoint]) -> list[Point]:
    return [(point.slots, point.rows, point.ns / 1e6) for point in costs]
