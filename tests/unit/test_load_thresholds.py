"""The file of limits: what it may say, and what it makes fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from tests.load import thresholds
from tests.load.runs import Call, Load, Outcome, plan

GOOD = """
[idle]
seconds = 1.5
[default]
errors = 0
p99_ms = 1_000
[grpc.c8]
p99_ms = 2_000
tokens_s = 10
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "limits.toml"
    path.write_text(text)
    return path


def summary(*calls: Call, door: str = "grpc", run: str = "c8") -> dict[str, object]:
    return Outcome(door, Load(run, 8, len(calls), 10), 1.0, calls).summary()


def test_a_run_goes_over_the_default(tmp_path: Path) -> None:
    limits = thresholds.load(write(tmp_path, GOOD))
    assert limits.idle_s == 1.5
    assert limits.of("grpc c8") == {"errors": 0, "p99_ms": 2000, "tokens_s": 10}
    assert limits.of("rest c8") == {"errors": 0, "p99_ms": 1000}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nerrors = 'none'", r"\[default\] errors must be a number"),
        ("[default]\nerrors = true", r"\[default\] errors must be a number"),
        ("[default]\nerrors = -1", r"at least 0, got -1"),
        ("[default]\nmistakes = 0", r"\[default\] mistakes is none of errors"),
        ("[idle]\nminutes = 1", r"\[idle\] minutes is none of seconds"),
        ("[soap.c8]\nerrors = 0", r"\[soap\] is none of grpc, rest, health"),
        ("[grpc]\nc8 = 3", r"grpc.c8 must be a table"),
        ("default = 3", r"default must be a table"),
        ("grpc = 3", r"\[grpc\] is none of"),
        ("[default", r"limits.toml"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thresholds.load(write(tmp_path, text))


def test_limits_from_above_and_below() -> None:
    found = summary(Call("ok", 100.0, 10), Call("ok", 200.0, 10))
    assert thresholds.check(found, {"errors": 0, "p50_ms": 150, "tokens_s": 20}) == []
    assert thresholds.check(found, {"p50_ms": 149, "requests_s": 3}) == [
        "grpc c8: p50_ms is 150, allowed are 149 at most",
        "grpc c8: requests_s is 2, wanted are 3 at least",
    ]


def test_errors_are_told_with_their_messages() -> None:
    found = summary(Call("ok", 100.0, 10), Call("HTTP 503: draining", 1.0))
    failures = thresholds.check(found, {"errors": 0})
    assert failures == [
        "grpc c8: errors is 1, allowed are 0 at most",
        "grpc c8: 1 x HTTP 503: draining",
    ]
    assert thresholds.check(found, {"errors": 1}) == []


def test_a_run_without_answers_keeps_no_latency() -> None:
    assert thresholds.check(summary(), {"p99_ms": 100}) == [
        "grpc c8: no p99_ms: no call was answered"
    ]
    # Where calls failed, the errors say it already.
    failed = summary(Call("gone", 1.0))
    assert len(thresholds.check(failed, {"p99_ms": 100, "errors": 0})) == 2


def test_every_run_must_be_cut_that_is_to_be() -> None:
    load = Load("cancel", 2, 2, 1000, deadline_ms=700)
    calls = [Call("cut", 700.0), Call("ok", 600.0, 1000)]
    found = Outcome("rest", load, 1.0, calls).summary()
    assert thresholds.check(found, {"errors": 0, "cut_share": 1.0}) == [
        "rest cancel: cut_share is 0.5, wanted are 1 at least"
    ]


def test_the_shipped_file_names_only_runs_that_there_are() -> None:
    limits = thresholds.load(thresholds.DEFAULT)
    runs = [f"{door} {load.name}" for door in ("grpc", "rest") for load in plan(32, 1.0)]
    runs += [f"health {name}" for name in ("gateway", "target", "draft")]
    assert limits.unused(runs) == []
    assert limits.idle_s == 2.0
    for run in runs:
        assert limits.of(run)["errors"] == 0
    for door in ("grpc", "rest"):
        assert limits.of(f"{door} cancel")["cut_share"] == 1.0
