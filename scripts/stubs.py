"""Generates slipstream/v1 from protos/; with --check, fails when the committed stubs differ.

The generators are pinned (extra `test`): old stubs load on newer runtimes, new ones not on older.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("slipstream") / "v1"
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(into: Path) -> None:
    """Writes the stubs of every proto under `into`."""
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    protos = sorted((ROOT / "protos" / PACKAGE).glob("*.proto"))
    sources = [str(path.relative_to(ROOT / "protos")) for path in protos]
    # The type plugin is a program beside the interpreter, whether or not its folder is on PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, *sources],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stderr=subprocess.PIPE if "--check" in sys.argv else None,
        check=True,
    )


def stubs(folder: Path) -> dict[str, str]:
    """Name and text of the generated files in `folder`."""
    found = (path for pattern in PATTERNS for path in folder.glob(pattern))
    return {path.name: path.read_text() for path in found}


def main() -> int:
    """Generates, or checks."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = stubs(Path(scratch) / PACKAGE), stubs(ROOT / PACKAGE)
    names = sorted(fresh.keys() | committed.keys())
    stale = [name for name in names if fresh.get(name) != committed.get(name)]
    for name in stale:
        print(f"error: {PACKAGE / name} is not what protos/ gives: make stubs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
