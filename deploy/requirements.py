"""`python requirements.py EXTRA...`: what pip has to install for these extras of pyproject.toml.

The images install this first and the project last, so that a change of the code does not install
every package again. Runs on a bare Python 3.11 or newer.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The project's own requirements and those of `extras`. Raises KeyError on an unknown extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


def main(argv: Sequence[str]) -> int:
    """Prints one requirement a line; pyproject.toml lies in the working directory."""
    print("\n".join(requirements(Path("pyproject.toml"), argv)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
