"""Width 1 is the plain chain: no tree, heap or mask code runs on its way, and nothing changes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from slipstream.params import SamplingParams
from slipstream.tree import TreeSpec, resolve_spec
from tests.pairloop import PairLoop
from tests.tiny import Pair, make_pair

PROMPTS = [[5, 6, 7], list(range(10, 40)), [99]]
COUNT = 24
MASK_CODE = {"ancestor_bits", "split_words", "pack_bits", "unpack_bits", "mask_from_ancestors"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp("pair")
    return make_pair(folder, "llama", "jetspec")


def functions_run(pair: Pair, spec: TreeSpec) -> tuple[list[list[int]], set[tuple[str, str]]]:
    """The tokens, and (file, function) of every Python function that ran."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

    loop = PairLoop(pair, len(PROMPTS), spec)
    sys.setprofile(note)
    try:
        rows = loop.run(PROMPTS, [SamplingParams()] * len(PROMPTS), COUNT)
    finally:
        sys.setprofile(None)
    return [row.tokens for row in rows], seen


def tree_code(seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(file, name) for file, name in seen if file == "heap.py" or name in MASK_CODE}


def test_width_one_runs_no_tree_code_and_changes_nothing(pair: Pair) -> None:
    plain = [
        row.tokens
        for row in PairLoop(pair, len(PROMPTS), None).run(
            PROMPTS, [SamplingParams()] * len(PROMPTS), COUNT
        )
    ]
    chain, seen = functions_run(pair, resolve_spec("chain", 1, 8, block_size=8))
    assert ("chain.py", "build_chain") in seen
    assert tree_code(seen) == set()
    assert chain == plain


def test_a_tree_runs_it_and_changes_nothing(pair: Pair) -> None:
    chain, _ = functions_run(pair, resolve_spec("chain", 1, 8, block_size=8))
    wide, seen = functions_run(pair, resolve_spec("top2gap", 4, 24, block_size=8))
    names = {name for _, name in tree_code(seen)}
    assert {"grow_by_parent", "ancestor_bits", "mask_from_ancestors"} <= names
    assert wide == chain
