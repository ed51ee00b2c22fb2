"""The draft heads that come with the project. Nothing here imports torch."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from slipstream.errors import ConfigError

HEADS = {
    "dflash": "SmolLM2-135M-Instruct-DFlash-b16",
    "jetspec": "SmolLM2-135M-Instruct-JetSpec-b16",
}
"""Names of the heads of the embedded model, and their folders."""


def bundled_head(name: str) -> Path | None:
    """The folder of a head of HEADS; None for any other name. Raises ConfigError when missing."""
    folder = HEADS.get(name.lower())
    if folder is None:
        return None
    for root in places():
        if (root / folder / "config.json").exists():
            return root / folder
    raise ConfigError(f"the bundled head {name!r} is not installed: no {folder} in {places()}")


def places() -> list[Path]:
    """Where the heads may lie: a checkout's models/, or share/slipstream of a wheel."""
    checkout = Path(__file__).resolve().parents[2] / "models"
    installed = Path(sysconfig.get_path("data")) / "share" / "slipstream" / "models"
    return [checkout, installed]
