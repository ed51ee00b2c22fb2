"""The Dockerfiles: what they copy exists, how they run, and that no torch reaches the gateway."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROCESSES = ("gateway", "target", "draft")
COMPILERS = ("gcc", "g++", "clang", "build-essential", "cmake", "cargo", "rustc", "-dev")


def instructions(process: str) -> list[str]:
    """The Dockerfile's instructions, each on one line, without comments."""
    text = (DEPLOY / f"Dockerfile.{process}").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [line for line in joined.splitlines() if line.strip()]


def last_stage(process: str) -> list[str]:
    found = instructions(process)
    start = max(i for i, line in enumerate(found) if line.startswith("FROM "))
    return found[start:]


def allowed(path: str) -> bool:
    """Whether .dockerignore lets `path` into a build: the last matching rule decides."""
    result = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        rule = line.removeprefix("!")
        pattern = rule.removeprefix("**/")
        parts = path.split("/")
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        names = parts if rule.startswith("**/") else heads
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            result = line.startswith("!")
    return result


@pytest.mark.parametrize("process", PROCESSES)
def test_what_is_copied_exists_and_reaches_the_build(process: str) -> None:
    copies = [line for line in instructions(process) if line.startswith("COPY ")]
    sources = [s for line in copies if "--from=" not in line for s in line.split()[1:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert allowed(source), f"{source} is kept out by .dockerignore"
    assert not allowed(f"slipstream/__pycache__/x-{process}.pyc")
    assert not allowed("tests/conftest.py")
    assert not allowed("deploy/.env")


@pytest.mark.parametrize("process", PROCESSES)
def test_stages_exist(process: str) -> None:
    text = "\n".join(instructions(process))
    made = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.M))
    assert set(re.findall(r"(?:--from=|,from=)(\w+)", text)) <= made


@pytest.mark.parametrize("process", PROCESSES)
def test_the_base_is_an_argument_and_pinned(process: str) -> None:
    found = instructions(process)
    base = next(line for line in found if line.startswith("ARG BASE="))
    image, _, tag = base.removeprefix("ARG BASE=").partition(":")
    assert image and tag and tag != "latest"
    froms = [line.split()[1] for line in found if line.startswith("FROM ")]
    assert set(froms) == {"${BASE}", "${WHEELS}"}


@pytest.mark.parametrize("process", PROCESSES)
def test_it_runs_as_a_user_with_a_health_check(process: str) -> None:
    stage = last_stage(process)
    users = [line for line in stage if line.startswith("USER ")]
    assert users == ["USER ${UID}:${UID}"]
    assert next(line for line in stage if line.startswith("ARG UID=")) != "ARG UID=0"
    health = next(line for line in stage if line.startswith("HEALTHCHECK "))
    assert "health.py" in health
    module = "gateway" if process == "gateway" else f"services.{process}"
    assert stage[-1] == f'CMD ["python", "-m", "{module}"]'


@pytest.mark.parametrize("process", PROCESSES)
def test_no_compiler(process: str) -> None:
    words = " ".join(instructions(process)).split()
    assert not [word for word in words if word.endswith(COMPILERS)]
    assert "apt-get" not in words


@pytest.mark.parametrize("process", PROCESSES)
def test_an_image_holds_the_code_of_its_own_process(process: str) -> None:
    copied = " ".join(line for line in instructions(process) if line.startswith("COPY "))
    for other in PROCESSES:
        folder = "gateway" if other == "gateway" else f"services/{other}"
        assert (f" {folder} {folder}" in copied) == (other == process)


def requirements(*extras: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "requirements.py"), *extras],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def closure(names: list[str]) -> set[str]:
    """Everything that pip installs for `names`, as far as it is installed here."""
    found: set[str] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        extras = sorted(wanted.extras) or [""]
        if not any(wanted.marker is None or wanted.marker.evaluate({"extra": e}) for e in extras):
            continue
        name = wanted.name.lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
                need.marker = None
                todo.append(need)
    return found


def test_the_gateway_installs_no_torch() -> None:
    (asked,) = (
        line for line in instructions("gateway") if "requirements.py " in line and "RUN" in line
    )
    assert "requirements.py gateway >" in asked
    found = closure(requirements("gateway"))
    assert {"fastapi", "grpcio", "tokenizers", "huggingface-hub"} <= found
    assert found.isdisjoint({"torch", "transformers", "numpy", "safetensors", "triton"})
    assert not [name for name in found if name.startswith("nvidia")]
    assert "TORCH" not in (DEPLOY / "Dockerfile.gateway").read_text()


def test_the_servers_install_the_engine() -> None:
    assert "torch" in closure(requirements("engine"))
    for process in ("target", "draft"):
        assert any("requirements.py engine >" in line for line in instructions(process))


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        requirements("no-such-extra")
