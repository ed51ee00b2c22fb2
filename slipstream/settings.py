"""Settings of one process: flags over environment variables over defaults, validated once.

Each process declares one frozen subclass of `ProcessSettings` with its own `env_prefix`; flag
`--max-model-len` and variable `<PREFIX>MAX_MODEL_LEN` are the same field. Nothing changes a
settings object after start: "auto" is resolved by a function that returns a new object.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict, SettingsError

from slipstream.errors import ConfigError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


Device = Annotated[str, AfterValidator(_device)]
"""Where a process computes: auto, cpu, cuda or cuda:N."""


def _listed(value: object) -> object:
    """A variable of the environment names several with commas between them."""
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list):
        return [name for part in given for name in str(part).split(",") if name or given != [""]]
    return given


def _distinct(value: list[str]) -> list[str]:
    if not all(value) or len(set(value)) != len(value):
        raise ValueError("must be different names, none of them empty")
    return value


Names = Annotated[list[str], NoDecode, BeforeValidator(_listed), AfterValidator(_distinct)]
"""Several names: the flag more than once, or with commas between them."""


class ProcessSettings(BaseSettings):
    """Base of every process's settings."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )


S = TypeVar("S", bound=ProcessSettings)


def parse(cls: type[S], argv: Sequence[str]) -> S:
    """Reads `cls` from `argv` and the environment.

    Raises ConfigError naming each bad flag with its value; exits like argparse on --help and on
    unknown flags.
    """
    try:
        return CliApp.run(cls, cli_args=list(argv))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_explain, error.errors()))) from error
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _explain(problem: ErrorDetails) -> str:
    flag = ".".join(map(str, problem["loc"])).replace("_", "-")
    if problem["type"] == "missing":
        return f"--{flag}: is required"
    return f"--{flag}: {problem['msg']}, got {problem['input']!r}"


def parse_or_exit(cls: type[S], argv: Sequence[str]) -> S:
    """`parse` for a `__main__`: a ConfigError is printed and the process exits with status 2."""
    try:
        return parse(cls, argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
