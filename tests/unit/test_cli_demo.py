"""The demonstration's measuring and comparing, against a fake gateway in place of the cells."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from slipstream import hardware
from slipstream.cli import demo
from slipstream.cli.client import client
from slipstream.cli.launcher import LaunchFailed
from tests.fakes.rest import fake_rest


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Flags of every cell that was asked for; each is a fake gateway."""
    asked: list[Sequence[str]] = []

    @contextlib.asynccontextmanager
    async def cell(flags: Sequence[str]) -> AsyncIterator[httpx.AsyncClient]:
        asked.append(flags)
        with fake_rest() as rest:
            async with client(rest.url, 32) as http:
                yield http

    monkeypatch.setattr(demo, "_cell", cell)
    return asked


@pytest.mark.parametrize("bf16", [True, False])
def test_the_last_line_is_the_result(
    cells: list[Sequence[str]],
    bf16: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hardware, "has_bf16", lambda: bf16)
    assert demo.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert cells == [(), demo.PINNED]
    assert result["identical"] is True
    assert result["tau"] == 3.0
    assert result["tok_s_draft"] > 0 < result["tok_s_plain"]
    assert result["cpu"]
    assert result.get("bf16_same") == (10 if bf16 else None)


def test_a_difference_is_a_failure(
    cells: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "_same", lambda *_: 9)
    assert demo.main() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is False


def test_a_cell_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.asynccontextmanager
    async def cell(_: Sequence[str]) -> AsyncIterator[httpx.AsyncClient]:
        raise LaunchFailed("target exited with status 2")
        yield httpx.AsyncClient()

    monkeypatch.setattr(demo, "_cell", cell)
    assert demo.main() == 1
    assert capsys.readouterr().err == "error: target exited with status 2\n"
