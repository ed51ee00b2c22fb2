"""Where a draft's sessions get their targets from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.draft.runner import DeviceEnd
from slipstream.errors import SlipstreamError
from slipstream.handoff.base import DraftEnd, PeerSpec

Result = DraftEnd | DeviceEnd | SlipstreamError
"""This side of a connected session, or why it is not."""


class Peers(Protocol):
    """Where targets come in; `slipstream.handoff.grpc.GrpcAcceptor` is one."""

    def expect(
        self,
        session: int,
        first_step: int,
        spec: PeerSpec,
        done: Callable[[Any], None],
        timeout_s: float = 10.0,
        mapper: Any = None,
    ) -> None:
        """Thread-safe; `done` is called once, on any thread, with a `Result`.

        Only with a `mapper` (`services.draft.runner.Devices`) the end may be a DeviceEnd.
        """
        ...

    def forget(self, session: int) -> None:
        """Thread-safe: a target of `session` is refused from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Connected:
    """What came of a session that was expected."""

    session: int
    result: Result


def give_up(result: Result) -> None:
    """Ends a session that nobody wants any more and gives back what it holds; may wait."""
    if isinstance(result, SlipstreamError):
        return
    result.end("the gateway gave the session up before it was connected")
    if result.transport == "cuda_ipc":
        result.close()
