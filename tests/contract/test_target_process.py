"""The target as a process: READY, signals, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream import wire
from slipstream.v1 import common_pb2 as pb
from slipstream.v1 import target_pb2 as tpb
from slipstream.v1 import target_pb2_grpc
from tests.tiny import make_pair

WAIT_S = 60.0


@contextmanager
def process(module: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def ready(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    word, _, rest = child.stdout.readline().partition(" ")
    assert word == "READY", child.stderr.read() if child.stderr else ""
    said = json.loads(rest)
    assert said["http"] is None
    return str(said["grpc"])


def test_a_real_target_answers_and_ends(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    flags = ["--model", str(pair.target), "--draft", str(pair.draft), "--dtype", "float32"]
    flags += ["--slots", "2", "--no-warmup", "--threads", "1", "--served-name", "tiny"]
    with process("services.target", *flags) as child:
        with grpc.insecure_channel(ready(child)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            prompt = [7, 9, 11]
            commands = [
                tpb.TargetCommand(number=1, hello=pb.Hello(protocol=wire.PROTOCOL)),
                tpb.TargetCommand(
                    number=2, admit=tpb.TargetAdmit(slot=0, epoch=1, prompt_ids=prompt, limit=9)
                ),
                tpb.TargetCommand(
                    number=3,
                    plan=tpb.TargetPlan(
                        step=1,
                        kind=pb.STEP_KIND_PREFILL,
                        entries=[
                            tpb.TargetPlanEntry(slot=0, epoch=1, reserve=3, count=3, last=True)
                        ],
                    ),
                ),
            ]
            events = list(target_pb2_grpc.TargetServiceStub(channel).Run(iter(commands)))
        assert [e.WhichOneof("event") for e in events] == ["ready", "step_done"]
        assert (events[0].ready.model, events[0].ready.feature_width) == ("tiny", 48)
        assert len(events[1].step_done.entries[0].tokens) == 1
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == 0


def test_sigterm_waits_for_running_requests_and_a_second_one_does_not() -> None:
    with process("tests.fakes.target", "--drain-s", "60") as child:
        address = ready(child)
        with grpc.insecure_channel(address) as channel:
            commands = iter(
                [
                    tpb.TargetCommand(number=1, hello=pb.Hello(protocol=wire.PROTOCOL)),
                    tpb.TargetCommand(
                        number=2,
                        admit=tpb.TargetAdmit(slot=0, epoch=1, prompt_ids=[1], limit=9),
                    ),
                    tpb.TargetCommand(
                        number=3,
                        plan=tpb.TargetPlan(
                            step=1,
                            kind=pb.STEP_KIND_PREFILL,
                            entries=[
                                tpb.TargetPlanEntry(slot=0, epoch=1, reserve=1, count=1, last=True)
                            ],
                        ),
                    ),
                ]
            )
            gate = iter(_held(commands))
            call = target_pb2_grpc.TargetServiceStub(channel).Run(gate)
            assert next(call).WhichOneof("event") == "ready"
            assert next(call).WhichOneof("event") == "step_done", "the request runs"
            child.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.0)
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_S) == -signal.SIGTERM
            call.cancel()


def _held(commands: Iterator[tpb.TargetCommand]) -> Iterator[tpb.TargetCommand]:
    """The commands, then pings for as long as the stream lives."""
    number = 0
    for command in commands:
        number = command.number
        yield command
    while True:
        time.sleep(0.2)
        number += 1
        yield tpb.TargetCommand(number=number, ping=pb.Ping())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model", "/does/not/exist"], "/does/not/exist"),
        (["--model", "x", "--slots", "0"], "--slots"),
        (["--model", "x", "--device", "tpu"], "--device"),
        ([], "--model"),
    ],
)
def test_bad_settings_are_named(flags: list[str], text: str) -> None:
    with process("services.target", *flags) as child:
        _, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 2
        assert text in err and "Traceback" not in err


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process("services.target", "--model", "x", "--port", str(port)) as child:
            _, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 2 and str(port) in err and "Traceback" not in err


def test_a_signal_while_loading_ends_the_process(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    with process("services.target", "--model", str(pair.target), "--log-level", "debug") as child:
        assert child.stderr is not None
        child.stderr.readline()  # asyncio says which selector it uses: the loop runs
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) in (0, -signal.SIGTERM)
