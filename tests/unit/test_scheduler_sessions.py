"""How long planning waits for a session that is not connected at its first step."""

from __future__ import annotations

import pytest

from gateway.cell import Peer
from gateway.session import HOLD_S, Sessions


class Server:
    """A link that is up."""

    open = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def attach(self, session: int, first_step: int, address: str) -> None:
        self.asked.append((session, first_step))

    def detach(self, session: int, reason: str) -> None:
        self.asked.append((session, 0))


def asked(step_s: float) -> tuple[Sessions, int, int]:
    """Sessions of which one is asked for, its number and first step."""
    target = Server()
    sessions = Sessions(target, Server())  # type: ignore[arg-type]
    sessions.ask("draft", 7, True, step_s, 0.0)
    session, first = target.asked[-1]
    return sessions, session, first


@pytest.mark.parametrize(("step_s", "hold"), [(0.0, HOLD_S), (0.004, HOLD_S), (0.3, 0.6)])
def test_the_first_step_waits_for_two_steps_at_least(step_s: float, hold: float) -> None:
    sessions, _, first = asked(step_s)
    assert not sessions.holds(first - 1, step_s, 1.0)
    assert sessions.holds(first, step_s, 1.0)
    assert sessions.deadline == pytest.approx(1.0 + hold)
    assert sessions.holds(first, step_s, 1.0 + 0.99 * hold) and not sessions.idle
    assert not sessions.holds(first, step_s, 1.0 + hold) and sessions.idle


def test_an_answer_one_slow_step_later_is_in_time() -> None:
    sessions, session, first = asked(0.3)
    assert sessions.holds(first, 0.3, 1.0)
    for peer in Peer:
        sessions.attached(peer, session)
    assert not sessions.holds(first, 0.3, 1.35)
    assert sessions.begin(first, 1.35) and sessions.session == session
