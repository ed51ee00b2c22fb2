"""What a load test must keep, from one TOML file.

    [idle]            seconds: after a run of cancelled calls, all slots and pages are free by then
    [default]         for every run
    [grpc.c8]         for one run, over the default; doors are grpc, rest and health

Limits from above: errors, p50_ms, p95_ms, p99_ms. From below: requests_s, tokens_s, cut_share.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

DEFAULT = Path(__file__).parent / "thresholds.toml"
DOORS = ("grpc", "rest", "health")
MOST = ("errors", "p50_ms", "p95_ms", "p99_ms")
LEAST = ("requests_s", "tokens_s", "cut_share")

Limits = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits by run; `runs` is keyed by "door run"."""

    path: Path
    idle_s: float
    default: Limits
    runs: Mapping[str, Limits]

    def of(self, run: str) -> Limits:
        """The limits of one run, "door run"."""
        return {**self.default, **self.runs.get(run, {})}

    def unused(self, runs: Iterable[str]) -> list[str]:
        """Sections for runs that there are not."""
        return sorted(set(self.runs) - set(runs))


def load(path: Path) -> Thresholds:
    """Reads `path`. Raises ConfigError naming the file and what is wrong in it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--thresholds: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--thresholds: {path}: {error}") from error
    idle = _numbers(path, "idle", content.pop("idle", {}), ("seconds",))
    default = _numbers(path, "default", content.pop("default", {}), (*MOST, *LEAST))
    runs: dict[str, Limits] = {}
    for door, sections in content.items():
        if door not in DOORS or not isinstance(sections, dict):
            raise ConfigError(f"--thresholds: {path}: [{door}] is none of {', '.join(DOORS)}")
        for run, limits in sections.items():
            runs[f"{door} {run}"] = _numbers(path, f"{door}.{run}", limits, (*MOST, *LEAST))
    return Thresholds(path, idle.get("seconds", 2.0), default, runs)


def check(summary: Mapping[str, Any], limits: Limits) -> list[str]:
    """What a run's summary does not keep, for a person."""
    name = f"{summary['door']} {summary['run']}"
    failures = []
    for key, limit in limits.items():
        value = summary[key]
        if value is None:
            if key in LEAST or summary["errors"] == 0:
                failures.append(f"{name}: no {key}: no call was answered")
        elif key in MOST and value > limit:
            failures.append(f"{name}: {key} is {value:g}, allowed are {limit:g} at most")
        elif key in LEAST and value < limit:
            failures.append(f"{name}: {key} is {value:g}, wanted are {limit:g} at least")
    if summary["errors"] > limits.get("errors", float("inf")):
        failures += [f"{name}: {n} x {text}" for text, n in summary["error_messages"].items()]
    return failures


def _numbers(path: Path, section: str, found: Any, known: tuple[str, ...]) -> dict[str, float]:
    if not isinstance(found, dict):
        raise ConfigError(f"--thresholds: {path}: {section} must be a table, got {found!r}")
    for key, value in found.items():
        if key not in known:
            raise ConfigError(
                f"--thresholds: {path}: [{section}] {key} is none of {', '.join(known)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(
                f"--thresholds: {path}: [{section}] {key} must be a number of at least 0,"
                f" got {value!r}"
            )
    return {key: float(value) for key, value in found.items()}
