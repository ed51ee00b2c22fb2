"""A bar on a terminal, few lines in a log."""

from __future__ import annotations

import io
import logging

import pytest

from slipstream.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    show = progress("graphs", out, clock=lambda: 7.0)
    show(1, 3)
    show(3, 3)
    first, second = out.getvalue().split("\r")[1:]
    assert first == f"graphs [{'#' * 10}{'.' * 20}] 1/3, 0 s"
    assert second == f"graphs [{'#' * 30}] 3/3, 0 s\n"


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0, 8.0])
    show = progress("graphs", io.StringIO(), clock=lambda: next(times))
    with caplog.at_level(logging.INFO):
        for done in range(1, 5):
            show(done, 4)
    assert caplog.messages == ["graphs: 2 of 4, 6 s", "graphs: 4 of 4, 8 s"]
