"""The gateway as a process: readiness, signals, ports, and what it never loads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.tiny import make_tokenizer

FORBIDDEN = {"torch", "transformers", "services"}
BODY = {"prompt": "x", "max_tokens": 90_000, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def command(folder: Path, *flags: str) -> list[str]:
    common = ["--target", "127.0.0.1:1", "--tokenizer", str(folder), "--log-level", "warning"]
    return [sys.executable, "-m", "tests.fakes.scheduler", *common, *flags]


@contextmanager
def gateway(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        command(folder, "--port", "0", *flags), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        word, _, data = process.stdout.readline().partition(" ")
        assert word == "READY"
        yield process, json.loads(data)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_signal_drain_and_modules(folder: Path) -> None:
    with gateway(folder, "--drain-s", "20") as (process, ready):
        client = httpx.Client(base_url=f"http://{ready['http']}", trust_env=False)
        with (
            client,
            grpc.insecure_channel(ready["grpc"], [("grpc.enable_http_proxy", 0)]) as channel,
            client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 900}) as stream,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            refused = httpx.post(
                f"http://{ready['http']}/v1/completions", json=BODY, trust_env=False
            )
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            *_, last, done = (line for line in lines if line)
            assert done == "data: [DONE]"
            choice = json.loads(last.removeprefix("data: "))["choices"][0]
            assert choice["finish_reason"] == "length"
        assert process.wait(10) == 0
        assert process.stdout is not None
        word, _, modules = process.stdout.readline().partition(" ")
        assert word == "MODULES"
        assert not FORBIDDEN & set(json.loads(modules))


def test_a_second_signal_exits_at_once(folder: Path) -> None:
    with gateway(folder, "--drain-s", "60") as (process, ready):
        url = f"http://{ready['http']}/v1/completions"
        with httpx.Client(trust_env=False) as client, client.stream("POST", url, json=BODY) as got:
            lines = got.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == -signal.SIGTERM


def test_the_drain_time_is_kept(folder: Path) -> None:
    with gateway(folder, "--drain-s", "0.3") as (process, ready):
        url = f"http://{ready['http']}/v1/completions"
        with httpx.Client(trust_env=False) as client, client.stream("POST", url, json=BODY) as got:
            reader: list[str] = []
            thread = threading.Thread(target=lambda: reader.extend(got.iter_lines()))
            thread.start()
            process.send_signal(signal.SIGTERM)
            assert process.wait(8) == 0
            thread.join()
        assert '"code":"draining"' in "".join(reader[-6:])


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use_is_named(folder: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = {"--port": "0"} | {flag: port}
        done = subprocess.run(
            command(folder, *(part for item in flags.items() for part in item)),
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert done.returncode == 2
    assert f"error: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("vocab", "files", "message"),
    [
        ("100", True, "tokenizer has 320 ids, but the target's vocabulary only 100"),
        ("320", False, "no tokenizer.json"),
    ],
)
def test_what_does_not_fit_is_an_error_at_start(
    folder: Path, tmp_path: Path, vocab: str, files: bool, message: str
) -> None:
    done = subprocess.run(
        command(folder if files else tmp_path, "--port", "0"),
        capture_output=True,
        text=True,
        timeout=20,
        env=os.environ | {"SLIPSTREAM_FAKE_VOCAB": vocab},
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "READY" not in done.stdout
    assert "Traceback" not in done.stderr


def test_the_real_program_loads_nothing_heavy() -> None:
    code = (
        "import sys, gateway.__main__\n"
        f"found = {sorted(FORBIDDEN)!r}\n"
        "print([name for name in found if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
