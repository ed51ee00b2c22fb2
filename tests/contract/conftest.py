"""Fixtures of the tests over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest


@pytest.fixture(scope="session", autouse=True)
async def loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one event loop for all tests.

    The one poller of grpc.aio may have an end of a call for a loop that is closed by then; the next
    loop, which wakes up for it, would fail with that.
    """
    yield
