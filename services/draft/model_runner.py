"""The draft model behind the engine's `DraftRunner`: context into pages, blocks into trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.draft.candidates import Block, Candidates, choose
from services.draft.context_cache import ContextCache, page_dtype
from services.draft.runner import ContextRows, DraftCost, DraftEntry, Drafting, DraftSpec
from services.draft.warmup import measure
from slipstream.layers.attention import paged_attention
from slipstream.layers.rows import RowBatch
from slipstream.models import DraftHead
from slipstream.tree import Tree, TreeSpec, build_chain, build_tree

LOGIT_ROWS = 128
"""Most rows whose logits over the vocabulary exist at once."""


class ModelRunner:
    """A draft head, and the context pages of all the sessions it may have.

    Args:
        sessions: contexts that may be open at once; their memory is taken now.
    """

    def __init__(self, head: DraftHead, spec: DraftSpec, sessions: int = 1) -> None:
        self.head = head
        self.spec = spec
        self.devices = None
        self.dtype: torch.dtype = getattr(torch, spec.feature_dtype)
        self.device = head.norm.weight.device
        config = head.config
        self._idle = [
            ContextCache(
                layers=config.num_layers,
                pages=spec.pages,
                page_size=spec.page_size,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=page_dtype(self.device, self.dtype),
                device=self.device,
            )
            for _ in range(sessions)
        ]

    def open_context(self) -> ModelContext:
        """Raises RuntimeError when every context is open."""
        if not self._idle:
            raise RuntimeError("every draft context is open")
        return ModelContext(self, self._idle.pop(), self._idle.append)

    def warm_up(self, tree: TreeSpec) -> list[DraftCost]:
        """Runs and measures the shapes of serving; see `services.draft.warmup`."""
        return measure(self, tree)


class ModelContext:
    """`DraftContext` over one session's pages; `give_back` takes them at the end."""

    def __init__(
        self, runner: ModelRunner, cache: ContextCache, give_back: Callable[[ContextCache], None]
    ) -> None:
        self._head = runner.head
        self._spec = runner.spec
        self._dtype = runner.dtype
        self._device = runner.device
        self.cache = cache
        self._give_back = give_back
        self._drafting: dict[int, Drafting] = {}

    def admit(self, slot: int, drafting: Drafting) -> None:
        self.cache.open(slot)
        self._drafting[slot] = drafting

    def reserve(self, slot: int, rows: int) -> None:
        self.cache.reserve(slot, rows + self._spec.block_size)

    def release(self, slot: int) -> None:
        del self._drafting[slot]
        self.cache.release(slot)

    def close(self) -> None:
        self._drafting.clear()
        self.cache.clear()
        self._give_back(self.cache)

    @torch.inference_mode()
    def write(self, rows: Sequence[ContextRows]) -> None:
        """K and V of every layer in one product; context rows never see the block's norms."""
        batch = RowBatch.build(
            [part.count for part in rows],
            [part.first_row for part in rows],
            [self.cache.table(part.slot, part.first_row + part.count) for part in rows],
            device=self._device,
        )
        features = self._features(rows)
        k, v = self._head.context_kv(features, batch.positions)  # (layers, rows, kv, hd)
        for layer in range(k.shape[0]):
            self.cache.write(layer, k[layer], v[layer], batch)

    def _features(self, rows: Sequence[ContextRows]) -> Tensor:
        """The rows' bytes as (rows, feature_width); copied, as the message is not ours to keep."""
        total = sum(part.count for part in rows)
        raw = np.empty(total * self._spec.row_bytes, np.uint8)
        at = 0
        for part in rows:
            raw[at : at + len(part.rows)] = np.frombuffer(part.rows, np.uint8)
            at += len(part.rows)
        features = torch.from_numpy(raw).view(self._dtype).view(total, self._spec.feature_width)
        return features.to(self._device)

    @torch.inference_mode()
    def draft(self, entries: Sequence[DraftEntry]) -> list[Tree]:
        counts = [self.block_rows(entry.nodes) for entry in entries]
        hidden = self.forward(entries, counts)
        trees: list[Tree] = []
        for part in _slices(entries, counts, self._spec.block_size):
            spans = [hidden[i:j] for i, j in part.spans]
            logits = self._head.logits(spans[0] if len(spans) == 1 else torch.cat(spans))
            logits[:, self._spec.mask_token_id] = -torch.inf
            blocks = [
                Block(j - i, entry.start, self._drafting[entry.slot])
                for entry, (i, j) in zip(part.entries, part.spans, strict=True)
            ]
            found = choose(logits, blocks)
            for entry, block, candidates in zip(part.entries, blocks, found, strict=True):
                trees.append(_tree(entry, block.drafting.tree, candidates))
        return trees

    def block_rows(self, nodes: int) -> int:
        """Rows of the block that a tree of `nodes` nodes needs, the anchor's included.

        No node is deeper than `nodes` - 1. A causal head's rows do not see the ones after them, so
        the block may end there; a bidirectional head drafts differently from a shorter block.
        """
        size = self._spec.block_size
        return min(size, nodes) if self._spec.causal else size

    def forward(self, entries: Sequence[DraftEntry], counts: Sequence[int]) -> Tensor:
        """Hidden states after the final norm of blocks of `counts` rows, (rows, hidden).

        The blocks' own K and V go to the scratch positions after each slot's context.
        """
        pages, ids = [], []
        for entry, count in zip(entries, counts, strict=True):
            pages.append(self.cache.table(entry.slot, entry.start + count))
            ids += [entry.anchor] + [self._spec.mask_token_id] * (count - 1)
        starts = [entry.start for entry in entries]
        batch = RowBatch.build(counts, starts, pages, device=self._device)
        config = self._head.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, k, v, batch)
            return paged_attention(
                q,
                self.cache.k[layer],
                self.cache.v[layer],
                batch,
                scale=config.scale,
                window=config.windows[layer],
                bidirectional=not config.causal[layer],
            )

        return self._head.block(torch.tensor(ids, device=self._device), batch.positions, attend)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Entries whose logits are computed together; `spans` are their drafting rows of the batch."""

    entries: list[DraftEntry]
    spans: list[tuple[int, int]]


def _slices(entries: Sequence[DraftEntry], counts: Sequence[int], block_size: int) -> list[_Slice]:
    """Entries in runs of at most LOGIT_ROWS rows.

    Of each block they have the rows that may become nodes: not row 0, the anchor's, and none deeper
    than the tree may be.
    """
    slices: list[_Slice] = []
    at = rows = 0
    for entry, count in zip(entries, counts, strict=True):
        depths = min(entry.nodes, block_size) - 1
        if not slices or rows + depths > LOGIT_ROWS:
            slices.append(_Slice([], []))
            rows = 0
        slices[-1].entries.append(entry)
        slices[-1].spans.append((at + 1, at + 1 + depths))
        at += count
        rows += depths
    return slices


def _tree(entry: DraftEntry, spec: TreeSpec, found: Candidates) -> Tree:
    if spec.is_chain:
        length = min(entry.nodes, spec.budget) - 1
        return build_chain(entry.anchor, [row[0] for row in found.tokens[:length]])
    return build_tree(spec, found.logprobs, found.tokens, entry.anchor, entry.nodes)
