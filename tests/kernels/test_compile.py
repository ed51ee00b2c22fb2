"""Every launch of the other tests here, through the compiler for GPUs that are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream.kernels
from tests.kernels.launches import NOTES

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
LAUNCH = re.compile(r"^ +(_\w+)\[", re.MULTILINE)
PARTS = 2


def environment(notes: Path, interpret: str) -> dict[str, str]:
    cache = str(notes.parent / "compiled")
    return {
        **os.environ,
        NOTES: str(notes),
        "TRITON_INTERPRET": interpret,
        "TRITON_CACHE_DIR": cache,
    }


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches") / "notes"
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.launches", str(FOLDER)]
    subprocess.run([*command, "-n", str(PARTS)], env=environment(folder, "1"), check=True)
    return folder


@pytest.mark.parametrize("capability", [90, 100])
def test_every_launch_compiles(notes: Path, capability: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.launches", str(notes)]
    command += ["--capability", str(capability), "--parts", str(PARTS)]
    running = [
        subprocess.Popen(
            [*command, "--part", str(part)],
            env=environment(notes, "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(PARTS)
    ]
    said = [process.communicate() for process in running]
    assert all(process.returncode == 0 for process in running), [errors for _, errors in said]
    compiled = {line for names, _ in said for line in names.splitlines()}
    kernels = slipstream.kernels
    for file in Path(kernels.__path__[0]).glob("*.py"):
        for name in LAUNCH.findall(file.read_text()):
            assert f"{kernels.__name__}.{file.stem} {name}" in compiled
