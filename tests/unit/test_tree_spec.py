"""Tree specs: defaults, limits, JSON and wire form."""

from __future__ import annotations

import json
import re

import pytest

from slipstream.errors import ConfigError, InvalidRequest
from slipstream.tree import TreeMode, TreeSpec, parse_speculative_config, resolve_spec
from slipstream.tree.spec import full_size
from slipstream.v1 import draft_pb2 as pb


def test_default_is_the_served_tree() -> None:
    spec = resolve_spec(block_size=16)
    assert spec == TreeSpec(TreeMode.TOP2GAP, 4, 32, 1.0, 1.0, True, True)


@pytest.mark.parametrize(
    ("mode", "width", "budget", "block_size", "expected"),
    [
        (None, 1, None, 16, ("chain", 1, 16)),
        ("chain", None, None, 10, ("chain", 1, 10)),
        ("chain", None, 99, 16, ("chain", 1, 16)),
        ("top2gap", 1, None, 16, ("top2gap", 1, 16)),
        (None, 7, None, 16, ("top2gap", 7, 64)),
        (None, 2, None, 4, ("top2gap", 2, 15)),
        (None, 2, 64, 4, ("top2gap", 2, 15)),
        (None, 3, None, 4, ("top2gap", 3, 40)),
        (None, 7, 128, 16, ("top2gap", 7, 128)),
        ("accum_logp", None, None, 16, ("accum_logp", 4, 64)),
        ("accum_logp", 4, None, 100, ("accum_logp", 4, 100)),
        ("best_first", None, 32, 16, ("best_first", 31, 32)),
        ("best_first", None, None, 16, ("best_first", 63, 64)),
        ("best_first", 5, 32, 16, ("best_first", 5, 32)),
        (TreeMode.TOP2GAP, None, None, 16, ("top2gap", 4, 64)),
        (None, None, 48, 16, ("top2gap", 4, 48)),
        (None, None, None, 2, ("top2gap", 4, 5)),
        (None, None, None, 40, ("top2gap", 4, 40)),
    ],
)
def test_resolve(
    mode: str | None,
    width: int | None,
    budget: int | None,
    block_size: int,
    expected: tuple[str, int, int],
) -> None:
    spec = resolve_spec(mode, width, budget, block_size=block_size)
    assert (spec.mode, spec.width, spec.budget) == expected


def test_full_size() -> None:
    assert [full_size(16, 1), full_size(4, 2), full_size(4, 3)] == [16, 15, 40]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 7, "budget": 8}, "budget must be at least 16 .* block size 16, got 8"),
        ({"width": 1, "budget": 8}, "budget must be at least 16 .* got 8"),
        ({"mode": "best_first", "budget": 15}, "budget must be at least 16 .* got 15"),
        ({"width": 7, "budget": 1, "spine": False}, "budget must be at least 2 .* got 1"),
        ({"width": 7, "budget": 257}, "budget must be at most 256, got 257"),
        ({"width": 0}, "width must be between 1 and 255, got 0"),
        ({"width": 256}, "width must be between 1 and 255, got 256"),
        ({"mode": "chain", "width": 4}, "a chain has width 1, got width 4"),
        ({"mode": "wide"}, "tree must be one of chain, top2gap, .* got 'wide'"),
        ({"beta": -1.0}, "beta must be a number of at least 0, got -1.0"),
        ({"beta": float("nan")}, "beta .* got nan"),
        ({"gap0": float("inf")}, "gap0 must be a finite number, got inf"),
    ],
)
def test_refusals_name_key_and_number(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_spec(block_size=16, **given)  # type: ignore[arg-type]


def test_without_spine_small_budgets_serve() -> None:
    assert resolve_spec(None, 7, 8, block_size=16, spine=False).budget == 8
    assert resolve_spec(None, 1, 4, block_size=16, spine=False).budget == 4


def test_json() -> None:
    text = json.dumps({"tree": "accum_logp", "width": 3, "budget": 20, "spine": False, "beta": 2})
    spec = parse_speculative_config(text, 16)
    assert spec == TreeSpec(TreeMode.ACCUM_LOGP, 3, 20, 2, 1.0, False, True)
    assert parse_speculative_config('{"mode": "chain"}', 8) == resolve_spec("chain", block_size=8)
    assert parse_speculative_config("{}", 16) == resolve_spec(block_size=16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"widht": 4}', "no key 'widht'"),
        ('{"width": "4"}', "width has a wrong type, got '4'"),
        ('{"width": 4.0}', "width has a wrong type, got 4.0"),
        ('{"width": true}', "width has a wrong type, got True"),
        ('{"spine": 1}', "spine has a wrong type, got 1"),
        ('{"beta": null}', "beta has a wrong type, got None"),
        ('{"mode": "chain", "tree": "chain"}', "mode or tree, not both"),
        ("[4]", "must be a JSON object, got [4]"),
        ("{width: 4}", "not JSON"),
        ('{"width": 7, "budget": 9}', "at least 16"),
    ],
)
def test_json_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_speculative_config(text, 16)


def test_wire_form() -> None:
    for mode in TreeMode:
        spec = TreeSpec(mode, 1 if mode is TreeMode.CHAIN else 5, 40, 2.0, 0.5, True, False)
        assert TreeSpec.from_proto(spec.to_proto(), 16) == spec


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.TreeSpec(width=4, budget=32), "mode"),
        (pb.TreeSpec(mode=pb.TREE_MODE_TOP2GAP, budget=32), "width"),
        (pb.TreeSpec(mode=pb.TREE_MODE_CHAIN, width=2, budget=32), "width"),
        (pb.TreeSpec(mode=pb.TREE_MODE_TOP2GAP, width=4, budget=8, spine=True), "budget"),
        (pb.TreeSpec(mode=pb.TREE_MODE_TOP2GAP, width=4, budget=999), "budget"),
        (pb.TreeSpec(mode=pb.TREE_MODE_TOP2GAP, width=4, budget=32, beta=-2), "beta"),
    ],
)
def test_wire_refusals_name_the_field(message: pb.TreeSpec, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TreeSpec.from_proto(message, 16)
    assert caught.value.param == param
