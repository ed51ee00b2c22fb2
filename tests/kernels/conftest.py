"""Kernels run on a GPU where there is one, otherwise interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

CUDA = torch.cuda.is_available()

if not CUDA:
    torch.set_num_threads(1)  # interpreted blocks are small; more threads only spin


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(scope="session")
def cases() -> int:
    """How many random cases a test goes through."""
    return 10_000 if CUDA else 40
