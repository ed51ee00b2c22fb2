"""Beside recorded work the servers put copies on their streams, and nothing else.

A kernel that is launched on its own takes the host 5 to 10 us, and slows down others:
benchmarks/README.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.step_together import together
from slipstream.handoff.cuda_ipc import Mapper
from slipstream.layers.graphs import Graphs, Work
from slipstream.tree import resolve_spec
from tests.fakes.linked import BLOCK, CPU, draft_of, target_of
from tests.tiny import make_pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts interpreted kernels"),
]

COPY = "aten.copy_.default"
NOTHING = ("view", "slice", "select", "detach", "alias", "as_strided", "empty", "item", "_local")
"""Parts of the names of operations that launch nothing."""


class Outside(TorchDispatchMode):
    """Counts by name what is launched outside of `recorded` work, on purpose or not."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self._within = 0

    def recorded(self, work: Work) -> Work:
        def run() -> None:
            self._within += 1
            try:
                work()
            finally:
                self._within -= 1

        return run

    def count(self, name: str) -> None:
        if not self._within and not any(part in name for part in NOTHING):
            self.launched[name] += 1

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """What is launched meanwhile."""
        self.launched.clear()
        with self:
            yield self.launched


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Outside:
    made, launch = Outside(), InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        made.count(f"kernel {kernel.fn.__name__}")
        # What the interpreter does itself is none of it.
        made.recorded(lambda: launch(kernel, *args, **kwargs))()

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(Graphs, "capture", lambda graphs, work: made.recorded(work))
    return made


def test_requests_are_copies_and_recorded_work(tmp_path: Any, outside: Outside) -> None:
    pair = make_pair(tmp_path, "qwen3", block_size=BLOCK)
    target, draft = target_of(pair), draft_of(pair, Mapper(CPU))
    chain = resolve_spec("chain", block_size=BLOCK)
    with outside.counting() as launched:
        target.rewind(1, 3)
        assert launched == {COPY: 1}
        with together(target, draft, chain, 2, 11) as run:
            assert launched[COPY] > 10, "a session, admissions, prompts, a first step"
            assert set(launched) == {COPY}
            launched.clear()
            run.run(1)
            assert set(launched) == {COPY}
            assert launched[COPY] <= 6, "a step: what both are told, and what is read of both"
        assert set(launched) == {COPY}
    assert target.shared is not None
    target.shared.close()


def test_a_launch_is_seen(outside: Outside) -> None:
    """Otherwise the test above would count nothing."""
    values = torch.zeros(3)
    with outside.counting() as launched:
        outside.recorded(lambda: values.add_(1))()  # type: ignore[arg-type,return-value]
        assert not launched
        values.mul_(2)
        values.copy_(torch.empty(3))
        one[(1,)](values)
    assert launched == {"aten.mul_.Tensor": 1, COPY: 1, "kernel one": 1}
    assert values[0] == 1


@triton.jit
def one(out: Any) -> None:
    tl.store(out, 1.0)
