"""From what a person types to a folder: a path, a Hugging Face hub id, or an embedded name."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.models import embedded
from slipstream.models.bundled import bundled_head

_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model(name: str) -> Path:
    """A target's folder.

    The embedded model (`embedded.NAME`) is converted into the user's cache on first use; a hub id
    is downloaded by huggingface_hub into its own cache. Raises ConfigError naming what was not
    found.
    """
    if name.lower() == embedded.NAME:
        return embedded.prepare()
    return _folder(name, "model")


def resolve_draft(name: str) -> Path:
    """A draft head's folder: `dflash` and `jetspec` are the bundled heads of the embedded model."""
    return bundled_head(name) or _folder(name, "draft")


def _folder(name: str, what: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") != 1
    if path.exists() or looks_local:
        raise ConfigError(f"no {what} at {name!r}: neither a folder, a hub id nor an embedded name")
    return _download(name, what)


def _download(name: str, what: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise ConfigError(f"{what} {name!r}: huggingface_hub is needed for hub ids") from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{what} {name!r} is not a folder and could not be downloaded:"
            f" {reason[0] if reason else type(error).__name__}"
        ) from error
