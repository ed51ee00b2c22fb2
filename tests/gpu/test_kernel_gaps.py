"""Looks and changes on a GPU; what is decided from them is tests/unit/test_kernel_gaps.py."""

from __future__ import annotations

import time

import pytest
import torch

from slipstream.layers.graphs import Graphs
from slipstream.layers.kernel_gaps import CHAIN, FASTER, KernelGaps

pytestmark = pytest.mark.gpu

LIMIT_S = 0.3
NOISE = 1.03


def launch_outside_of_graphs() -> None:
    numbers = torch.zeros(1024, device="cuda")
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for stream in (torch.cuda.default_stream(), other):
        with torch.cuda.stream(stream):
            for _ in range(8):
                numbers.add_(1)
        stream.synchronize()


def test_the_pace_that_was_kept_is_the_faster() -> None:
    """Where there are two; where there is one, nothing is said to be kept."""
    graphs = Graphs(torch.device("cuda", 0))
    gaps = KernelGaps(graphs)
    before = int(gaps._chained[0])
    for _ in range(5):
        launch_outside_of_graphs()
        over = False
        while not over:
            began = time.perf_counter()
            over = gaps.keep()
            assert time.perf_counter() - began < LIMIT_S
        if gaps.keeper.kept:
            with graphs.on_stream():
                assert gaps._look() < NOISE * FASTER * gaps.keeper.slower
            assert 0.1 < gaps.keeper.faster < gaps.keeper.slower < 10
    torch.cuda.synchronize()
    assert int(gaps._chained[0]) >= before + CHAIN  # what was looked at is work
