"""FlashInfer's prefill against the plain attention; needs a GPU and flashinfer-python."""

from __future__ import annotations

import sys

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.layers.attention_device import TorchAttention
from slipstream.layers.flashinfer_prefill import FlashInferPrefill
from tests.kernels.test_kernels_attention import Case


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="--prefill-attention-backend flashinfer"):
        FlashInferPrefill(
            4, 2, 64, 16, torch.bfloat16, 0.3, [None], device="cpu", most_entries=2, most_pages=9
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "auto"])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(32, 8, 128), (9, 3, 64)])
def test_equals_the_plain_attention(heads: int, kv: int, dim: int, backend: str) -> None:
    """Several steps one after the other, without waiting: more than the ring has room for."""
    pytest.importorskip("flashinfer")
    device = torch.device("cuda")
    windows = [None, 40]
    prefill = FlashInferPrefill(
        heads, kv, dim, 16, torch.bfloat16, 0.3, windows, device=device, most_entries=4,
        most_pages=500, backend=backend,
    )  # fmt: skip
    counts = ([200, 1, 37], [5], [512, 300, 2, 1], [64, 64])
    starts = ([0, 100, 333], [1000], [100, 0, 0, 17], [64, 1])
    cases = [
        Case(device, c, s, heads=heads, kv=kv, dim=dim, page_size=16, dtype=torch.bfloat16, seed=i)
        for i, (c, s) in enumerate(zip(counts, starts, strict=True))
    ]
    found = []
    for case in cases:
        prefill.plan(
            [case.batch.count(e) for e in range(len(case.batch))],
            case.batch.start_list,
            case.batch.pages,
        )
        for window in windows:
            out = torch.full_like(case.q, torch.nan).flatten(1)
            found.append(prefill(case.q, case.pages[0], case.pages[1], window, out))
    wanted = [
        case.run(TorchAttention(case.rows, *case.shape), w) for case in cases for w in windows
    ]
    for got, want in zip(found, wanted, strict=True):
        error = (got.float() - want.float()).abs().max()
        print(f"largest difference {error:.4f} of {want.float().abs().max():.2f}")
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
