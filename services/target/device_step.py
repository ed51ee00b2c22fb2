"""A step on the device: buffers of fixed address, and the work that is recorded over them.

A decode step is three pieces of work. Intake takes the plan and the proposals in and repairs them,
forward runs the model, finish draws at every row, walks, commits and moves lengths on. None of them
depends on anything that the host learned from the step before; which of the recorded pieces runs
depends on the rows (padded to a bucket), on whether a proposal may be a tree, and on how tokens are
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.target.device_masks import HostMasks
from services.target.device_slots import DeviceSlots, SamplerClass
from services.target.kv_cache import KVCache
from services.target.link_input import LinkInput, Shared, rings_of
from services.target.step_input import StepInput
from slipstream.kernels.attention import TritonAttention
from slipstream.kernels.commit import move_kv, norm_scatter
from slipstream.kernels.draw import Draws, DrawScratch, draw_full, draw_greedy
from slipstream.kernels.handoff import STAMPS, mark, publish_context, take_proposal
from slipstream.kernels.intake import (
    StepPlan,
    TreeRows,
    prepare_prefill,
    prepare_rows,
)
from slipstream.kernels.norm import embed, head
from slipstream.kernels.score import score
from slipstream.kernels.tables import set_starts, update_tables
from slipstream.kernels.walk import Walks, walk
from slipstream.layers.attention_device import DeviceAttention, TorchAttention
from slipstream.layers.device_rows import DeviceRows, Mask
from slipstream.layers.graphs import Graphs, Work, bucket_of, buckets
from slipstream.layers.rows import WORD
from slipstream.models import CausalLM, ContextProjector
from slipstream.models.fused import FusedDecoder
from slipstream.wire import MAX_NODES

LOGIT_BYTES = 512 << 20
"""Most memory of logits: the rows of a step are drawn in slices of so much."""

CLASSES: tuple[SamplerClass, ...] = ("greedy", "full")


Attend = Callable[[int, Tensor], Tensor]
Progress = Callable[[int, int], None]
"""Called with the pieces recorded and how many there are."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the buffers of a step are made for.

    Attributes:
        decode_rows: rows of a decode step at most; larger ones are cut by entries.
        prefill_rows: rows of a prefill step at most.
        recorded_prefill_rows: prefill steps of up to so many rows are recorded whole; the others
            are launched piece by piece, which costs nothing once a piece takes long enough.
    """

    decode_rows: int
    prefill_rows: int
    recorded_prefill_rows: int

    @property
    def rows(self) -> int:
        return max(self.decode_rows, self.prefill_rows)


class DeviceStep:
    """The target's model, its buffers and its recorded work.

    Attributes:
        input: what the host says of a step; sent before the work is run.
        rows, trees: of the running step.
        link: what the host says of its draft; sent before the work is run.
        draws, walks: what came of it.
        stamps: (STAMPS,) int64, when it happened; see `slipstream.kernels.handoff`.
        masks: what grammars allow at its rows.
        scores: log-probabilities of prompt tokens, by row of a prefill step.
        hidden: (R, H) after the final norm.
        mixed: (R, heads * hd), where attention leaves its result.
    """

    def __init__(
        self,
        model: CausalLM,
        projector: ContextProjector | None,
        taps: Sequence[int],
        slots: DeviceSlots,
        cache: KVCache,
        *,
        max_pages: int,
        sizes: Sizes,
        attention: str,
        graphs: Graphs,
        grammars: bool = False,
        most_commits: int = MAX_NODES,
        shared: Shared | None = None,
    ) -> None:
        """`max_pages`: of one slot. `attention`: the backend of verify and decode.

        `grammars`: there is room for masks. `most_commits`: tokens that a slot commits in a step at
        most. `shared`: the memory that a draft may map, with the features of `cache`.
        """
        self.device, self.graphs, self.sizes = graphs.device, graphs, sizes
        self._model, self._projector = model, projector
        self._taps = tuple(taps) if projector is not None else ()
        self._slots, self._cache = slots, cache
        config, device = model.config, self.device
        count, dtype = len(slots.start), model.vocabulary.embedding.dtype
        entries = min(count, sizes.rows)
        # What a draft maps it may write, so the target's own tables lie elsewhere.
        self._shown_tables, self._rings = rings_of(shared, count, max_pages, device)
        tables = torch.zeros(count, max_pages, dtype=torch.int32, device=device)
        self.input = StepInput(sizes.rows, entries, device)
        self.link = LinkInput(count, device)
        self.stamps = torch.zeros(STAMPS, dtype=torch.int64, device=device)
        self._most_commits = most_commits
        self.rows = DeviceRows.allocate(sizes.rows, entries, tables, device, MAX_NODES // WORD)
        self.trees = TreeRows.allocate(sizes.rows, entries, device)
        drawn = max(sizes.decode_rows, entries)  # first tokens are a row for each entry
        self.draws = Draws.allocate(drawn, slots.max_logprobs, device)
        self.masks = HostMasks(drawn if grammars else 1, config.vocab_size, device)
        self.scores = Draws.allocate(sizes.prefill_rows, slots.max_logprobs, device)
        self.walks = Walks.allocate(drawn, entries, MAX_NODES, device)
        self._first_trees = TreeRows.allocate(entries, entries, device)
        self._decoder = FusedDecoder(
            model.layers, model.norm, model.rope, max_pages * cache.page_size, sizes.rows
        )
        self._embedded = torch.zeros(sizes.rows, config.hidden_size, dtype=dtype, device=device)
        self.hidden = torch.zeros_like(self._embedded)
        self.mixed = torch.zeros(
            sizes.rows, config.num_heads * config.head_dim, dtype=dtype, device=device
        )
        width = len(self._taps) * config.hidden_size
        self._tapped = torch.zeros(sizes.rows, width, dtype=dtype, device=device)
        self._projected = torch.zeros(
            sizes.rows if width else 0, cache.features.shape[1], dtype=dtype, device=device
        )
        self._picked = torch.zeros(entries, config.hidden_size, dtype=dtype, device=device)
        slice_rows = max(1, min(sizes.decode_rows, LOGIT_BYTES // (4 * config.vocab_size)))
        self._logits = torch.zeros(slice_rows, config.vocab_size, device=device)
        self._scratch = DrawScratch(slice_rows, config.vocab_size, device)
        self.decode_buckets = buckets(sizes.decode_rows)
        self.prefill_buckets = buckets(sizes.prefill_rows)
        self.first_buckets = buckets(entries)
        self._attention = self._make_attention(attention)
        self._work: dict[tuple[object, ...], Work] = {}

    def _make_attention(self, backend: str) -> dict[int, DeviceAttention]:
        """An attention of each bucket that any step uses."""
        config = self._model.config
        sizes = sorted({*self.decode_buckets, *self.prefill_buckets})
        shape = (
            config.num_heads, config.num_kv_heads, config.head_dim, self._cache.page_size,
            self._embedded.dtype,
        )  # fmt: skip
        if backend == "torch":
            return {size: TorchAttention(self.rows.first(size), *shape) for size in sizes}
        return dict(TritonAttention.for_buckets(self.rows, sizes, *shape))

    def record(self, progress: Progress) -> None:
        """Runs every piece of work once and records it."""
        self._work = self.graphs.record(self._pieces(), progress)

    def _pieces(self) -> dict[tuple[object, ...], Work]:
        """All that is recorded, the largest first: they need the most memory."""
        pieces: dict[tuple[object, ...], Work] = {
            ("tables",): self._update_tables,
            ("mark",): self._mark,
            ("publish",): self._publish,
        }
        for size in reversed(self.decode_buckets):
            for tree in (False, True):
                pieces["intake", size, tree] = partial(self._intake, size, tree)
                pieces["forward", size, tree] = partial(self._forward, size, tree)
                for kind in CLASSES:
                    pieces["finish", size, tree, kind] = partial(self._finish, size, tree, kind)
        for size in reversed(self.prefill_buckets):
            pieces["known", size] = partial(self._known, size)
            if size <= self.sizes.recorded_prefill_rows:
                pieces.setdefault(("forward", size, False), partial(self._forward, size, False))
            pieces["features", size] = partial(self._store_features, size)
        for size in reversed(self.first_buckets):
            for kind in CLASSES:
                pieces["first", size, kind] = partial(self._first, size, kind)
        return pieces

    # What the runner calls, the input having been sent

    def intake(self, rows: int, tree: bool) -> None:
        """Takes in the decode step in the input, which has `rows` rows."""
        self._work["intake", bucket_of(self.decode_buckets, rows), tree]()

    def forward(self, rows: int, tree: bool) -> None:
        """Runs the model over what `intake` took in."""
        self._work["forward", bucket_of(self.decode_buckets, rows), tree]()

    def finish(self, rows: int, tree: bool, kind: SamplerClass) -> None:
        """Draws, walks and commits what `forward` ran; reads `masks` where a slot has a grammar."""
        self._work["finish", bucket_of(self.decode_buckets, rows), tree, kind]()

    def prefill_bucket(self, rows: int) -> int:
        """Rows that a prefill step of `rows` rows is padded to."""
        return bucket_of(self.prefill_buckets, rows)

    def prefill(self, rows: int, attend: Attend | None) -> None:
        """The prefill step in the input: its rows' KV and features, and `hidden`.

        `attend` computes the attention of (layer, q of the bucket's rows); None: this step's own.
        """
        size = self.prefill_bucket(rows)
        self._work["known", size]()
        if attend is None and ("forward", size, False) in self._work:
            self._work["forward", size, False]()
        else:
            self._forward(size, False, attend)
        if self._projector is not None:
            self._work["features", size]()

    def score(self, rows: int) -> None:
        """Scores the tokens that the input of the prefill step of `rows` rows names."""
        hidden = self.hidden[: self.prefill_bucket(rows)]
        for first, logits in self._logit_slices(hidden):
            score(
                logits, first, self.input.scored, self.input.scored_best, self.scores,
                self._scratch,
            )  # fmt: skip

    def first(self, entries: int, kind: SamplerClass) -> None:
        """Draws the first tokens of the input's entries from `hidden`."""
        self._work["first", bucket_of(self.first_buckets, entries), kind]()

    def mark(self) -> None:
        """Begins a step that computes nothing."""
        self._work["mark",]()

    def publish(self) -> None:
        """Publishes the context of a step that `finish` does not end."""
        self._work["publish",]()

    def update_tables(self) -> None:
        """Takes the input's pages alone."""
        self._work["tables",]()

    # The work

    def _plan(self, size: int) -> StepPlan:
        host, entries = self.input, min(size, self.rows.most_entries)
        return StepPlan(
            host.counts,
            host.slots[:entries],
            host.offsets[: entries + 1],
            host.proposal_counts[:entries],
            host.proposal_tokens[:size],
            host.proposal_parents[:size],
        )

    def _update_tables(self) -> None:
        update_tables(
            self.rows.tables, self.input.updates, self.input.update_count, self._shown_tables
        )

    def _take(self, plan: StepPlan) -> None:
        take_proposal(
            self.link.link, self._rings, plan.counts, plan.offsets, plan.proposal_counts,
            plan.proposal_tokens, plan.proposal_parents, self.stamps,
        )  # fmt: skip

    def _mark(self) -> None:
        mark(self.link.link, self.stamps)

    def _publish(self) -> None:
        state = self._slots.state
        publish_context(
            self.link.link, self._rings, state.start, state.anchor, self._slots.cursor, self.stamps
        )

    def _intake(self, size: int, tree: bool) -> None:
        self._update_tables()
        state, plan = self._slots.state, self._plan(size)
        self._take(plan)
        prepare_rows(
            plan,
            state.start,
            state.anchor,
            self.rows.first(size),
            self.trees.first(size),
            vocab_size=self._model.config.vocab_size,
            most_nodes=min(MAX_NODES, size),
            tree=tree,
        )

    def _known(self, size: int) -> None:
        self._update_tables()
        self._mark()
        entries = min(size, self.rows.most_entries)
        rows = self.rows.first(size)
        prepare_prefill(
            self._plan(size), self.input.firsts[:entries], self.input.ids[:size], rows,
            self.trees.first(size),
        )  # fmt: skip
        set_starts(self._slots.state.start, rows.slots, self.input.starts[:entries], rows.counts)

    def _forward(self, size: int, tree: bool, attend: Attend | None = None) -> None:
        config, rows = self._model.config, self.rows.first(size)
        embed(self.trees.ids[:size], self._model.vocabulary.embedding, self._embedded[:size])
        own = self._attention[size]
        if attend is None:
            own.plan(rows)

        def layer(index: int, q: Tensor) -> Tensor:
            if attend is not None:
                return attend(index, q)
            return own(
                q,
                *self._cache.layer(index),
                rows,
                config.scale,
                config.windows[index],
                Mask.TREE if tree else Mask.CHAIN,
                self.mixed[:size],
            )

        self._decoder.forward(
            self._embedded[:size], rows, layer, self._cache.layer, self._taps, self._tapped[:size],
            out=self.hidden[:size],
        )  # fmt: skip

    def _finish(self, size: int, tree: bool, kind: SamplerClass) -> None:
        rows, trees = self.rows.first(size), self.trees.first(size)
        self._draw(self.hidden[:size], rows, trees, kind)
        self._walk(rows, trees, kind)
        if tree:
            move_kv(self._cache.kv, rows, self.walks.first(size))
        if self._projector is not None:
            self._project(size, self.walks.row_dest[:size])
        self._publish()

    def _first(self, size: int, kind: SamplerClass) -> None:
        host, rows, trees = self.input, self.rows.first(size), self._first_trees.first(size)
        prepare_prefill(self._plan(size), host.starts[:size], host.anchors[:size], rows, trees)
        picked = self._picked[:size]
        torch.index_select(self.hidden, 0, host.picked[:size], out=picked)
        self._draw(picked, rows, trees, kind)
        self._walk(rows, trees, kind)

    def _draw(self, hidden: Tensor, rows: DeviceRows, trees: TreeRows, kind: SamplerClass) -> None:
        """Draws at every row."""
        for first, logits in self._logit_slices(hidden):
            if kind == "greedy":
                draw_greedy(logits, first, self.draws.tokens, self._scratch)
            else:
                draw_full(
                    logits, first, rows, trees, self._slots.state, self.draws, self._scratch,
                    self.masks.rows,
                )  # fmt: skip

    def _logit_slices(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First row and logits of slices of rows; each is overwritten by the next."""
        weight, most = self._model.vocabulary.head.plain, len(self._logits)
        for first in range(0, len(hidden), most):
            part = hidden[first : first + most]
            logits = self._logits[: len(part)]
            head(part, weight, logits)
            yield first, logits

    def _walk(self, rows: DeviceRows, trees: TreeRows, kind: SamplerClass) -> None:
        walk(
            rows, trees, self.draws.tokens, self._slots.state, self.walks.first(rows.capacity),
            full=kind == "full", most_commits=self._most_commits,
        )  # fmt: skip

    def _store_features(self, size: int) -> None:
        """Of all rows of a prefill: a row's position is its place."""
        rows = self.rows.first(size)
        places = torch.where(rows.entries >= 0, rows.positions, -1)
        self._project(size, places)

    def _project(self, size: int, places: Tensor) -> None:
        """Features of the rows with a place >= 0, into their pages."""
        if self._projector is None:
            return
        projected = self._projected[:size]
        torch.mm(self._tapped[:size], self._projector.fc.plain.t(), out=projected)
        norm = self._projector.norm
        norm_scatter(
            projected, norm.weight, norm.eps, places, self.rows.first(size), self._cache.features,
            self._cache.page_size,
        )  # fmt: skip
