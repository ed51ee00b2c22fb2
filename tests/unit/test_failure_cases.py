"""How the failure benchmark judges what it saw."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.failure_cases.cell import Cell, Where
from benchmarks.failure_cases.gauges import Held, Sampler, Sight, growth, slope
from benchmarks.failure_cases.streams import Batch, Stream, greedy


def sight(at: float, fds: int, rss: int = 1000) -> Sight:
    return Sight(at, {"draft": Held(fds, 50, 4, rss, 0)}, 1, [5])


def test_growth_is_stated_and_judged() -> None:
    flat = growth([sight(100, 20), sight(500, 21), sight(1000, 20)])
    assert all(row["flat"] for row in flat.values())
    leaks = growth([sight(at, 20 + at // 10) for at in range(100, 1001, 100)])
    assert leaks["draft fds"]["slope"] == 0.1 and not leaks["draft fds"]["flat"]
    assert growth([sight(0, 1)]) == {}
    assert slope([(1, 2.0), (1, 4.0)]) == 0.0
    grown = [sight(0, 1), sight(10, 1, 20_000)]
    assert not growth(grown)["draft rss"]["flat"]
    assert growth(grown, rss=64_000)["draft rss"]["flat"]


def test_a_process_is_looked_at() -> None:
    held = Held.of(os.getpid(), {})
    assert held.fds > 2 and held.maps > 10 and held.rss > 1000 and held.threads >= 1


def test_gaps_and_tokens_of_a_batch() -> None:
    stream = Stream(greedy("a", 4), [1, 2, 3, 4], [1.0, 1.1, 1.6, 1.7], [1, 1, 1, 1], "length")
    stream.ended, stream.nodes, stream.accepted = True, [1, 8], [0, 1]
    batch = Batch([stream])
    assert [round(gap, 3) for gap in batch.longest(1.05, 1.2)] == [0.5]
    assert round(batch.step(0, 1.65), 3) == 0.3
    assert batch.drafted and not batch.errors
    assert batch.different([[1, 2, 3, 4, 5]]) == []
    assert batch.different([[1, 2, 9, 4]])[0]["at"] == 2


def test_drafting_counts_once_a_later_session_drafts() -> None:
    def seen(sessions: float, drafted: float) -> dict[str, float]:
        return {"sessions": sessions, "drafted": drafted}

    sampler = Sampler("")
    sampler.seen = [(1.0, seen(1, 50)), (2.5, seen(1, 60)), (3.0, seen(2, 60)), (3.5, seen(2, 61))]
    assert sampler.drafting_again(2.0) == 1.5
    sampler.seen.pop()
    assert sampler.drafting_again(2.0) is None


def test_what_a_log_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "draft   | 15:25:19.522 INFO    services.draft.engine: session 7 is connected over cuda_ipc"
        " from step 1\n"
        "target  | 15:25:20.000 ERROR   services.target.engine: no\n"
        "up      | draft is back\n"
    )
    cell = Cell(Where("cpu", "cpu").options, log)
    assert cell.transports() == ["cuda_ipc"] and cell.transports(after=1) == []
    assert len(cell.wrong_lines()) == 1
    assert [str(Where(*w)) for w in (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"))] == [
        "one GPU, MPS",
        "two GPUs",
    ]
