"""The images' health check against a real server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from slipstream.serving import Server

HEALTH = Path(__file__).resolve().parents[2] / "deploy" / "health.py"


async def check(*argv: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HEALTH),
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, (out + err).decode().strip()


@pytest.mark.anyio
async def test_exit_status_follows_the_health() -> None:
    server = Server([])
    port = await server.start("127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    try:
        assert await check(address) == (1, "NOT_SERVING")
        await server.ready()
        assert await check(address) == (0, "SERVING")
        await server.ready(False)
        assert await check(address) == (1, "NOT_SERVING")
    finally:
        await server.stop(0)
    status, said = await check(address)
    assert status == 1
    assert said.startswith("UNAVAILABLE")


@pytest.mark.anyio
async def test_wants_one_address() -> None:
    status, said = await check()
    assert status == 2
    assert said.startswith("usage:")
