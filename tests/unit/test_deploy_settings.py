"""deploy/.env.example and the compose files know every setting of the processes, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from slipstream.settings import ProcessSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
EXAMPLE = (DEPLOY / ".env.example").read_text()
COMPOSE = ("compose.cpu.yaml", "compose.yaml")
CLASSES: tuple[type[ProcessSettings], ...] = (TargetSettings, DraftSettings, GatewaySettings)

ASSIGNED = dict(re.findall(r"^#? ?([A-Z][A-Z0-9_]*)=(.*)$", EXAMPLE, re.M))
"""Variables that a user may set, with the default that stands there."""


SETTINGS: list[tuple[str, Any]] = [
    (f"{cls.model_config.get('env_prefix', '')}{name.upper()}", field)
    for cls in CLASSES
    for name, field in cls.model_fields.items()
]


def services(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())["services"]
    return found


def environment(file: str, process: str) -> dict[str, Any]:
    """What a container of `process` gets; None: what .env says."""
    found: dict[str, Any] = services(file)[process]["environment"]
    return found


@pytest.mark.parametrize(("name", "field"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_every_setting_is_named_with_its_default(name: str, field: Any) -> None:
    assert re.search(rf"\b{name}\b", EXAMPLE), f".env.example does not name {name}"
    if name not in ASSIGNED or name in ("SLIPSTREAM_TARGET_MODEL", "SLIPSTREAM_TARGET_DRAFT"):
        return  # the compose files set it, and the default is theirs
    text, default = ASSIGNED[name], field.get_default(call_default_factory=True)
    if default is None or default in ("", []):
        assert text == ""
    elif isinstance(default, bool):
        assert text == str(default).lower()
    elif isinstance(default, dict):
        assert json.loads(text) == default
    else:
        assert type(default)(text) == default


def test_no_setting_is_named_that_does_not_exist() -> None:
    known = {name for name, _ in SETTINGS}
    assert set(re.findall(r"SLIPSTREAM_[A-Z0-9_]+\b", EXAMPLE)) - known == set()


def test_every_variable_has_a_line_that_explains_it() -> None:
    lines = EXAMPLE.splitlines()
    for number, line in enumerate(lines):
        if not re.match(r"#? ?[A-Z][A-Z0-9_]*=", line):
            continue
        above = number - 1
        while re.match(r"#? ?[A-Z][A-Z0-9_]*=", lines[above]):
            above -= 1
        assert re.match(r"# \S", lines[above]), f"nothing explains {line}"


@pytest.mark.parametrize("file", COMPOSE)
@pytest.mark.parametrize("cls", CLASSES)
def test_every_setting_reaches_its_container(file: str, cls: type[ProcessSettings]) -> None:
    prefix = cls.model_config.get("env_prefix", "")
    process = prefix.split("_")[1].lower()
    wanted = {prefix + name.upper() for name in cls.model_fields}
    for name in services(file):
        if name.split("-")[0] != process:
            continue
        given = environment(file, name)
        assert {key for key in given if key.startswith("SLIPSTREAM_")} == wanted
        for key, value in given.items():
            assert value is not None or key in ASSIGNED, f"{key} cannot be set in .env"


def test_the_example_and_the_compose_files_know_the_same_variables() -> None:
    texts = [(DEPLOY / file).read_text() for file in COMPOSE]
    used = {name for text in texts for name in re.findall(r"(?<!\$)\$\{([A-Z0-9_]+)", text)}
    passed = {name for text in texts for name in re.findall(r"^ +([A-Z0-9_]+):$", text, re.M)}
    assert used | passed == set(ASSIGNED)


def test_defaults_in_the_example_are_those_of_the_compose_files() -> None:
    texts = [(DEPLOY / file).read_text() for file in COMPOSE]
    defaults: dict[str, set[str]] = {}
    for text in texts:
        for name, default in re.findall(r"(?<!\$)\$\{([A-Z0-9_]+):-([^}]*)\}", text):
            defaults.setdefault(name, set()).add(default)
    for name, found in defaults.items():
        if ASSIGNED[name]:
            assert found - {""} == {ASSIGNED[name]}, name
        else:
            for default in found - {""}:
                assert default in EXAMPLE, f"the default {default} of {name} is not told"
