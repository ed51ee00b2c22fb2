"""Targets and draft heads: configs, weights, forward passes, and where the folders lie.

    load_config, ModelConfig             config.json of a Llama, Qwen2 or Qwen3 target
    load_draft_config, DraftConfig       config.json of a DFlash or JetSpec head
    CausalLM, Forward, Attend            the target's forward pass; the caller owns the cache
    ContextProjector, DraftHead          the head: the target's part, and the draft's
    check_pair, fingerprints             whether the two belong together
    Checkpoint, Opener, TensorSource     tensors of a folder
    resolve_model, resolve_draft         a name, a hub id or a path to a folder
    read_acceptance                      a head's expected acceptance by depth
    default_dtype                        what `auto` means on a device
    RandomTensors, write_random_model    weights for a config.json alone

Names are imported when first used, so that resolving a folder does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.models.acceptance import read_acceptance
    from slipstream.models.causal_lm import CausalLM, Forward, Vocabulary
    from slipstream.models.checkpoint import Checkpoint, Opener, TensorSource
    from slipstream.models.config import ModelConfig, load_config
    from slipstream.models.decoder import Attend
    from slipstream.models.draft_config import DraftConfig, load_draft_config
    from slipstream.models.draft_head import ContextProjector, DraftHead
    from slipstream.models.dtype import default_dtype, parse_dtype
    from slipstream.models.pair import check_pair, fingerprints
    from slipstream.models.random_weights import RandomTensors, write_random_model
    from slipstream.models.resolve import resolve_draft, resolve_model

__all__ = [
    "Attend",
    "CausalLM",
    "Checkpoint",
    "ContextProjector",
    "DraftConfig",
    "DraftHead",
    "Forward",
    "ModelConfig",
    "Opener",
    "RandomTensors",
    "TensorSource",
    "Vocabulary",
    "check_pair",
    "default_dtype",
    "fingerprints",
    "load_config",
    "load_draft_config",
    "parse_dtype",
    "read_acceptance",
    "resolve_draft",
    "resolve_model",
    "write_random_model",
]

_HOME = {
    "acceptance": ("read_acceptance",),
    "causal_lm": ("CausalLM", "Forward", "Vocabulary"),
    "checkpoint": ("Checkpoint", "Opener", "TensorSource"),
    "config": ("ModelConfig", "load_config"),
    "decoder": ("Attend",),
    "draft_config": ("DraftConfig", "load_draft_config"),
    "draft_head": ("ContextProjector", "DraftHead"),
    "dtype": ("default_dtype", "parse_dtype"),
    "pair": ("check_pair", "fingerprints"),
    "random_weights": ("RandomTensors", "write_random_model"),
    "resolve": ("resolve_draft", "resolve_model"),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
