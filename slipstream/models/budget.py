"""What a pair holds on a GPU, in bytes, from its configs alone. Nothing here imports torch.

`slipstream up` divides one GPU by it before a process starts; a server takes its pages by it once
the weights are there. Both use the same numbers, so a draft that comes back takes the same share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.draft_config import DraftConfig
from slipstream.wire import MAX_NODES

MIB = 1 << 20

USABLE = 0.92
"""Part of a GPU's memory that servers divide; the rest is for the driver and other programs."""

CONTEXT = 768 * MIB
"""What a process holds outside torch's allocator: CUDA context, loaded kernels, library handles."""

TARGET_GRAPHS = 1024 * MIB
"""Private memory of the target's captured graphs, and cuBLAS workspaces."""

DRAFT_GRAPHS = 512 * MIB
"""The same of the draft: fewer and smaller graphs."""

WORKSPACE = 512 * MIB
"""Partial results of split attention, FlashInfer's workspace, staging."""

LOGITS = 512 * MIB
"""Most bytes of a slice of fp32 logits."""

SPARE = 256 * MIB
"""Between a plan and what an allocator makes of it."""

PAGE_SIZE, TARGET_SLOTS, DRAFT_SLOTS = 16, 16, 64
"""Defaults of --page-size and --slots."""

PREFILL_ROWS, DECODE_ROWS = 2048, 2048
"""Most rows of a prefill step, and of a decode graph, on a GPU."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of one GPU's memory, and the tokens that target and draft both have pages for."""

    target: float
    draft: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served: it decides the size of the buffers.

    Attributes:
        item: bytes of an element.
        max_len: most tokens of a request.
        draft_slots: most slots of the draft server.
    """

    item: int
    max_len: int
    slots: int = TARGET_SLOTS
    draft_slots: int = DRAFT_SLOTS
    page_size: int = PAGE_SIZE

    @property
    def most_tokens(self) -> int:
        """Positions of all slots at their longest, the scratch of a tree included."""
        pages = -(-(self.max_len + MAX_NODES) // self.page_size)
        return self.slots * pages * self.page_size


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB"


def vocabulary_bytes(config: ModelConfig, item: int) -> int:
    """Embedding and LM head; one matrix when tied."""
    matrices = 1 if config.tie_word_embeddings else 2
    return matrices * config.vocab_size * config.hidden_size * item


def target_weight_bytes(config: ModelConfig, draft: DraftConfig | None, item: int) -> int:
    """The target's weights, and its part of a head: fc and hidden_norm."""
    total = vocabulary_bytes(config, item) + config.num_layers * _layer(config, item)
    if draft is not None:
        width = len(draft.target_layer_ids) * draft.target_hidden_size
        total += (width + 1) * draft.hidden_size * item
    return total + config.hidden_size * item


def draft_weight_bytes(config: ModelConfig, draft: DraftConfig, item: int) -> int:
    """The head's layers, all K and V projections once more as one, and the target's vocabulary."""
    context = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * draft.hidden_size
    layers = draft.num_layers * _layer(draft, item)
    return vocabulary_bytes(config, item) + layers + (context + draft.hidden_size) * item


def target_token_bytes(config: ModelConfig, draft: DraftConfig | None, item: int) -> int:
    """K, V and context feature of one token."""
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return (kv + (draft.hidden_size if draft is not None else 0)) * item


def draft_token_bytes(draft: DraftConfig, item: int) -> int:
    """K and V of one context row."""
    return 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * item


def target_reserve(
    config: ModelConfig,
    draft: DraftConfig | None,
    item: int,
    slots: int,
    rows: int = max(PREFILL_ROWS, DECODE_ROWS),
) -> int:
    """What the target holds beside weights and pages, for steps of at most `rows` rows.

    A slot counts its output tokens and has a bias, by vocabulary entry; a row has a grammar's mask.
    """
    taps = len(draft.target_layer_ids) if draft is not None else 0
    buffers = rows * (_row(config) + 2 * taps * config.hidden_size) * item
    buffers += slots * config.vocab_size * 2 * 4 + rows * config.vocab_size // 8
    return CONTEXT + TARGET_GRAPHS + WORKSPACE + _logits(config, rows) + buffers


def draft_reserve(config: ModelConfig, draft: DraftConfig, item: int, slots: int) -> int:
    """What the draft holds beside weights and pages, for blocks of `slots` slots."""
    rows = slots * draft.block_size
    wide = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim + 2 * draft.hidden_size
    buffers = (rows * _row(draft) + max(rows, PREFILL_ROWS) * wide) * item
    return CONTEXT + DRAFT_GRAPHS + WORKSPACE + _logits(config, rows) + buffers


def pages_within(share: float, total: int, used: int, page_bytes: int, reserve: int) -> int:
    """Pages that fit into `share` of `total` bytes beside what is used and what is still to come.

    Raises ConfigError when there is not one.
    """
    left = int(share * total) - used - reserve
    if left < page_bytes:
        raise ConfigError(
            f"--memory-share: {share:.3g} of {gib(total)} leaves no page: weights take {gib(used)},"
            f" buffers {gib(reserve)}"
        )
    return left // page_bytes


def plan_shares(
    total: int, config: ModelConfig, draft: DraftConfig, load: Load, usable: float = USABLE
) -> Shares:
    """Divides the part `usable` of one GPU of `total` bytes.

    The draft gets its weights and buffers and pages for as many tokens as the target can have; the
    target gets the rest. Raises ConfigError when the pair does not fit.
    """
    item = load.item
    scratch = load.draft_slots * -(-draft.block_size // load.page_size) * load.page_size
    of_draft = draft_weight_bytes(config, draft, item) + SPARE
    of_draft += draft_reserve(config, draft, item, load.draft_slots)
    of_draft += scratch * draft_token_bytes(draft, item)
    of_target = target_weight_bytes(config, draft, item) + target_reserve(
        config, draft, item, load.slots
    )
    both = target_token_bytes(config, draft, item) + draft_token_bytes(draft, item)
    tokens = (int(usable * total) - of_target - of_draft) // both
    tokens = min(tokens, load.most_tokens) // load.page_size * load.page_size
    if tokens <= 0:
        raise ConfigError(
            f"{usable:.0%} of one GPU of {gib(total)} is too small for target ({gib(of_target)}) "
            f"and draft ({gib(of_draft)}), without any page; --draft-device can name another"
        )
    bytes_of_draft = of_draft + tokens * draft_token_bytes(draft, item)
    share = math.ceil(1e4 * bytes_of_draft / total) / 1e4
    return Shares(round(usable - share, 4), share, tokens)


def _layer(shape: ModelConfig | DraftConfig, item: int) -> int:
    """Bytes of one decoder layer; per-head norms are kept for every head."""
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * dim, shape.num_kv_heads * dim
    count = (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden + 2 * hidden
    count += (q + 2 * kv if shape.qkv_bias else 0) + (hidden if shape.o_bias else 0)
    count += 2 * inner + hidden if shape.mlp_bias else 0
    count += q + kv if shape.qk_norm else 0
    return count * item


def _row(shape: ModelConfig | DraftConfig) -> int:
    """Elements that a row needs at once while a layer is computed, generously."""
    wide = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return 8 * shape.hidden_size + 3 * shape.intermediate_size + 3 * wide


def _logits(config: ModelConfig, rows: int) -> int:
    return min(LOGITS, rows * config.vocab_size * 4)
