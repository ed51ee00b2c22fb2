"""The servers under load: those that were named, or a stack of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from benchmarks.stack import stack
from slipstream import channels
from slipstream.cli.console import Console

SERVERS = ("gateway", "target", "draft")
CONNECT_S = 5.0
_READY = re.compile(r"\b(target|draft) is ready \((\S+?)\)")


class NotUp(Exception):
    """There is nothing to load; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Addresses of a running cell; of target and draft only where they are known."""

    url: str
    gateway: str
    target: str | None = None
    draft: str | None = None

    @property
    def servers(self) -> dict[str, str]:
        """The gRPC servers with a known address, by name."""
        known = zip(SERVERS, (self.gateway, self.target, self.draft), strict=True)
        return {name: address for name, address in known if address is not None}


def check(cell: Cell) -> Cell:
    """`cell`, if it answers. Raises NotUp saying what does not and how to start a stack."""
    advice = (
        "start one with `make up` (or `slipstream up`), or leave out --url and --grpc: then one is"
        " started for the test"
    )
    try:
        answer = httpx.get(f"{cell.url}/ready", timeout=CONNECT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise NotUp(
            f"no gateway at {cell.url} ({error or type(error).__name__}); {advice}"
        ) from error
    if answer.status_code != 200:
        raise NotUp(f"the gateway at {cell.url} is not ready: HTTP {answer.status_code}; {advice}")
    for name, address in cell.servers.items():
        with grpc.insecure_channel(address, options=channels.client_options()) as channel:
            try:
                grpc.channel_ready_future(channel).result(CONNECT_S)
            except grpc.FutureTimeoutError as error:
                raise NotUp(f"no gRPC server ({name}) at {address}; {advice}") from error
    return cell


@contextmanager
def own(options: Sequence[str], log: Path, console: Console) -> Iterator[Cell]:
    """`slipstream up` with `options` on free ports; its output goes to `log`.

    Raises NotUp when it does not get ready.
    """
    console.say("starting a stack")
    with ExitStack() as opened:
        try:
            running = opened.enter_context(stack(*options))
        except RuntimeError as error:
            raise NotUp(str(error)) from error
        opened.callback(lambda: log.write_text("\n".join(running.log) + "\n"))
        ready = [match for line in running.log if (match := _READY.search(line))]
        found = {match[1]: match[2] for match in ready}
        yield Cell(
            f"http://127.0.0.1:{running.http_port}",
            f"127.0.0.1:{running.grpc_port}",
            found.get("target"),
            found.get("draft"),
        )
