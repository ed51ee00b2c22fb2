"""chat: history, commands, and Ctrl-C, in a process of its own against a fake gateway."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slipstream.cli import main
from tests.fakes.rest import FakeRest, fake_rest


@pytest.fixture
def rest() -> Iterator[FakeRest]:
    with fake_rest() as server:
        yield server


def start(url: str, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli.main", "chat", f"--url={url}", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_history_and_commands(rest: FakeRest) -> None:
    chat = start(rest.url, "--system=Be brief.", "--no-draft")
    lines = "one\n/stats\ntwo\n/reset\n/stats\nthree\n/what\nfail\n/exit\nnever\n"
    out, err = chat.communicate(lines, timeout=90)
    assert (chat.returncode, err) == (0, "")
    asked = [[m["content"] for m in body["messages"]] for _, body in rest.bodies]
    said = "w0 w1 w2 w3 w4 "
    assert asked == [
        ["Be brief.", "one"],
        ["Be brief.", "one", said, "two"],
        ["Be brief.", "three"],
        ["Be brief.", "three", said, "fail"],
    ]
    assert rest.bodies[0][1]["speculative"] == {"stats": True, "enabled": False}
    assert "7 + 10 tokens, first after" in out and "tau 3.00 over 3 steps" in out
    assert "(forgotten)" in out and "no answer to measure" in out
    assert "error: HTTP 400: messages: not today" in out
    assert "\x1b[" not in out


def test_ctrl_c_stops_the_answer_only(rest: FakeRest) -> None:
    rest.words, rest.pause_s = 400, 0.05
    chat = start(rest.url)
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write("one\n")
    chat.stdin.flush()
    shown = ""
    while "w1 " not in shown:
        shown += chat.stdout.read(1)
    rest.words = 2
    chat.send_signal(signal.SIGINT)
    out, err = chat.communicate("two\n", timeout=90)
    assert (chat.returncode, err) == (0, "")
    assert "[stopped]" in out
    [_, (_, body)] = rest.bodies
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"].startswith("w0 w1 ")


def test_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chat", "--url=http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9: ")


@pytest.mark.parametrize("argv", [[], ["serve"]])
def test_no_such_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    assert "usage: slipstream COMMAND" in capsys.readouterr().err
