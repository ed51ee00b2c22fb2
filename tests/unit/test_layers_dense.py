"""Dense layers, norms and rotations against plain torch."""

from __future__ import annotations

import pytest
import torch

from slipstream.layers.linear import Linear, can_pack
from slipstream.layers.memory import keep_heap
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rope
from slipstream.layers.rope_config import RopeConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_linear(dtype: torch.dtype, bias: bool, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(40, 24, dtype=dtype), torch.randn(rows, 24, dtype=dtype)
    offset = torch.randn(40, dtype=dtype) if bias else None
    residual = torch.randn(rows, 40, dtype=dtype)
    layer = Linear(weight, offset)
    want = x.double() @ weight.double().T
    if offset is not None:
        want = want + offset.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    got, added = layer(x), layer(x, residual)
    assert got.dtype == added.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * 4)
    want = want + residual.double()
    torch.testing.assert_close(added.double(), want, rtol=tolerance, atol=tolerance * 4)
    assert torch.equal(layer(x), got)


def test_linear_without_packing_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, residual = torch.randn(40, 24), torch.randn(5, 24), torch.randn(5, 40)
    packed = Linear(weight)
    monkeypatch.setattr("slipstream.layers.linear.can_pack", lambda *_: False)
    plain = Linear(weight)
    assert not plain.packed
    torch.testing.assert_close(plain(x), packed(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain(x, residual), packed(x, residual), rtol=1e-5, atol=1e-5)


def test_linear_takes_views() -> None:
    weight, wide = torch.randn(16, 24), torch.randn(6, 48)
    torch.testing.assert_close(
        Linear(weight)(wide[:, :24]), wide[:, :24] @ weight.T, rtol=1e-5, atol=1e-5
    )


def test_only_cpu_floats_are_packed() -> None:
    assert can_pack(torch.float32, "cpu")
    assert not can_pack(torch.float16, "cpu")
    assert not can_pack(torch.bfloat16, "cuda")


def test_norm_is_computed_in_fp32() -> None:
    x = (torch.randn(4, 64) * 300).bfloat16()
    weight = torch.rand(64).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    got = RMSNorm(weight, 1e-5)(x).double()
    torch.testing.assert_close(got, exact * weight.double(), rtol=1e-2, atol=1e-2)


def test_norm_with_a_vector_for_each_head() -> None:
    x, weight = torch.randn(5, 3, 8), torch.rand(3, 8)
    got = RMSNorm(weight, 1e-6)(x)
    for head in range(3):
        torch.testing.assert_close(got[:, head], RMSNorm(weight[head], 1e-6)(x[:, head]))


def test_rotation_of_a_part_leaves_the_rest() -> None:
    x, positions = torch.randn(5, 2, 24), torch.tensor([0, 1, 7, 30, 31])
    rope = Rope(RopeConfig("default", 10000.0, 16, 64))
    got = rope.rotate(x, rope(positions))
    torch.testing.assert_close(got[..., 16:], x[..., 16:])
    torch.testing.assert_close(got[..., :16], rope.rotate(x[..., :16], rope(positions)))
    torch.testing.assert_close(got[0], x[0])  # position 0 turns nothing
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_distance_only() -> None:
    rope = Rope(RopeConfig("default", 500.0, 16, 64))
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(a: int, b: int) -> float:
        turned = rope.rotate(q, rope(torch.tensor([a]))), rope.rotate(k, rope(torch.tensor([b])))
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)


def test_heap_option_is_accepted() -> None:
    assert keep_heap() in (True, False)
