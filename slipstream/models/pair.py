"""Whether a target and a draft head belong together."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import PairError
from slipstream.models.causal_lm import vocabulary_names
from slipstream.models.checkpoint import Checkpoint, Opener
from slipstream.models.config import ModelConfig, load_config
from slipstream.models.draft_config import FC, HIDDEN_NORM, DraftConfig, stored_names


def check_pair(target: ModelConfig, draft: DraftConfig) -> None:
    """Raises PairError naming both values of the first thing that does not fit."""
    if draft.hidden_size != target.hidden_size:
        raise PairError(
            f"the draft's hidden_size {draft.hidden_size} is not the target's {target.hidden_size},"
            " whose embedding and LM head it uses"
        )
    if draft.target_hidden_size != target.hidden_size:
        raise PairError(
            f"the draft wants features of width {draft.target_hidden_size}, the target's"
            f" hidden_size is {target.hidden_size}"
        )
    if draft.num_target_layers not in (None, target.num_layers):
        raise PairError(
            f"the draft was made for a target of {draft.num_target_layers} layers, this one has"
            f" {target.num_layers}"
        )
    if max(draft.target_layer_ids) >= target.num_layers:
        raise PairError(
            f"the draft taps layer {max(draft.target_layer_ids)}, the target has"
            f" {target.num_layers} layers"
        )
    if draft.vocab_size != target.vocab_size:
        raise PairError(
            f"the draft's vocab_size {draft.vocab_size} is not the target's {target.vocab_size}"
        )
    if draft.mask_token_id >= target.vocab_size:
        raise PairError(
            f"the draft's mask_token_id {draft.mask_token_id} is not a row of the target's"
            f" embedding, whose vocab_size is {target.vocab_size}"
        )


def fingerprints(
    target_folder: Path, draft_folder: Path | None, *, open_tensors: Opener = Checkpoint.open
) -> dict[str, str]:
    """SHA-256 of the stored bytes of what both servers must share.

    Keys: embedding, lm_head (the embedding's when tied) and, with a draft, fc and hidden_norm.
    """
    target = open_tensors(target_folder)
    embedding, head = vocabulary_names(load_config(target_folder), target)
    prints = {"embedding": target.fingerprint(embedding)}
    prints["lm_head"] = prints["embedding"] if head == embedding else target.fingerprint(head)
    if draft_folder is not None:
        draft = open_tensors(draft_folder)
        names = stored_names(draft.names)
        for key, name in (("fc", FC), ("hidden_norm", HIDDEN_NORM)):
            prints[key] = draft.fingerprint(names.get(name, name))
    return prints
