"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidia0").exists():
    # Triton reads it when a kernel is defined: before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """grpc.aio runs on asyncio only."""
    return "asyncio"
