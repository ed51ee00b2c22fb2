"""The gRPC door and the health services under ghz, a load generator that is not ours."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.cli.prompts import Conversation
from tests.load.runs import Call, Load, Outcome

REPO = Path(__file__).parents[2]
PROTOS = REPO / "protos"
GENERATE = "slipstream.v1.GatewayService.Generate"
CHECK = "grpc.health.v1.Health.Check"
CALL_TIMEOUT_S = 300
MARGIN_S = 0.5

INSTALL = """\
ghz, the load generator for gRPC, is not installed. Any of these gets it:
  brew install ghz
  go install github.com/bojand/ghz/cmd/ghz@v0.120.0
  a binary from https://github.com/bojand/ghz/releases, in a folder of PATH
or name it with --ghz."""

_SIBLING = REPO.parent / "shared" / "bin" / "ghz"
_DEADLINE = "DeadlineExceeded"


class GhzFailed(Exception):
    """ghz is missing, or could not run; the message is for a person."""


def find(given: str | None = None) -> str:
    """The program: what was given, else from PATH, else from a folder beside the repository.

    Raises GhzFailed saying how to install it.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise GhzFailed(f"--ghz: {given} is no program")
        return found
    found = shutil.which("ghz") or shutil.which(str(_SIBLING))
    if found is None:
        raise GhzFailed(INSTALL)
    return found


def requests(rows: Sequence[Conversation], tokens: int) -> list[dict[str, Any]]:
    """GenerateRequests as JSON; ghz sends one after the other, from the first again at the end."""
    return [
        {"text": row.prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        for row in rows
    ]


def arguments(load: Load) -> list[str]:
    """ghz's options for the shape of `load`."""
    timeout = f"{load.deadline_ms}ms" if load.deadline_ms else f"{CALL_TIMEOUT_S}s"
    words = ["--timeout", timeout, "--concurrency", str(load.streams)]
    if load.ramp is None:
        return [*words, "--total", str(load.requests)]
    ramp = load.ramp
    words += ["--concurrency-schedule", "step", "--concurrency-start", str(ramp.start)]
    words += ["--concurrency-step", str(ramp.step), "--concurrency-end", str(ramp.end)]
    words += ["--concurrency-step-duration", f"{ramp.every_s:g}s"]
    # ghz 0.120 panics now and then when a run is over before its stages are: the last stage is
    # over at its end, and the run a little later. Calls under way then come to their end.
    return [*words, "--duration", f"{ramp.seconds + MARGIN_S:g}s", "--duration-stop", "wait"]


@dataclass(frozen=True, slots=True)
class Ghz:
    """Runs ghz and keeps its reports in `folder`.

    Attributes:
        reflection: find Generate by reflection; otherwise by the .proto file.
    """

    program: str
    folder: Path
    reflection: bool = False

    def generate(self, address: str, load: Load, rows: Sequence[Conversation]) -> Outcome:
        """GatewayService.Generate, streamed to its last token. Raises GhzFailed."""
        data = self.folder / f"grpc-{load.name}.requests.json"
        data.write_text(json.dumps(requests(rows, load.tokens), ensure_ascii=False))
        words = ["--call", GENERATE, "--data-file", str(data), *arguments(load)]
        if not self.reflection:
            words += ["--proto", str(PROTOS / "slipstream" / "v1" / "gateway.proto")]
            words += ["--import-paths", str(PROTOS)]
        return read("grpc", load, self._run(f"grpc-{load.name}", address, words))

    def health(self, address: str, load: Load) -> Outcome:
        """Health.Check of the server as a whole, found by reflection. Raises GhzFailed."""
        words = ["--call", CHECK, "--data", "{}", *arguments(load)]
        return read("health", load, self._run(f"health-{load.name}", address, words))

    def _run(self, name: str, address: str, words: Sequence[str]) -> dict[str, Any]:
        out = self.folder / f"{name}.json"
        # No templates: a prompt may hold braces.
        common = ["--insecure", "--disable-template-functions", "--disable-template-data"]
        command = [self.program, *common, *words, "--format", "json", "--output", str(out)]
        done = subprocess.run([*command, address], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not out.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}")[:500]
            raise GhzFailed(f"ghz, {name} at {address}: {said}")
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def read(door: str, load: Load, report: Mapping[str, Any]) -> Outcome:
    """ghz's JSON report as an outcome."""
    calls = [_call(load, entry) for entry in report.get("details") or ()]
    return Outcome(door, load, report["total"] / 1e9, calls)


def _call(load: Load, entry: Mapping[str, Any]) -> Call:
    ms = entry["latency"] / 1e6
    if entry["status"] == "OK":
        return Call("ok", ms, load.tokens)
    if entry["status"] == _DEADLINE and load.deadline_ms is not None:
        return Call("cut", ms)
    return Call(entry.get("error") or entry["status"], ms)
