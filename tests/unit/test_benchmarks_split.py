"""What is made of the steps of a split, and of a profiler's trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.call_table import BLOCKING, CallTable, plain, read_trace
from benchmarks.split import Load, Step, driven
from benchmarks.split_servers import Cell, servers
from benchmarks.split_summary import periods, summary
from tests.tiny import make_pair


def step(number: int, started: int, slots: tuple[int, ...] = (0,), **more: int) -> Step:
    times = {"waited": 30_000, "computed": 70_000, "drafted": 10_000, "enqueued": 5_000} | more
    fields = {"least": 4, "nodes": 4, "accepted": 0, "tokens": 1, "sent": 0, "arrived": 0}
    fields |= {"queued": 0, "published": 0, "handed": 0} | times
    return Step(number=number, slots=slots, started=started, **fields)


def test_one_group() -> None:
    steps = [step(n, 100_000 * n, handed=8_000) for n in range(1, 6)]
    found = summary(steps)
    assert found["groups"] == 1
    assert found["period"]["p50"] == found["period"]["p99"] == 100
    assert found["round_trip"]["p50"] == 20
    assert (found["handed"]["p50"], found["back"]["p50"]) == (8, 12)
    assert found["busy"] == round(5 * 70 / 470, 4)


def test_two_groups_have_a_period_each() -> None:
    steps = [step(n, 50_000 * n, (n % 2,), waited=0) for n in range(1, 7)]
    assert periods(steps) == [100_000] * 4
    found = summary(steps)
    assert found["groups"] == 2
    assert "round_trip" not in found


def test_blocking_calls_by_name() -> None:
    blocking = (
        "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy",
        "cudaMalloc", "cudaFree", "cudaHostAlloc", "cuStreamSynchronize", "cuMemHostRegister_v2",
        "cuMemcpyDtoH_v2", "cuCtxSynchronize",
    )  # fmt: skip
    harmless = (
        "cudaMemcpyAsync", "cudaEventQuery", "cudaGraphLaunch", "cudaLaunchKernel",
        "cudaStreamWaitEvent", "cuStreamWaitValue64_v2", "cudaEventRecord", "cudaMemsetAsync",
        "cuMemcpyDtoHAsync_v2", "cuStreamQuery",
    )  # fmt: skip
    assert all(BLOCKING.fullmatch(plain(name)) for name in blocking)
    assert not any(BLOCKING.fullmatch(plain(name)) for name in harmless)


def test_a_trace_is_read_by_thread_and_step() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 7) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for n in range(4):
        events += [
            event("cuda_runtime", "cudaGraphLaunch", 100.0 * n, 3),
            event("cuda_runtime", "cudaEventSynchronize", 100.0 * n, 50, tid=9),
            event("kernel", "_take_proposal", 100.0 * n + 10, 5),
            event("kernel", "_publish_context", 100.0 * n + 80, 10),
        ]
    events.append(event("cuda_runtime", "cudaMalloc", 350, 40))
    for ids, by in (({7}, "id"), (set[int](), "most graph launches")):
        found = read_trace(events, ids, 4)
        assert found["engine_by"] == by
        assert found["blocking_per_step"] == 0.25
        assert found["gpu"]["between_verifies_us"] == {"n": 3, "p50": 20, "p90": 20, "max": 20}
        assert found["kernels"] == [
            {"name": "_publish_context", "per_step": 1, "median_us": 10, "us": 10},
            {"name": "_take_proposal", "per_step": 1, "median_us": 5, "us": 5},
        ]
    assert isinstance(read_trace(events[:1], {7}, 4)["calls"], str)


def test_calls_are_counted_by_thread() -> None:
    calls = CallTable("MainThread")
    timed = calls._around(lambda *_: 3, None)
    assert timed("driver", "cuCall") == 3
    calls.on = True
    timed("driver", "cuCall")
    assert [(row["name"], row["per_step"]) for row in calls.rows(2)] == [("cuCall", 0.5)]
    assert calls.rows(2, engine=False) == []
    assert calls.thread_ids()


def test_two_servers_are_driven_and_gone(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen3")
    cell = Cell(
        pair.target, pair.draft, "cpu", handoff="grpc", slots=2, max_model_len=256,
        random_weights=False,
    )  # fmt: skip
    with servers(cell, tmp_path / "logs") as both:
        with driven(both, Load(2, context=20, nodes=8), "grpc") as run:
            run.settle()
            found = summary(run.window(6, warm=2, delay_ms=1.0))
        with (
            pytest.raises(RuntimeError, match="no session over cuda_ipc"),
            driven(both, Load(1, context=20, nodes=8), "cuda_ipc"),
        ):
            pass
        processes = both.target.process, both.draft.process
    assert found["steps"] == 6
    assert found["nodes_mean"] == 8
    assert all(process.poll() is not None for process in processes)
