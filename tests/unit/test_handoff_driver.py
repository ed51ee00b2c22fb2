"""Which bindings of the CUDA driver are used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from slipstream.handoff.cuda_ipc.driver import CudaError, Driver


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands in for the package; its driver has no calls."""
    package = ModuleType("cuda.bindings")
    for name, module in (
        ("cuda", ModuleType("cuda")),
        ("cuda.bindings", package),
        ("cuda.bindings.driver", ModuleType("cuda.bindings.driver")),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return package


@pytest.mark.parametrize("version", ["12.8.0", "12.9", "11.8.7", "0"])
def test_bindings_that_keep_other_threads_waiting_are_refused(
    bindings: ModuleType, version: str
) -> None:
    bindings.__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(CudaError, match=rf"is {version}: 12\.9\.1 is the first"):
        Driver(0)


@pytest.mark.parametrize("version", ["12.9.1", "12.10.0rc1", "13.0.0"])
def test_later_ones_are_used(bindings: ModuleType, version: str) -> None:
    bindings.__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(CudaError, match="^cuInit: .*no attribute"):
        Driver(0)
