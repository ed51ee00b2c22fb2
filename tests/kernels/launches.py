"""Which kernels were launched with what, and whether a GPU's compiler takes them: needs no GPU.

As a pytest plugin it notes the launches of interpreted kernels, a file a process; as a program it
compiles the notes of a folder.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

NOTES = "SLIPSTREAM_TEST_LAUNCHES"
"""The folder of the notes, in the environment of a run with the plugin."""

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.bool: "i1", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
}  # fmt: skip

_noted: set[str] = set()


def pytest_configure() -> None:
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def noting(self: Any, *given: Any, **named: Any) -> None:
        _noted.add(json.dumps(note(self.fn, self.constexprs, given, named)))
        launch(self, *given, **named)

    interpreter.GridExecutor.__call__ = noting


def pytest_unconfigure() -> None:
    file = Path(os.environ[NOTES]) / f"{os.getpid()}.jsonl"
    file.write_text("".join(line + "\n" for line in sorted(_noted)))


def note(fn: Any, constant: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """A launch of `fn`: its name, one pair of kind and value per argument, the options."""
    known = inspect.signature(fn).parameters
    bound = inspect.signature(fn).bind(*given, **{k: v for k, v in named.items() if k in known})
    bound.apply_defaults()
    return {
        "module": fn.__module__,
        "name": fn.__name__,
        "arguments": {
            name: _constant(value) if name in constant or value is None else _argument(value)
            for name, value in bound.arguments.items()
        },
        "options": {k: v for k, v in named.items() if k in OPTIONS},
    }


def _argument(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return ["pointer", f"*{TYPES[value.dtype]}", value.data_ptr() % 16 == 0]
    if isinstance(value, bool):
        return ["value", "i1"]
    if isinstance(value, float):
        return ["value", "fp32"]
    return ["value", "i32" if -(2**31) <= value < 2**31 else "i64"]


def _constant(value: Any) -> list[Any]:
    value = getattr(value, "value", value)
    if isinstance(value, tl.dtype):
        return ["dtype", next(name for name in dir(tl) if getattr(tl, name) is value)]
    if hasattr(value, "fn"):
        return ["function", value.fn.__module__, value.fn.__name__]
    return ["constant", value]


def compile_launch(launch: dict[str, Any], capability: int, real: bool) -> None:
    """Compiles down to machine code. `real`: the value of an argument REAL, which says whether
    there is a GPU. Raises what the compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    traits: dict[tuple[int], Any] = {}
    for at, (name, (kind, *value)) in enumerate(launch["arguments"].items()):
        types[name] = value[0] if kind in ("pointer", "value") else "constexpr"
        if kind == "pointer" and value[1]:
            traits[at,] = [["tt.divisibility", 16]]
        elif kind == "constant":
            constants[at,] = real if name == "REAL" else value[0]
        elif kind == "dtype":
            constants[at,] = getattr(tl, value[0])
        elif kind == "function":
            constants[at,] = getattr(importlib.import_module(value[0]), value[1])
    fn = getattr(importlib.import_module(launch["module"]), launch["name"])
    source = ASTSource(fn, types, constants, traits)
    compile(source, target=GPUTarget("cuda", capability, 32), options=launch["options"])


def main() -> int:
    """Compiles part `--part` of `--parts` of the notes; prints the kernels' names, and fails with
    the first that does not compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capability", type=int, required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args()
    lines = {line for file in options.folder.iterdir() for line in file.read_text().splitlines()}
    for line in sorted(lines)[options.part :: options.parts]:
        launch = json.loads(line)
        print(launch["module"], launch["name"], flush=True)
        for real in (False, True) if "REAL" in launch["arguments"] else (True,):
            try:
                compile_launch(launch, options.capability, real)
            except Exception as error:
                print(f"{line} with REAL={real}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
