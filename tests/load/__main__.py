"""Load on a cell through both of its doors: `python -m tests.load`, or `make load`.

ghz calls GatewayService.Generate at 1, 8 and 32 streams, with a growing number of streams, and with
a deadline that cuts every call; after that every slot and page must be free again. Then the same
through REST, and ghz on the health service of each server. Reports are kept as JSON; limits come
from one file. Without --url and --grpc a stack of the embedded pair is started for the test.

Exit status: 0 all limits kept, 1 not, 2 the test could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console as Terminal

from slipstream import hardware
from slipstream.cli import prompts
from slipstream.cli.client import RequestFailed
from slipstream.cli.console import Console
from slipstream.cli.prompts import Conversation
from slipstream.errors import ConfigError
from tests.load import cell as cells
from tests.load import rest, tables, thresholds
from tests.load.cell import SERVERS, Cell, NotUp
from tests.load.ghz import Ghz, GhzFailed, find
from tests.load.idle import Gateway, Watched
from tests.load.runs import Load, Outcome, plan
from tests.load.thresholds import DOORS, Thresholds

HERE = Path(__file__).parent
HEALTH = Load("health", 8, 2000)
TABLE_WIDTH = 110
WARM_UP = Load("warm-up", 8, 8, 16)


@dataclass
class LoadTest:
    """A load test under way: what it loads, and what came of it so far."""

    cell: Cell
    ghz: Ghz | None
    rows: Sequence[Conversation]
    limits: Thresholds
    console: Console
    summaries: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    idle: dict[str, Any] = field(default_factory=dict)

    def doors(self, loads: Sequence[Load], chosen: Sequence[str]) -> None:
        """All runs of the chosen doors, in the order of DOORS."""
        cell, ghz, rows = self.cell, self.ghz, self.rows
        if ghz is not None and "grpc" in chosen:
            ghz.generate(cell.gateway, WARM_UP, rows)
            for load in loads:
                self._run(load, partial(ghz.generate, cell.gateway, load, rows))
        if "rest" in chosen:
            over_rest(cell.url, WARM_UP, rows)
            for load in loads:
                self._run(load, partial(over_rest, cell.url, load, rows))
        if ghz is not None and "health" in chosen:
            for name, address in cell.servers.items():
                load = replace(HEALTH, name=name)
                self._run(load, partial(ghz.health, address, load))

    def _run(self, load: Load, run: Callable[[], Outcome]) -> None:
        gateway = Gateway(self.cell.url)
        before = gateway.read().cancelled if load.deadline_ms is not None else 0
        outcome = run()
        summary = outcome.summary()
        self.summaries.append(summary)
        self.failures += thresholds.check(summary, self.limits.of(outcome.name))
        self.console.say(f"{outcome.name}: {summary['calls']} calls in {summary['seconds']:.1f} s")
        if load.deadline_ms is not None:
            self._after_cut(outcome.name, gateway.watch(self.limits.idle_s), before)

    def _after_cut(self, name: str, watched: Watched, before: int) -> None:
        """Nothing may be left of calls that were cut, and the scheduler must have had some."""
        state, within = watched.state, self.limits.idle_s
        cancelled = state.cancelled - before
        self.idle[name] = {
            "idle": watched.idle,
            "seconds": round(watched.seconds, 3),
            "cancelled": cancelled,
            "state": str(state),
        }
        if not watched.idle:
            self.failures.append(f"{name}: {within:g} s after the calls were cut: {state}")
        if cancelled == 0:
            self.failures.append(f"{name}: no cut call had reached the scheduler")


def over_rest(url: str, load: Load, rows: Sequence[Conversation]) -> Outcome:
    """One run through REST. Raises RequestFailed when the gateway cannot be reached."""
    return asyncio.run(rest.run(url, load, rows))


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console()
    try:
        return _main(args, console)
    except (ConfigError, GhzFailed, NotUp, RequestFailed, httpx.HTTPError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _main(args: argparse.Namespace, console: Console) -> int:
    chosen = args.doors.split(",")
    unknown = sorted(set(chosen) - set(DOORS))
    if unknown:
        raise ConfigError(f"--doors: {unknown[0]!r} is none of {', '.join(DOORS)}")
    if (args.url is None) != (args.grpc is None):
        raise ConfigError("--url and --grpc go together: the two doors of one gateway")
    limits = thresholds.load(args.thresholds)
    loads = plan(args.tokens, args.scale)
    unused = limits.unused(_run_names(loads))
    if unused:
        raise ConfigError(f"--thresholds: {args.thresholds}: there is no run {unused[0]!r}")
    rows = prompts.load(args.prompts, "completions")
    program = None if chosen == ["rest"] else find(args.ghz)
    folder = _folder(args.out)
    ghz = None if program is None else Ghz(program, folder, args.reflection)
    with ExitStack() as stack:
        if args.url is not None:
            url = args.url.rstrip("/")
            cell = cells.check(Cell(url, args.grpc, args.target, args.draft))
        else:
            cell = stack.enter_context(cells.own(args.up.split(), folder / "stack.log", console))
        test = LoadTest(cell, ghz, rows, limits, console)
        for missing in (name for name in SERVERS if name not in cell.servers):
            console.say(f"health of the {missing}: no address is known, see --{missing}")
        test.doors(loads, chosen)
    return _report(args, test, folder)


def _run_names(loads: Sequence[Load]) -> list[str]:
    doors = [f"{door} {load.name}" for door in ("grpc", "rest") for load in loads]
    return doors + [f"health {name}" for name in SERVERS]


def _report(args: argparse.Namespace, test: LoadTest, folder: Path) -> int:
    result = {
        "command": " ".join(["python -m tests.load", *sys.argv[1:]]),
        "client": hardware.describe(),
        "tokens": args.tokens,
        "prompts": args.prompts.name,
        "idle_after_cut": test.idle,
        "failures": test.failures,
        "runs": test.summaries,
    }
    (folder / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    terminal = Terminal()
    terminal.width = max(terminal.width, TABLE_WIDTH)
    terminal.print(tables.runs_table(test.summaries))
    for name, end in test.idle.items():
        print(
            f"{end['seconds']:g} s after {name}: {end['state']};"
            f" {end['cancelled']} requests were given up"
        )
    print(f"reports: {folder}")
    for failure in test.failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    if test.failures:
        print(f"error: {len(test.failures)} limits of {test.limits.path} not kept", file=sys.stderr)
        return 1
    print(f"all limits of {test.limits.path} kept")
    return 0


def _folder(base: Path) -> Path:
    """A new folder for this test's reports; git ignores what holds it."""
    folder = base / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder.mkdir(parents=True, exist_ok=True)
    (base / ".gitignore").write_text("*\n")
    return folder


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="REST door of a running gateway, http://127.0.0.1:8000")
    add("--grpc", help="gRPC door of the same gateway, 127.0.0.1:8001")
    add("--target", help="host:port of its target, for the health run")
    add("--draft", help="host:port of its draft, for the health run")
    add("--up", default="", help="options of `slipstream up` for a stack of our own, one string")
    add("--doors", default=",".join(DOORS), help="which runs (default: %(default)s)")
    add("--tokens", type=int, default=32, help="of every answer (default: %(default)s)")
    add("--scale", type=float, default=1.0, help="factor on the numbers of requests")
    add("--prompts", type=Path, default=HERE / "data" / "prompts.jsonl", help="JSON lines")
    add("--thresholds", type=Path, default=thresholds.DEFAULT, help="limits, a TOML file")
    add("--ghz", help="the program; default: from PATH")
    add("--reflection", action="store_true", help="find Generate by reflection, not by its .proto")
    add("--out", type=Path, default=HERE / "results", help="folder for the reports")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
