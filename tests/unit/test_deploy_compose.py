"""The compose files: accepted by Docker Compose, started in order, one namespace per cell."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CASES = [
    ("compose.cpu.yaml", ()),
    ("compose.yaml", ()),
    ("compose.yaml", ("one-gpu",)),
    ("compose.yaml", ("jetspec",)),
    ("compose.yaml", ("jetspec", "jetspec-one-gpu")),
    ("compose.yaml", ("one-gpu", "jetspec", "jetspec-one-gpu")),
]


@cache
def client() -> tuple[str, ...] | None:
    """The command of Docker Compose: the plugin, or the older program of its own."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run((*command, "version"), capture_output=True, check=False)
        if done.returncode == 0:
            return command
    return None


def config(file: str, profiles: Sequence[str], env_file: Path) -> dict[str, Any]:
    """`docker compose config`; skips without a client."""
    command = client()
    if command is None:
        pytest.skip("there is neither `docker compose` nor docker-compose here")
    words = [*command, "--env-file", str(env_file), "-f", str(DEPLOY / file)]
    for profile in profiles:
        words += ["--profile", profile]
    done = subprocess.run((*words, "config"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


def raw(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())
    return found


@pytest.mark.parametrize(("file", "profiles"), CASES)
def test_config_accepts_it(file: str, profiles: tuple[str, ...]) -> None:
    found = config(file, profiles, DEPLOY / ".env.example")
    assert {"prepare", "target", "draft", "gateway"} <= set(found["services"])


def test_the_cases_cover_every_file_and_profile() -> None:
    for path in DEPLOY.glob("compose*.yaml"):
        named = {p for s in raw(path.name)["services"].values() for p in s.get("profiles", ())}
        tried = [set(profiles) for file, profiles in CASES if file == path.name]
        assert tried and named <= set().union(*tried)


@pytest.mark.parametrize("file", ["compose.cpu.yaml", "compose.yaml"])
def test_a_setting_in_the_env_file_reaches_its_container(file: str, tmp_path: Path) -> None:
    env = tmp_path / "env"
    env.write_text("SLIPSTREAM_TARGET_SLOTS=3\nSLIPSTREAM_TARGET_MODEL=a/b\nHTTP_PORT=9999\n")
    found = config(file, (), env)["services"]
    assert found["target"]["environment"]["SLIPSTREAM_TARGET_SLOTS"] == "3"
    assert found["draft"]["environment"]["SLIPSTREAM_DRAFT_MODEL"] == "a/b"
    assert found["gateway"]["environment"]["SLIPSTREAM_GATEWAY_TOKENIZER"] == "a/b"
    assert "9999" in str(found["gateway"]["ports"])


@pytest.mark.parametrize("file", ["compose.cpu.yaml", "compose.yaml"])
def test_services_start_in_order_by_health(file: str) -> None:
    services = raw(file)["services"]
    healthy, done = "service_healthy", "service_completed_successfully"
    for name, service in services.items():
        needs = {k: v["condition"] for k, v in service.get("depends_on", {}).items()}
        base, _, suffix = name.partition("-")
        suffix = suffix and f"-{suffix}"
        if base == "target":
            assert needs[f"prepare{suffix}"] == done
        if base == "draft":
            assert needs[f"target{suffix}"] == healthy
        if base == "gateway":
            assert needs == {f"target{suffix}": healthy, f"draft{suffix}": healthy}


@pytest.mark.parametrize("file", ["compose.cpu.yaml", "compose.yaml"])
def test_every_server_restarts_has_limits_and_cannot_write_the_models(file: str) -> None:
    for name, service in raw(file)["services"].items():
        base = name.split("-")[0]
        if base == "prepare":
            assert service["restart"] == "no"
            assert service["secrets"] == ["hf_token"]
            assert "models:/var/cache/slipstream" in service["volumes"]
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["mem_limit"], name
        assert "secrets" not in service, name
        if base in ("target", "draft", "gateway"):
            assert "models:/var/cache/slipstream:ro" in service["volumes"], name
            assert service["environment"]["HF_HUB_OFFLINE"] == "1", name


def test_a_gpu_cell_shares_namespaces_gpus_and_user() -> None:
    services = raw("compose.yaml")["services"]
    for suffix in ("", "-jetspec"):
        holder = services[f"cell{suffix}"]
        assert holder["ipc"] == "shareable" and holder["shm_size"]
        gpus = holder["environment"]["CELL_GPUS"]
        for name in ("target", "draft", "mps"):
            service = services[name + suffix]
            assert service["ipc"] == service["pid"] == f"service:cell{suffix}"
            assert service["environment"]["NVIDIA_VISIBLE_DEVICES"] == gpus
            assert service["user"] == holder["user"]
            pipes = service["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
            assert f"mps{suffix}:{pipes}" in service["volumes"]
        assert services[f"mps{suffix}"]["profiles"]
