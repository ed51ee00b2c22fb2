"""What breaks when a process of a cell dies, stands still, or comes and goes a thousand times?

Every case runs real processes of the embedded pair in fp32 and compares tokens with those of an
undisturbed run. Cases by letter:

    a  the draft is killed (-9) while 8 answers stream
    b  the draft is stopped for two seconds
    c  as a, K times, on one GPU under MPS, where a kill may end both servers
    d  the target is killed (-9)
    e  1,000 attaches of one pair; g: 20 restarts of the draft; h: 5 of the target
    f  32 streams for two minutes, clients that leave at random

    python -m benchmarks.failures --only a,b,d --target-device cuda:0 --draft-device cuda:1
    python -m benchmarks.failures --only a,b,d,e,g,h,f --device cpu --quick

The result is saved after every case, the log of the processes lies beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.failure_cases.attaches import attaches, restarts
from benchmarks.failure_cases.cell import Cell, Where, stopped_like_an_error
from benchmarks.failure_cases.load import Load, load
from benchmarks.failure_cases.strikes import Plan, strike, undisturbed
from benchmarks.stack import machine, save
from slipstream.cli.recovery import RestartPolicy

WARMUPS = ("TARGET_WARMUP", "DRAFT_WARMUP")

Case = Callable[["Bench"], dict[str, Any]]


@dataclass
class Bench:
    """The options, and the cell that runs now; a case that wants another one ends it."""

    args: argparse.Namespace
    where: Where
    out: Path
    given: frozenset[str] = frozenset(os.environ)
    _cell: Cell | None = None
    _kind: tuple[object, ...] = ()
    _wanted: dict[str, Any] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        return bool(self.args.quick)

    @property
    def plan(self) -> Plan:
        tokens = self.args.tokens or (120 if self.where.cpu else 600 if self.quick else 2400)
        late = self.args.watchdog_ms / 1e3 if self.where.cpu else 0.0
        return Plan(self.args.streams, tokens, again=32 if self.where.cpu else 64, late=late)

    def cell(self, *, slots: int = 8, gateway: bool = True, often: bool = True) -> Cell:
        """A healthy cell of this kind, the last one if it is such."""
        kind = (slots, gateway, often)
        if self._cell is not None and (self._kind != kind or not self._cell.alive):
            self.close()
        if self._cell is None:
            options = [*self.where.options, "--dtype", "float32", "--slots", str(slots)]
            options += [
                "--max-model-len",
                str(self.args.model_len),
                "--tree",
                "chain",
                "--drain-s",
                "1",
            ]
            options += ["--start-timeout-s", str(self.args.start_s), *self.args.up.split()]
            log = self.out.with_suffix(".log")
            self._make_starts_short(slots, gateway)
            restarts = RestartPolicy(1000, first_pause_s=0.1, longest_pause_s=0.1)
            made = Cell(options, log, restarts=restarts if often else None, gateway=gateway)
            self._cell, self._kind = made.start(self.args.start_s + 30), kind
            self._wanted.clear()
        return self._cell

    def _make_starts_short(self, slots: int, gateway: bool) -> None:
        """Servers record no more than is used here, and measure nothing that nobody asks for."""
        short: dict[str, str] = {}
        if not self.where.cpu:
            short["TARGET_MAX_DECODE_ROWS"] = str(max(256, 16 * slots))
            short["TARGET_MAX_PREFILL_ROWS"] = "512"
        if self.quick or self.where.cpu or not gateway:
            short |= {"TARGET_WARMUP": "false", "DRAFT_WARMUP": "false"}
        for name in ("TARGET_MAX_DECODE_ROWS", "TARGET_MAX_PREFILL_ROWS", *WARMUPS):
            full = f"SLIPSTREAM_{name}"
            if full not in self.given:
                os.environ.pop(full, None)
                if name in short:
                    os.environ[full] = short[name]

    def wanted(self, cell: Cell) -> list[list[int]]:
        """What the streams of `plan` answer when nothing happens."""
        if not self._wanted:
            ids, said = undisturbed(cell, self.plan)
            self._wanted = {"ids": ids, "said": said}
        found: list[list[int]] = self._wanted["ids"]
        return found

    @property
    def undisturbed(self) -> dict[str, Any]:
        said: dict[str, Any] = self._wanted.get("said", {})
        return said

    def keep(self, letter: str, row: dict[str, Any]) -> None:
        """Saves what is known of a case, beside what the file holds."""
        result = json.loads(self.out.read_text()) if self.out.exists() else {}
        cases = result.setdefault("cases", {}).setdefault(str(self.where), {})
        cases[letter] = {"machine": machine(), **row}
        save(self.out, result)

    def close(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.close()


def kill_draft(bench: Bench) -> dict[str, Any]:
    """Case a."""
    cell = bench.cell()
    wanted = bench.wanted(cell)
    row = strike(cell, bench.plan, wanted, "draft", survives=not bench.where.shared)
    return {"undisturbed": bench.undisturbed, **row}


def stop_draft(bench: Bench) -> dict[str, Any]:
    """Case b."""
    cell = bench.cell()
    wanted = bench.wanted(cell)
    row = strike(cell, bench.plan, wanted, "draft", stopped_s=2.0)
    return {"undisturbed": bench.undisturbed, **row}


def kill_draft_often(bench: Bench) -> dict[str, Any]:
    """Case c: with the restarts that `slipstream up` grants."""
    rows: list[dict[str, Any]] = []
    for _ in range(bench.args.kills):
        try:
            cell = bench.cell(often=bench.args.kills > 4)
            wanted = bench.wanted(cell)
            rows.append(strike(cell, bench.plan, wanted, "draft", survives=False))
        except Exception as error:
            rows.append({"error": f"{type(error).__name__}: {error}", "checks": {"ran": False}})
            bench.close()
        bench.keep("c", {"kills": rows})
    done = [row for row in rows if "survived" in row]
    names = {name for row in rows for name in row["checks"]}
    return {
        "undisturbed": bench.undisturbed,
        "kills": rows,
        "target_survived": sum(row["survived"]["target"] for row in done),
        "longest_gaps_ms": [row["longest_gap_ms"] for row in done],
        "drafting_again_s": [row["drafting_again_s"] for row in done],
        "checks": {name: all(row["checks"].get(name, False) for row in rows) for name in names},
    }


def kill_target(bench: Bench) -> dict[str, Any]:
    """Case d."""
    cell = bench.cell()
    wanted = bench.wanted(cell)
    row = strike(cell, bench.plan, wanted, "target", survives=False)
    return {"undisturbed": bench.undisturbed, **row}


def attach_often(bench: Bench) -> dict[str, Any]:
    """Case e."""
    count = bench.args.attaches or (200 if bench.quick else 1000)
    cell = bench.cell(gateway=False)
    return attaches(cell, count, bench.args.case_s, on_devices=not bench.where.cpu)


def restart_draft(bench: Bench) -> dict[str, Any]:
    """Case g."""
    count = bench.args.restarts or (3 if bench.quick else 20)
    cell = bench.cell(gateway=False)
    return restarts(
        cell, "draft", count, bench.args.case_s,
        kill=not bench.where.shared, on_devices=not bench.where.cpu,
    )  # fmt: skip


def restart_target(bench: Bench) -> dict[str, Any]:
    """Case h."""
    count = 2 if bench.quick else 5
    cell = bench.cell(gateway=False)
    return restarts(
        cell, "target", count, bench.args.case_s,
        kill=not bench.where.shared, on_devices=not bench.where.cpu,
    )  # fmt: skip


def under_load(bench: Bench) -> dict[str, Any]:
    """Case f."""
    streams = 6 if bench.where.cpu else 32
    seconds = bench.args.load_s or (15.0 if bench.quick else 120.0)
    longest = 40 if bench.where.cpu else 400
    return load(bench.cell(slots=streams), Load(streams, seconds, longest))


CASES: dict[str, tuple[str, Case]] = {
    "a": ("kill -9 of the draft", kill_draft),
    "b": ("the draft stands still for 2 s", stop_draft),
    "d": ("kill -9 of the target", kill_target),
    "c": ("kill -9 of the draft, both may die", kill_draft_often),
    "e": ("attaches of one pair", attach_often),
    "g": ("restarts of the draft", restart_draft),
    "h": ("restarts of the target", restart_target),
    "f": ("load with clients that leave", under_load),
}


def _run(bench: Bench) -> None:
    """The cases asked for, one after the other, whatever becomes of each; a table at the end."""
    lines: list[str] = []
    for letter in bench.args.only.split(","):
        name, case = CASES[letter.strip()]
        print(f"{letter}: {name}, {bench.where} ...", flush=True)
        began = time.monotonic()
        try:
            row = case(bench)
        except Exception as error:
            said = "".join(traceback.format_exception(error)[-6:])
            row = {"error": f"{type(error).__name__}: {error}", "trace": said, "checks": {}}
            row["undisturbed"] = bench.undisturbed
            bench.close()
        row["seconds"] = round(time.monotonic() - began, 1)
        row["ok"] = bool(row["checks"]) and all(row["checks"].values())
        bench.keep(letter, row)
        wrong = [check for check, held in row["checks"].items() if not held]
        lines.append(
            f"{letter} {'ok  ' if row['ok'] else 'FAIL'} {name}, {bench.where}, "
            f"{row['seconds']:.0f} s: {row.get('error') or summary(row)}"
            + "".join(f"; NOT {check}" for check in wrong)
        )
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines), flush=True)


def summary(row: dict[str, Any]) -> str:
    """The few numbers of a case that one wants to see."""
    shown = (
        "longest_gap_ms", "bar_ms", "step_before_ms", "step_after_ms", "back_s",
        "drafting_again_s", "transports_after", "target_survived", "longest_gaps_ms", "count",
        "each_ms", "transports", "tokens_per_s", "requests", "left", "not_flat", "errors",
    )  # fmt: skip
    return ", ".join(f"{name} {row[name]}" for name in shown if row.get(name) not in (None, []))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="a,b,d,e,f,g,h", help="letters of cases, with commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/failures.json"))
    parser.add_argument("--device", help="of both servers; default: cuda:0")
    parser.add_argument("--target-device", help="of the target")
    parser.add_argument("--draft-device", help="of the draft")
    parser.add_argument("--quick", action="store_true", help="short versions")
    parser.add_argument("--kills", type=int, default=3, help="of case c")
    parser.add_argument("--tokens", type=int, default=0, help="of each answer in a to d")
    parser.add_argument("--attaches", type=int, default=0, help="of case e")
    parser.add_argument("--restarts", type=int, default=0, help="of the draft in case g")
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds of case f")
    parser.add_argument("--case-s", type=float, default=420.0, help="most seconds of e, g and h")
    parser.add_argument("--start-s", type=float, default=240.0, help="most seconds of a start")
    parser.add_argument("--model-len", type=int, default=4096, help="window of the cell")
    parser.add_argument("--streams", type=int, default=8, help="of cases a to d")
    parser.add_argument("--up", default="", help="further options of slipstream up")
    parser.add_argument(
        "--watchdog-ms", type=int, default=700, help="CPU: how long a stopped draft is waited for"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sys.setswitchinterval(5e-4)
    target = args.target_device or args.device or "cuda:0"
    where = Where(target, args.draft_device or args.device or target)
    os.environ.setdefault("SLIPSTREAM_GATEWAY_RECOVER_TIMEOUT", "240")
    if where.cpu:  # else it is learnt, from steps of another machine's length
        os.environ.setdefault("SLIPSTREAM_TARGET_WATCHDOG_MS", str(args.watchdog_ms))
    bench = Bench(args, where, args.out)
    with stopped_like_an_error():
        try:
            _run(bench)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
