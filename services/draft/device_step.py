"""The draft's model on a device: buffers of fixed address, and the work that is recorded over them.

Writing context is one piece of work, by the number of rows. A draft step is two: forward lays the
blocks out and runs the head over them, by the number of rows; finish makes trees of the hidden
states, by the number of rows and by what the requests' trees need. Where fewer rows come than a
piece is made for, the others have no entry and touch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.draft.context_cache import ContextCache
from services.draft.peer_step import PeerStep
from services.draft.runner import DraftSpec
from services.draft.step_input import BlockInput, PageInput, SpecInput
from slipstream.kernels.attention import TritonAttention
from slipstream.kernels.blocks import lay_out
from slipstream.kernels.candidates import CandidateScratch, candidates
from slipstream.kernels.grow import NODE_CLASSES, NODE_INTS, grow
from slipstream.kernels.norm import embed, head
from slipstream.kernels.rope_kv import rope_context
from slipstream.kernels.tables import update_tables
from slipstream.layers.attention_device import DeviceAttention, TorchAttention
from slipstream.layers.device_rows import DeviceRows, Mask
from slipstream.layers.graphs import Graphs, Work, bucket_of, buckets
from slipstream.layers.staging import Upload
from slipstream.models import DraftConfig, DraftHead
from slipstream.models.fused import FusedDecoder, FusedLinear
from slipstream.progress import Progress
from slipstream.wire import MAX_NODES

LOGIT_BYTES = 512 << 20
"""Most memory of logits: those of more rows are made and read in slices of so much."""

MOST_ROWS = 2048
"""Most block rows of one pass; larger steps take several."""

WRITE_ROWS = 1024
"""Most context rows of one pass."""


@dataclass(frozen=True, slots=True)
class Finish:
    """What the second piece of a step is compiled for: candidates of a row, nodes of a tree.

    With one candidate: chains without noise only, which need no log-probabilities.
    """

    ranks: int
    nodes: int


TREES = tuple(
    Finish(ranks, nodes)
    for ranks, nodes in ((32, 64), (32, 128), (64, 64), (64, 128), (128, 128), (256, 256))
)
"""From the cheapest on; the first that is large enough is taken."""

MOST_RANKS = TREES[-1].ranks


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Block rows and context rows of one pass at most, and most entries of either."""

    rows: int
    write_rows: int
    entries: int

    @classmethod
    def of(cls, spec: DraftSpec, rows: int = MOST_ROWS, write_rows: int = WRITE_ROWS) -> StepSizes:
        """As many blocks as there may be, and as `rows` allows: at least one."""
        blocks = max(1, min(spec.slots, rows // spec.block_size))
        return cls(blocks * spec.block_size, write_rows, min(spec.slots, max(blocks, write_rows)))

    def logit_rows(self, vocab_size: int) -> int:
        """Rows whose logits exist at once."""
        return max(1, min(self.rows, LOGIT_BYTES // (4 * vocab_size)))


class DraftStep:
    """A head, one session's buffers, and the recorded work over them; `record` comes first.

    Attributes:
        drafts, context, specs, pages: what the host says; sent before the work is run.
        features: (write_rows, feature_width), of the context rows.
        result: int32; the number of nodes of each tree, `size_room` of them, then the nodes,
            NODE_INTS each.
        peer: the work of a session whose messages stay on devices; None where there is none such.
    """

    def __init__(
        self,
        model: DraftHead,
        spec: DraftSpec,
        *,
        max_len: int,
        dtype: torch.dtype,
        sizes: StepSizes,
        attention: str,
        graphs: Graphs,
        peer: bool = False,
    ) -> None:
        """`max_len`: committed tokens of a slot at most; `attention`: torch or triton."""
        config, device = model.config, graphs.device
        self._model, self._spec, self._config = model, spec, config
        self.graphs, self.sizes = graphs, sizes
        self.table_pages, slots = _table_pages(spec, max_len), spec.slots
        self.drafts, self.context = (BlockInput(sizes.entries, device) for _ in range(2))
        self.specs, self.pages = SpecInput(slots, device), PageInput(device)
        self.features = Upload((sizes.write_rows, spec.feature_width), dtype, device)

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self._tables = buffer(slots, self.table_pages, kind=torch.int32)
        shape = _page_shape(config, spec)
        self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._rows = self._device_rows(sizes.rows, self.drafts)
        self._context_rows = self._device_rows(sizes.write_rows, self.context)
        positions = self.table_pages * spec.page_size
        self._decoder = FusedDecoder(
            model.layers, model.norm, model.rope, positions=positions, capacity=sizes.rows
        )
        self._project = FusedLinear(model.context)
        self._both = buffer(sizes.write_rows, model.context.out_features)
        self._ids = buffer(sizes.rows, kind=torch.int32)
        self._embedded = buffer(sizes.rows, config.hidden_size)
        self._mixed = buffer(sizes.rows, config.num_heads * config.head_dim)
        self._hidden = buffer(sizes.rows, config.hidden_size)
        self._lm_head = model.vocabulary.head.plain
        logit_rows = sizes.logit_rows(config.vocab_size)
        self._logits = buffer(logit_rows, config.vocab_size, kind=torch.float32)
        self._tokens = buffer(sizes.rows * MOST_RANKS, kind=torch.int32)
        self._logprobs = buffer(sizes.rows * MOST_RANKS, kind=torch.float32)
        self._found = buffer(sizes.rows, kind=torch.int32)
        self._scratch = CandidateScratch.allocate(logit_rows, config.vocab_size, MOST_RANKS, device)
        self.size_room = -(-sizes.entries // 4) * 4
        nodes = sizes.entries * MAX_NODES * NODE_INTS
        self.result = buffer(self.size_room + nodes, kind=torch.int32)
        self.buckets = _block_buckets(spec, sizes)
        self.write_buckets = buckets(sizes.write_rows)
        self._chains = Finish(1, bucket_of(NODE_CLASSES, spec.block_size))
        self._attention = self._make_attention(attention)
        self.peer = self._make_peer() if peer else None
        self._work: dict[tuple[object, ...], Work] = {}

    def _device_rows(self, rows: int, source: BlockInput) -> DeviceRows:
        """Rows whose counts are those of the input."""
        made = DeviceRows.allocate(rows, source.entries, self._tables, self._tables.device, 1)
        return replace(made, counts=source.blocks(1).counts)

    def _make_peer(self) -> PeerStep:
        most = self.sizes.rows // self._spec.block_size
        return PeerStep(
            tables=self._tables,
            features=self.features.device,
            buckets=self.write_buckets,
            write=self._write_rows,
            blocks=self.drafts.blocks(most),
            most_blocks=most,
            sizes=self.result[: self.size_room],
            nodes=self.result[self.size_room :].view(-1, NODE_INTS),
            vocab_size=self._config.vocab_size,
            results=self.graphs.results,
        )

    def _make_attention(self, backend: str) -> dict[int, DeviceAttention]:
        config = self._config
        shape = (
            config.num_heads, config.num_kv_heads, config.head_dim, self._spec.page_size,
            self._mixed.dtype,
        )  # fmt: skip
        if backend == "torch":
            return {size: TorchAttention(self._rows.first(size), *shape) for size in self.buckets}
        return dict(TritonAttention.for_buckets(self._rows, self.buckets, *shape))

    @staticmethod
    def bytes_needed(
        config: DraftConfig,
        spec: DraftSpec,
        *,
        max_len: int,
        dtype: torch.dtype,
        sizes: StepSizes,
    ) -> int:
        """Device memory of pages and buffers; weights, graphs and attention's scratch excluded."""
        item, rows, slots = dtype.itemsize, sizes.rows, spec.slots
        page = ContextCache.page_bytes(
            config.num_layers, spec.page_size, config.num_kv_heads, config.head_dim, dtype
        )
        kv = config.num_kv_heads * config.head_dim
        q = config.num_heads * config.head_dim
        a_row = 5 * config.hidden_size + 3 * q + 2 * kv + 3 * config.intermediate_size
        written = config.num_layers * 2 * kv + spec.feature_width
        logit_rows = sizes.logit_rows(config.vocab_size)
        table = _table_pages(spec, max_len)
        return (
            page * spec.pages
            + table * (4 * slots + 4 * spec.page_size * config.head_dim)  # tables, rotations
            + item * (rows * a_row + sizes.write_rows * written)
            + logit_rows * (4 * config.vocab_size + 20 * MOST_RANKS + config.vocab_size // 12)
            + rows * 8 * MOST_RANKS
            + sizes.entries * MAX_NODES * NODE_INTS * 4
        )

    # What the runner calls, the input having been sent

    def record(self, progress: Progress = lambda done, total: None) -> None:
        """Runs every piece of work once and records it."""
        self._work = self.graphs.record(self._pieces(), progress)

    def _pieces(self) -> dict[tuple[object, ...], Work]:
        """All that is recorded, the largest first: they need the most memory."""
        pieces: dict[tuple[object, ...], Work] = {("tables",): self._update_tables}
        for size in reversed(self.write_buckets):
            pieces["write", size] = partial(self._write, size)
        for size in reversed(self.buckets):
            pieces["forward", size] = partial(self._forward, size)
            for kind in (self._chains, *TREES):
                pieces["finish", size, kind] = partial(self._finish, size, kind)
        return pieces if self.peer is None else pieces | self.peer.pieces()

    @property
    def pieces(self) -> int:
        """How many there are to record."""
        return len(self._pieces())

    def run(self, *key: object) -> None:
        """A piece of `peer`."""
        self._work[key]()

    def send_tables(self) -> None:
        """Pages and tree parameters that have changed."""
        self.specs.send()
        while self.pages.send():
            self._work["tables",]()

    def write(self, rows: int) -> None:
        """The keys and values of `rows` context rows, in the input, to their pages."""
        self._work["write", bucket_of(self.write_buckets, rows)]()

    def draft(self, rows: int, finish: Finish) -> None:
        """The trees of the blocks in the input, of `rows` rows in all, to `result`."""
        size = bucket_of(self.buckets, rows)
        self._work["forward", size]()
        self._work["finish", size, finish]()

    def finish_for(self, chains: bool, ranks: int, nodes: int) -> Finish:
        """For trees of at most `nodes` nodes with `ranks` candidates looked at; or plain chains."""
        if chains:
            return self._chains
        return next(kind for kind in TREES if kind.ranks >= ranks and kind.nodes >= nodes)

    # The work

    def _update_tables(self) -> None:
        update_tables(self._tables, self.pages.updates, self.pages.count)

    @torch.inference_mode()
    def _write(self, size: int) -> None:
        rows = self._context_rows.first(size)
        lay_out(self.context.blocks(rows.most_entries), rows)
        self._write_rows(size, rows)

    def _write_rows(self, size: int, rows: DeviceRows) -> None:
        """Context rows never see the head's layers: one product makes K and V of all of them."""
        both = self._project(self.features.device[:size], self._both[:size])
        norm = self._model.context_norm
        rope_context(
            both, norm.weight, norm.eps, self._decoder.cos_sin, rows, self._k, self._v,
            self._config.value_scale,
        )  # fmt: skip

    @torch.inference_mode()
    def _forward(self, size: int) -> None:
        """The blocks' own K and V go to the scratch positions after each slot's context."""
        config, rows, attention = self._config, self._rows.first(size), self._attention[size]
        lay_out(self.drafts.blocks(rows.most_entries), rows, self._ids[:size], config.mask_token_id)
        x = self._embedded[:size]
        embed(self._ids[:size], self._model.vocabulary.embedding, x, config.embedding_scale)
        attention.plan(rows)

        def attend(layer: int, q: Tensor) -> Tensor:
            mask = Mask.CHAIN if config.causal[layer] else Mask.FULL
            return attention(
                q, self._k[layer], self._v[layer], rows, config.scale, config.windows[layer],
                mask, self._mixed[:size],
            )  # fmt: skip

        self._decoder.forward(
            x,
            rows,
            attend,
            lambda layer: (self._k[layer], self._v[layer]),
            value_scale=config.value_scale,
            out=self._hidden[:size],
        )

    @torch.inference_mode()
    def _finish(self, size: int, kind: Finish) -> None:
        rows = self._rows.first(size)
        blocks = self.drafts.blocks(rows.most_entries)
        tokens, logprobs = (
            buffer[: size * kind.ranks].view(size, kind.ranks)
            for buffer in (self._tokens, self._logprobs)
        )
        scratch = self._scratch.narrow(kind.ranks)
        step = len(self._logits)
        for first in range(0, size, step):
            hidden = self._hidden[first : min(size, first + step)]
            candidates(
                self._head(hidden), rows.entries, blocks, self.specs.specs, tokens, logprobs,
                self._found, scratch, ranks=kind.ranks, mask_id=self._config.mask_token_id,
                first_row=first,
            )  # fmt: skip
        grow(
            tokens, logprobs, self._found, blocks, self.specs.specs,
            self.result[: self.size_room], self.result[self.size_room :].view(-1, NODE_INTS),
            most_nodes=kind.nodes, block_size=self._spec.block_size,
        )  # fmt: skip

    def _head(self, hidden: Tensor) -> Tensor:
        """As `DraftHead.logits`, into the logits' buffer."""
        logits, config = self._logits[: len(hidden)], self._config
        head(hidden, self._lm_head, logits)
        if config.output_multiplier != 1.0:
            logits.mul_(config.output_multiplier)
        if config.softcap is not None:
            logits.div_(config.softcap).tanh_().mul_(config.softcap)
        return logits


def _table_pages(spec: DraftSpec, max_len: int) -> int:
    """Pages of a slot at most: its tokens and a block."""
    return min(spec.pages, -(-(max_len + spec.block_size) // spec.page_size))


def _page_shape(config: DraftConfig, spec: DraftSpec) -> Sequence[int]:
    """Of keys, and of values."""
    return config.num_layers, spec.pages, spec.page_size, config.num_kv_heads, config.head_dim


def _block_buckets(spec: DraftSpec, sizes: StepSizes) -> tuple[int, ...]:
    """Rows of draft steps: of whole blocks, and of a causal head's short ones."""
    size = spec.block_size
    blocks = buckets(sizes.rows // size, (3, 6, 12, 24))
    short = {rows for rows in (4, 8) if rows < size} if spec.causal else set()
    return tuple(sorted({*(n * size for n in blocks), *short}))
