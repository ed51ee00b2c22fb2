"""What the engine takes, beside the gateway's commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.target.commands import Attach, Command, Event
from slipstream.errors import SlipstreamError
from slipstream.handoff.base import DeviceTargetEnd, TargetEnd

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Open:
    """A gateway came; `emit` is where events go."""

    emit: Emit


@dataclass(frozen=True, slots=True)
class Close:
    """The gateway went; `done` is called when all it had is free."""

    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Connected:
    """What came of an Attach."""

    attach: Attach
    result: TargetEnd | DeviceTargetEnd | SlipstreamError


@dataclass(frozen=True, slots=True)
class Through:
    """A step's results are there; or what raised instead."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Nothing new is taken; `done` is called when the last slot is free."""

    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """The thread ends."""


Item = Command | Open | Close | Connected | Through | Drain | Stop
