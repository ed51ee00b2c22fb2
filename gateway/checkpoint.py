"""What the gateway reads of a checkpoint folder: everything about text, nothing about weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.defaults import SamplingDefaults
from gateway.template import ChatTemplate
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's text side; `template` is None when it has no chat."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults = SamplingDefaults()

    @classmethod
    def load(cls, folder: Path, *, recommended: bool = True) -> Checkpoint:
        """Reads `folder`; `recommended`: its own sampling is what requests leave open.

        Raises ConfigError naming the file that cannot be used.
        """
        tokenizer = Tokenizer.load(folder)
        return cls(
            tokenizer,
            ChatTemplate.load(folder, tokenizer),
            SamplingDefaults.load(folder) if recommended else SamplingDefaults(),
        )
