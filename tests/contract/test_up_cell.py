"""A launched cell of the real gateway over fake models: its servers die, and come back."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
from tokenizers import Tokenizer, models

from slipstream.cli.bench import run_all
from slipstream.cli.client import COMPLETIONS, Options, ask, client, completion_body
from slipstream.cli.console import Console
from slipstream.cli.launcher import CellCommands, Launcher
from slipstream.cli.prompts import Conversation
from slipstream.cli.report import Run
from slipstream.cli.up import base_url
from slipstream.cli.up_settings import LOOPBACK, free_port

WAIT_S = 30.0


@pytest.fixture
def commands(tmp_path: Path) -> CellCommands:
    words = models.WordLevel({f"t{n}": n for n in range(1000)}, unk_token="t0")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    target = free_port()
    draft = free_port(target)
    python = (sys.executable, "-m")
    return CellCommands(
        target=(*python, "tests.fakes.target", f"--port={target}"),
        draft=(*python, "tests.fakes.draft", f"--port={draft}", "--slots=8"),
        gateway=(
            *(*python, "gateway", f"--target={LOOPBACK}:{target}", f"--draft={LOOPBACK}:{draft}"),
            *(f"--tokenizer={tmp_path}", "--port=0", "--grpc-port=0", "--pin-nodes"),
        ),
    )


@pytest.mark.anyio
async def test_drafting_resumes_and_no_token_changes(commands: CellCommands) -> None:
    rows = [Conversation(str(n), prompt=[n + 1, 2, 3]) for n in range(8)]
    log = io.StringIO()

    async with (
        Launcher(commands, Console(log)) as cell,
        client(base_url(cell.gateway), len(rows)) as http,
    ):

        async def ask_all() -> tuple[list[str], Run]:
            run = await run_all(http, rows, len(rows), Options(max_tokens=48, temperature=0.0))
            assert not run.errors, log.getvalue()
            return [answer.text for answer in run.answers], run

        async def until_drafted() -> tuple[list[str], Run]:
            with anyio.fail_after(WAIT_S):
                while True:
                    texts, run = await ask_all()
                    if any(nodes > 1 for answer in run.answers for nodes in answer.nodes):
                        return texts, run
                    await anyio.sleep(0.1)

        expected, _ = await until_drafted()
        os.kill(cell.pid("draft"), signal.SIGKILL)
        without, _ = await ask_all()
        assert without == expected
        again, run = await until_drafted()
        assert again == expected
        assert run.summary()["tau"] > 1
    assert "draft is back" in log.getvalue()


@pytest.mark.anyio
async def test_a_request_outlives_its_target(commands: CellCommands) -> None:
    body = completion_body([1, 2, 3], Options(max_tokens=400, temperature=0.0))
    log = io.StringIO()
    async with (
        Launcher(commands, Console(log)) as cell,
        client(base_url(cell.gateway)) as http,
    ):

        async def ready() -> bool:
            return (await http.get("/ready")).status_code == 200

        with anyio.fail_after(WAIT_S):
            while not await ready():  # noqa: ASYNC110
                await anyio.sleep(0.05)
            expected = await ask(http, COMPLETIONS, body)
            victims = [cell.pid("target")]

            def kill(_: str) -> None:
                if victims:
                    os.kill(victims.pop(), signal.SIGKILL)

            answer = await ask(http, COMPLETIONS, body, kill)
    assert not victims and answer.text == expected.text
    assert "target is back" in log.getvalue()
