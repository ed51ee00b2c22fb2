"""What the random machine of the target's engine is made of: requests, plans, a draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from services.target.commands import PlanEntry, StepKind
from services.target.runner import Flight
from slipstream.errors import PeerLost, SlipstreamError
from slipstream.handoff.base import (
    ContextMessage,
    DeviceTargetEnd,
    PeerSpec,
    Proposal,
    TargetEnd,
)
from tests.fakes.encoding import decode_rows
from tests.fakes.run_ahead import MOST_COMMITS, FakeDeviceEnd, FakeFlight, RunAheadFake

if TYPE_CHECKING:
    from tests.unit.target_machine import Machine


@dataclass
class Request:
    """What the test knows of an occupied slot."""

    epoch: int
    prompt: list[int]
    want: list[int]
    got: list[int]
    limit: int
    sent: int = 0  # rows of prefill that are planned
    decodes: int = 0  # decode steps on their way
    finished: bool = False
    drafted: int = 0  # rows the draft holds

    @property
    def start(self) -> int:
        return len(self.prompt) + len(self.got) - 1

    @property
    def anchor(self) -> int:
        return (self.prompt + self.got)[-1]

    @property
    def bound(self) -> int:
        """Rows that the steps on their way may make, as a gateway reckons."""
        known = max(self.start, len(self.prompt))
        return min(known + self.decodes * MOST_COMMITS, self.limit)


@dataclass
class Step:
    """A plan without a result; `requests` are those of its entries, None where there is none."""

    number: int
    kind: StepKind
    entries: list[PlanEntry]
    requests: list[Request | None]
    refused: set[int] = field(default_factory=set)  # slots
    waits: bool = False  # others may begin before its result


class End:
    """The draft: keeps rows, proposes trees that are right, wrong or torn."""

    transport: Literal["grpc"] = "grpc"

    def __init__(self, machine: Machine, session: int) -> None:
        self.machine = machine
        self.session = session
        self.alive = True
        self.reason = ""
        self.published: list[int] = []

    def publish_context(self, message: ContextMessage) -> None:
        if not self.alive:
            return
        assert not self.published or message.step > self.published[-1]
        self.published.append(message.step)
        rows = decode_rows(message.rows)
        for record in message.records:
            request = self.machine.requests[record.slot]
            assert record.epoch == request.epoch
            assert record.first_row == request.drafted
            part, rows = rows[: record.count], rows[record.count :]
            assert [p for _, p in part] == list(
                range(record.first_row, record.first_row + record.count)
            )
            request.drafted += record.count
        assert not rows

    def await_proposal(self, step: int, shape: tuple[int, int]) -> Proposal | None:
        rng = self.machine.rng
        if rng.random() < 0.05:
            self.alive, self.reason = False, "watchdog"
            return None
        return Proposal(step, tuple(self.machine.trees()))

    def end(self, reason: str) -> None:
        self.alive = False


class DirectWaiter:
    """In the place of the engine's: who waits lets the steps end."""

    def __init__(self, runner: RunAheadFake) -> None:
        self._runner = runner

    def follow(self, flight: Flight) -> None:
        pass

    def through(self, flight: Flight | None) -> bool:
        assert flight is None or isinstance(flight, FakeFlight)
        return flight is None or flight.landed.is_set()

    def wait(self, flight: Flight) -> None:
        while not self.through(flight):
            self._runner.land()
        assert isinstance(flight, FakeFlight)
        flight.wait()


class Connector:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.made: End | FakeDeviceEnd | None = None

    def connect(
        self,
        session: int,
        first_step: int,
        address: str,
        spec: PeerSpec,
        done: Callable[[TargetEnd | DeviceTargetEnd | SlipstreamError], None],
        export: Any = None,
    ) -> None:
        rng = self.machine.rng
        self.made = None
        if rng.random() < 0.8:
            self.made = End(self.machine, session)
            if export is not None and rng.random() < 0.7:
                self.made = FakeDeviceEnd(session, rng.randrange(4))
                self.made.propose = self.machine.device_trees
        done(PeerLost("nobody there") if self.made is None else self.made)
