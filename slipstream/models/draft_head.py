"""The draft head: a few decoder layers over context features and a block of MASK rows.

The head has neither embedding nor LM head; both are the target's. Features of a committed token are
projected once, by the target (`ContextProjector`); the head turns them into keys and values of all
its layers in one product (`DraftHead.context_kv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.layers.linear import Linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope
from slipstream.models.causal_lm import Vocabulary
from slipstream.models.checkpoint import Checkpoint, Opener, Weights
from slipstream.models.config import load_config
from slipstream.models.decoder import Attend, DecoderLayer
from slipstream.models.draft_config import (
    FC,
    HIDDEN_NORM,
    DraftConfig,
    load_draft_config,
    stored_names,
)
from slipstream.models.pair import check_pair


def _open(
    folder: Path, dtype: torch.dtype, device: torch.device | str, open_tensors: Opener
) -> Weights:
    source = open_tensors(folder)
    return Weights(source, dtype, device, stored_names(source.names))


class ContextProjector:
    """The target's part of the head: fc, then hidden_norm, makes one feature of the taps."""

    def __init__(self, config: DraftConfig, fc: Linear, norm: RMSNorm) -> None:
        self.config, self.fc, self.norm = config, fc, norm

    @classmethod
    def load(
        cls,
        draft_folder: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        open_tensors: Opener = Checkpoint.open,
    ) -> ContextProjector:
        """Raises ConfigError when the tensors do not fit the config."""
        config = load_draft_config(draft_folder)
        weights = _open(draft_folder, dtype, device, open_tensors)
        width = len(config.target_layer_ids) * config.target_hidden_size
        fc = Linear(weights(FC, config.hidden_size, width))
        norm = RMSNorm(weights(HIDDEN_NORM, config.hidden_size), config.rms_norm_eps)
        return cls(config, fc, norm)

    @torch.inference_mode()
    def __call__(self, taps: Tensor) -> Tensor:
        """taps (T, K * target hidden), layers in the order of target_layer_ids -> (T, H)."""
        return self.norm(self.fc(taps))


class DraftHead:
    """A DFlash or JetSpec head. Holds no cache and no request: any thread may use it."""

    def __init__(
        self,
        config: DraftConfig,
        vocabulary: Vocabulary,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rope: Rope,
        context: Linear,
        context_norm: RMSNorm,
    ) -> None:
        """`context`: H -> L * 2 * kv * hd, per layer k then v; `context_norm`: (L * kv, hd)."""
        self.config, self.vocabulary = config, vocabulary
        self.layers, self.norm, self.rope = tuple(layers), norm, rope
        self.context, self.context_norm = context, context_norm

    @classmethod
    def load(
        cls,
        draft_folder: Path,
        target_folder: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        max_len: int | None = None,
        open_tensors: Opener = Checkpoint.open,
    ) -> DraftHead:
        """Loads the head, and embedding and LM head of its target.

        Args:
            max_len: positions that will be served, for RoPE types that depend on it.
            open_tensors: where the weights of both come from.

        Raises ConfigError on a missing, unknown or misshapen tensor; PairError when the two do not
        fit each other.
        """
        config = load_draft_config(draft_folder)
        check_pair(load_config(target_folder), config)
        weights = _open(draft_folder, dtype, device, open_tensors)
        rope = Rope(config.rope, device, max_len)
        layers = [
            DecoderLayer(i, config, weights, f"layers.{i}.", rope) for i in range(config.num_layers)
        ]
        norm = RMSNorm(weights("norm.weight", config.hidden_size), config.rms_norm_eps)
        context, context_norm = _context(config, weights)
        weights.skip(FC, HIDDEN_NORM)  # the target's part
        weights.check_all_taken()
        vocabulary = Vocabulary.load(target_folder, dtype, device, open_tensors=open_tensors)
        return cls(config, vocabulary, layers, norm, rope, context, context_norm)

    @torch.inference_mode()
    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of committed tokens in every layer; they never change afterwards.

        Args:
            features: (T, H) of `ContextProjector`.
            positions: (T,) absolute positions.

        Returns k and v, each (L, T, kv, hd) in the weights' type, RoPE applied.
        """
        c = self.config
        both = self.context(features).view(-1, c.num_layers, 2, c.num_kv_heads, c.head_dim)
        keys = self.context_norm(both[:, :, 0].flatten(1, 2))  # (T, L * kv, hd)
        keys = self.rope.rotate(keys, self.rope(positions)).to(features.dtype)
        values = both[:, :, 1]
        if c.value_scale != 1.0:
            values = values * c.value_scale
        shape = (c.num_layers, c.num_kv_heads)
        return keys.view(-1, *shape, c.head_dim).transpose(0, 1), values.transpose(0, 1)

    @torch.inference_mode()
    def block(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over block rows.

        Args:
            ids: (T,): of each block the anchor, then MASK.
            positions: (T,) absolute positions, start + slot.
            attend: context and block keys, `config.causal` and `config.windows` are the caller's.

        Returns (T, H) after the final norm; a row predicts the token at its own position.
        """
        x = self.vocabulary.embed(ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.config.value_scale != 1.0:
            attend = _scale_values(attend, self.config.value_scale)
        rotation = self.rope(positions)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) of `block` -> (R, vocab_size) fp32."""
        logits = self.vocabulary.logits(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _scale_values(attend: Attend, factor: float) -> Attend:
    def scaled(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(layer, q, k, v * factor)

    return scaled


def _context(config: DraftConfig, take: Weights) -> tuple[Linear, RMSNorm]:
    """k_proj and v_proj of all layers as one product, and all k_norms as one."""
    rows, dim = config.num_kv_heads * config.head_dim, config.head_dim
    matrices, biases, norms = [], [], []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}.self_attn."
        for name in ("k_proj", "v_proj"):
            matrices.append(take(f"{prefix}{name}.weight", rows, config.hidden_size))
            if config.attention_bias:
                biases.append(take(f"{prefix}{name}.bias", rows))
        norm = take(f"{prefix}k_norm.weight", dim)
        norms.append(norm.expand(config.num_kv_heads, dim))
    bias = torch.cat(biases) if biases else None
    return Linear(torch.cat(matrices), bias), RMSNorm(torch.cat(norms), config.rms_norm_eps)
