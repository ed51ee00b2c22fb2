"""Tables of a load test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tests.load.runs import QUANTILES


def runs_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """One line per run; latencies are to the last token."""
    table = Table(title="load, latencies to the last token in ms", title_justify="left")
    table.add_column("run", no_wrap=True)
    headings = ("streams", "calls", "errors", "cut", "requests/s", "tokens/s")
    for heading in (*headings, *(f"p{q}" for q in QUANTILES)):
        table.add_column(heading, justify="right", no_wrap=True)
    door = None
    for run in summaries:
        if door not in (None, run["door"]):
            table.add_section()
        door = run["door"]
        table.add_row(
            f"{run['door']} {run['run']}",
            f"to {run['streams']}" if run["ramp"] else str(run["streams"]),
            str(run["calls"]),
            str(run["errors"]),
            str(run["cut"]),
            f"{run['requests_s']:.2f}",
            f"{run['tokens_s']:.1f}" if run["tokens_s"] else "-",
            *(show_ms(run[f"p{q}_ms"]) for q in QUANTILES),
        )
    return table


def show_ms(value: float | None) -> str:
    """Milliseconds, with decimals only where they say something."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
