"""The sampling that a checkpoint recommends, for what a request leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.schemas import GenerateBody, validate
from gateway.tokenizer import read_json
from slipstream.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of the fields that a request does not give; `top_k` 0 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> SamplingDefaults:
        """As generation_config.json in `folder` has them; what it does not name stays off.

        Raises ConfigError naming a value that no request may have either.
        """
        path = folder / "generation_config.json"
        config = read_json(path)
        given = {name: config.get(name) for name in cls.__dataclass_fields__}
        try:
            body = validate(GenerateBody, given)
        except InvalidRequest as error:
            raise ConfigError(f"{path}: {error}") from error
        named = {name: getattr(body, name) for name in given}
        return cls(**{name: value for name, value in named.items() if value is not None})
