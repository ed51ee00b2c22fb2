"""Load tests without servers: shapes, ghz's options and reports, figures, tables, idleness."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.cli import prompts
from slipstream.cli.prompts import Conversation
from tests.load import cell, ghz, idle, rest, tables
from tests.load.__main__ import HERE, main
from tests.load.runs import Call, Load, Outcome, Ramp, plan

RAMP = Load("ramp", 32, 0, 16, Ramp(2, 6, 32, 0.5))
CUT = Load("cancel", 4, 8, 1000, deadline_ms=700)


def report(*entries: tuple[str, float, str]) -> dict[str, object]:
    """What ghz writes, as far as it is read: (status, ms, error) of each call."""
    details = [
        {"timestamp": "2026-01-01T00:00:00Z", "latency": int(ms * 1e6), "error": e, "status": s}
        for s, ms, e in entries
    ]
    return {"count": len(details), "total": 2_000_000_000, "details": details}


def test_the_plan_has_every_shape() -> None:
    loads = {load.name: load for load in plan(32, 1.0)}
    assert [loads[name].streams for name in ("c1", "c8", "c32")] == [1, 8, 32]
    assert loads["ramp"].levels == [2, 8, 14, 20, 26, 32]
    assert loads["cancel"].deadline_ms is not None and loads["cancel"].tokens >= 1000
    for load in plan(32, 0.01):
        assert load.ramp or load.requests == load.streams
    assert loads["ramp"].scaled(0.5).ramp == Ramp(2, 6, 32, 2.0)


def test_options_of_ghz() -> None:
    words = ghz.arguments(Load("c8", 8, 48, 32))
    assert words == ["--timeout", "300s", "--concurrency", "8", "--total", "48"]
    assert ghz.arguments(CUT)[:2] == ["--timeout", "700ms"]
    text = " ".join(ghz.arguments(RAMP))
    assert "--concurrency-schedule step --concurrency-start 2 --concurrency-step 6" in text
    assert "--concurrency-end 32 --concurrency-step-duration 0.5s" in text
    assert text.endswith("--duration 3.5s --duration-stop wait") and "--total" not in text


def test_the_shipped_prompts_become_requests() -> None:
    rows = prompts.load(HERE / "data" / "prompts.jsonl", "completions")
    assert len(rows) == len({row.name for row in rows}) >= 20
    requests = ghz.requests(rows, 7)
    assert requests[0]["text"] == rows[0].prompt
    assert all(one["max_tokens"] == 7 and one["ignore_eos"] for one in requests)


def test_a_report_of_ghz() -> None:
    load = Load("c8", 8, 4, 32)
    outcome = ghz.read(
        "grpc", load,
        report(("OK", 100, ""), ("OK", 300, ""), ("OK", 200, ""), ("Unavailable", 5, "gone")),
    )  # fmt: skip
    found = outcome.summary()
    assert (found["calls"], found["ok"], found["errors"], found["cut"]) == (4, 3, 1, 0)
    assert found["error_messages"] == {"gone": 1}
    assert (found["requests_s"], found["tokens_s"]) == (2.0, 48.0)
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"]) == (200.0, 290.0, 298.0)


def test_a_deadline_is_an_error_unless_it_was_meant() -> None:
    late = report(("DeadlineExceeded", 700, "too late"))
    cut = ghz.read("grpc", CUT, late).summary()
    assert (cut["cut"], cut["cut_share"], cut["errors"], cut["p50_ms"]) == (1, 1.0, 0, 700.0)
    failed = ghz.read("grpc", Load("c1", 1, 1, 8), late).summary()
    assert (failed["cut"], failed["errors"], failed["p50_ms"]) == (0, 1, None)


def test_a_report_without_calls() -> None:
    found = ghz.read("grpc", CUT, {"total": 0, "details": None}).summary()
    assert (found["calls"], found["requests_s"], found["cut_share"]) == (0, 0.0, 0.0)


@pytest.fixture
def fake_ghz(tmp_path: Path) -> Iterator[Path]:
    """A program that notes its arguments and writes a report, or fails when told to."""
    program = tmp_path / "ghz"
    answer = json.dumps(report(("OK", 10, "")))
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        f'if [ -e {tmp_path}/broken ]; then echo "Symbol not found" >&2; exit 1; fi\n'
        'while [ "$1" != --output ]; do shift; done\n'
        f"printf '%s' '{answer}' > \"$2\"\n"
    )
    program.chmod(0o755)
    yield program


def test_a_run_of_ghz(fake_ghz: Path, tmp_path: Path) -> None:
    rows = [Conversation("a", prompt="{{x}} \N{WORD JOINER}ü")]
    outcome = ghz.Ghz(str(fake_ghz), tmp_path).generate("h:1", Load("c1", 1, 1, 8), rows)
    assert outcome.summary()["ok"] == 1
    sent = json.loads((tmp_path / "grpc-c1.requests.json").read_text())
    assert [one["text"] for one in sent] == [rows[0].prompt]
    ghz.Ghz(str(fake_ghz), tmp_path, reflection=True).generate("h:1", Load("c1", 1, 1, 8), rows)
    ghz.Ghz(str(fake_ghz), tmp_path).health("h:2", Load("gateway", 1, 1))
    by_proto, by_reflection, health = (tmp_path / "calls").read_text().splitlines()
    assert "--proto" in by_proto and "--disable-template-data" in by_proto
    assert "--proto" not in by_reflection and by_reflection.endswith("h:1")
    assert ghz.CHECK in health and "--proto" not in health


def test_ghz_fails_with_its_reason(fake_ghz: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(ghz.GhzFailed, match="grpc-c1 at h:1: Symbol not found"):
        ghz.Ghz(str(fake_ghz), tmp_path).generate(
            "h:1", Load("c1", 1, 1, 8), [Conversation("a", prompt="x")]
        )


def test_a_missing_ghz_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ghz, "_SIBLING", tmp_path / "none")
    assert main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "ghz" in said and "go install" in said and "--ghz" in said
    assert main(["--ghz", "no-such-program", "--out", str(tmp_path)]) == 2
    assert "--ghz: no-such-program is no program" in capsys.readouterr().err


def test_ghz_comes_from_path_first(
    monkeypatch: pytest.MonkeyPatch, fake_ghz: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(ghz, "_SIBLING", fake_ghz)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert ghz.find() == str(fake_ghz)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ghz.find() == shutil.which("ghz")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "--url and --grpc go together"),
        (["--url", "http://127.0.0.1:9", "--grpc", "127.0.0.1:9"], "no gateway at"),
        (["--doors", "grpc,soap"], "--doors: 'soap'"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--thresholds", "none.toml"], "none.toml"),
    ],
)
def test_what_cannot_run_says_why(
    flags: list[str],
    message: str,
    fake_ghz: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*flags, "--ghz", str(fake_ghz), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_limits_of_no_run_are_a_mistake(
    fake_ghz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[grpc.c9]\nerrors = 0\n")
    flags = ["--thresholds", str(limits), "--ghz", str(fake_ghz), "--out", str(tmp_path / "out")]
    assert main(flags) == 2
    assert "there is no run 'grpc c9'" in capsys.readouterr().err


def test_how_to_start_a_stack_is_told() -> None:
    with pytest.raises(cell.NotUp, match="make up"):
        cell.check(cell.Cell("http://127.0.0.1:9", "127.0.0.1:9"))


@pytest.mark.anyio
async def test_calls_at_once_follow_the_stages() -> None:
    running = most = 0
    seen: list[int] = []
    peaks: list[int] = []

    async def call(number: int) -> None:
        nonlocal running, most
        seen.append(number)
        running += 1
        most = max(most, running)
        peaks.append(running)
        await asyncio.sleep(0.01)
        running -= 1

    await rest.drive(Load("c8", 8, 30), call)
    assert sorted(seen) == list(range(30)) and most == 8
    seen.clear()
    peaks.clear()
    most = 0
    await rest.drive(Load("ramp", 6, 0, ramp=Ramp(2, 2, 6, 0.1)), call)
    assert sorted(seen) == list(range(len(seen))) and len(seen) > 12
    assert most == 6 and max(peaks[:6]) == 2 and running == 0


def metrics(free_slots: int = 4, free_pages: int = 64, waiting: int = 0) -> str:
    return (
        "# HELP slipstream_slots Slots of the target.\n# TYPE slipstream_slots gauge\n"
        f"slipstream_slots 4.0\nslipstream_free_slots {free_slots}.0\n"
        f"slipstream_running_slots {4 - free_slots}.0\nslipstream_pages 64.0\n"
        f"slipstream_free_pages {free_pages}.0\nslipstream_queue_length {waiting}.0\n"
        "slipstream_scheduler_cancelled_total 3.0\n"
        'slipstream_plan_latency_seconds{quantile="0.5"} 0.0001\npython_info 1.0\n'
    )


def test_metrics_are_read() -> None:
    state = idle.parse(metrics())
    assert state.idle and state.cancelled == 3
    assert not idle.parse(metrics(free_slots=3)).idle
    assert not idle.parse(metrics(free_pages=63)).idle
    assert not idle.parse(metrics(waiting=1)).idle
    assert "63 of 64 pages" in str(idle.parse(metrics(free_pages=63)))
    with pytest.raises(ValueError, match="no slipstream_free_pages"):
        idle.parse(metrics().replace("slipstream_free_pages", "other"))


@pytest.mark.parametrize(("busy_for", "expected"), [(0.0, True), (1.5, True), (2.5, False)])
def test_idleness_is_waited_for(busy_for: float, expected: bool) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def read() -> idle.State:
        return idle.parse(metrics(free_pages=64 if now >= busy_for else 60))

    watched = idle.watch(read, 2.0, lambda: now, sleep)
    assert watched.idle is expected
    assert busy_for <= watched.seconds + 1e-9 or not expected
    assert watched.seconds <= 2.1


def test_the_table_has_a_line_per_run() -> None:
    outcomes = [
        Outcome("grpc", Load("c8", 8, 2, 10), 2.0, [Call("ok", 90.0, 10), Call("ok", 120.0, 10)]),
        Outcome("grpc", CUT, 1.0, [Call("cut", 700.0)]),
        Outcome("health", Load("draft", 8, 1), 1.0, [Call("gone", 1.0)]),
    ]
    console = Console(width=110, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(tables.runs_table([outcome.summary() for outcome in outcomes]))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    rows = {
        " ".join(words[:2]): words[2:] for words in lines if words[:1] in (["grpc"], ["health"])
    }
    assert rows["grpc c8"] == ["8", "2", "0", "0", "1.00", "10.0", "105", "118", "120"]
    assert rows["grpc cancel"] == ["4", "1", "0", "1", "1.00", "-", "700", "700", "700"]
    assert rows["health draft"] == ["8", "1", "1", "0", "1.00", "-", "-", "-", "-"]
