"""The target: a causal language model that leaves its cache to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.layers.linear import Linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope
from slipstream.models.checkpoint import Checkpoint, Opener, TensorSource, Weights
from slipstream.models.config import ModelConfig, load_config
from slipstream.models.decoder import Attend, DecoderLayer

# Left by older exporters; computed here from the config.
_IGNORED = ("rotary_emb.inv_freq", "masked_bias", "attention.bias")


class Forward(NamedTuple):
    """hidden (T, H) after the final norm; taps (T, K * H), or None when none was asked for."""

    hidden: Tensor
    taps: Tensor | None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The embedding and the LM head, which a draft shares with its target.

    Attributes:
        embedding: (rows, H); rows may exceed the vocabulary.
        head: H -> vocab_size; padded rows are cut off.
        size: vocab_size.
    """

    embedding: Tensor
    head: Linear
    size: int

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        open_tensors: Opener = Checkpoint.open,
    ) -> Vocabulary:
        """Reads only these tensors of a target's folder."""
        source = open_tensors(folder)
        return cls.take(load_config(folder), source, Weights(source, dtype, device))

    @classmethod
    def take(cls, config: ModelConfig, source: TensorSource, weights: Weights) -> Vocabulary:
        """Raises ConfigError when a matrix has fewer rows than the vocabulary."""
        embedding, head = vocabulary_names(config, source)
        matrices = {}
        for name in {embedding, head}:
            rows = source.shape(name)[0]
            if rows < config.vocab_size:
                raise ConfigError(
                    f"{source.folder}: {name!r} has {rows} rows, fewer than vocab_size"
                    f" {config.vocab_size}"
                )
            matrices[name] = weights(name, rows, config.hidden_size)
        return cls(
            matrices[embedding], Linear(matrices[head][: config.vocab_size]), config.vocab_size
        )

    def embed(self, ids: Tensor) -> Tensor:
        """ids (T,) -> (T, H)."""
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> (R, V) fp32."""
        return self.head(hidden).float()


def vocabulary_names(config: ModelConfig, source: TensorSource) -> tuple[str, str]:
    """Stored names of embedding and head: the same for a tied target."""
    embedding = "model.embed_tokens.weight"
    if config.tie_word_embeddings:
        return embedding, embedding
    if "lm_head.weight" not in source.names:
        raise ConfigError(
            f"{source.folder}: tie_word_embeddings is false, but there is no 'lm_head.weight'"
        )
    return embedding, "lm_head.weight"


class CausalLM:
    """Llama, Qwen2 or Qwen3 for inference. Holds no cache and no request: any thread may use it."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: Vocabulary,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rope: Rope,
    ) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.layers, self.norm, self.rope = tuple(layers), norm, rope

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        max_len: int | None = None,
        open_tensors: Opener = Checkpoint.open,
    ) -> CausalLM:
        """Loads a Hugging Face folder.

        Args:
            max_len: positions that will be served, for RoPE types that depend on it.
            open_tensors: where the weights come from.

        Raises ConfigError naming what is missing, superfluous, or of another shape.
        """
        config, source = load_config(folder), open_tensors(folder)
        weights = Weights(source, dtype, device)
        rope = Rope(config.rope, device, max_len)
        vocabulary = Vocabulary.take(config, source, weights)
        layers = [
            DecoderLayer(i, config, weights, f"model.layers.{i}.", rope)
            for i in range(config.num_layers)
        ]
        norm = RMSNorm(weights("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        weights.check_all_taken(ignore=(*_IGNORED, *tied))
        return cls(config, vocabulary, layers, norm, rope)

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> Forward:
        """One pass over T rows.

        Args:
            ids: (T,) token ids.
            positions: (T,) absolute positions.
            taps: 0-based layers whose OUTPUT (the residual stream, not normed, also for the last
                layer) is wanted, concatenated in this order.
        """
        x = self.vocabulary.embed(ids)
        rotation = self.rope(positions)
        tapped: dict[int, Tensor] = {}
        for layer in self.layers:
            x = layer(x, rotation, attend)
            if layer.index in taps:
                tapped[layer.index] = x
        features = torch.cat([tapped[i] for i in taps], -1) if taps else None
        return Forward(self.norm(x), features)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) of `forward` -> (R, vocab_size) fp32."""
        return self.vocabulary.logits(hidden)
