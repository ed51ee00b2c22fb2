"""The draft's flags, its tree, its warm-up and its page pool."""

from __future__ import annotations

import json

import pytest

from services.draft.context_cache import PagePool
from services.draft.runner import NoPages
from services.draft.settings import DraftSettings
from services.draft.warmup import PREFIX, measure
from slipstream.errors import ConfigError
from slipstream.settings import parse
from slipstream.tree import TreeMode, TreeSpec, resolve_spec
from tests.fakes.draft import FakeDraftRunner

BASE = ["--model", "target", "--draft", "head"]


def settings_of(*flags: str) -> DraftSettings:
    return parse(DraftSettings, [*BASE, *flags])


def test_the_tree_that_is_served_when_nothing_is_said() -> None:
    tree = settings_of().tree_spec(16)
    assert tree == TreeSpec(TreeMode.TOP2GAP, 4, 32)
    assert tree.spine and tree.shared_noise


def test_every_flag_of_the_tree() -> None:
    flags = "--tree accum_logp --width 7 --budget 64 --beta 2 --gap0 0.5 --no-spine"
    tree = settings_of(*flags.split(), "--no-shared-noise").tree_spec(16)
    assert tree == TreeSpec(TreeMode.ACCUM_LOGP, 7, 64, 2.0, 0.5, False, False)
    assert settings_of("--spine", "--width", "1").tree_spec(16) == resolve_spec(
        "chain", block_size=16
    )


def test_how_targets_may_hand_over() -> None:
    assert settings_of().handoff == "auto"
    assert settings_of("--handoff", "grpc").handoff == "grpc"
    with pytest.raises(ConfigError, match="handoff"):
        settings_of("--handoff", "pigeon")


def test_the_tree_as_json() -> None:
    text = json.dumps({"tree": "best_first", "budget": 32})
    tree = settings_of("--speculative-config", text).tree_spec(16)
    assert (tree.mode, tree.budget) == (TreeMode.BEST_FIRST, 32)
    with pytest.raises(ConfigError, match="colour"):
        settings_of("--speculative-config", '{"colour": 1}').tree_spec(16)
    with pytest.raises(ConfigError, match="--spine"):
        settings_of("--speculative-config", text, "--no-spine").tree_spec(16)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--width", "0"], "--width"),
        (["--budget", "900"], "900"),
        (["--port", "70000"], "70000"),
        (["--dtype", "int8"], "int8"),
        (["--slots", "0"], "--slots"),
        (["--max-sessions", "no"], "--max-sessions"),
    ],
)
def test_a_bad_flag_is_named_with_its_value(flags: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        settings_of(*flags)


def test_a_budget_below_the_spine_says_the_number() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        settings_of("--budget", "8").tree_spec(16)


def test_variables_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_DRAFT_PAGE_SIZE", "32")
    assert settings_of().page_size == 32
    assert settings_of("--page-size", "8").page_size == 8


def test_pool_gives_the_lowest_pages_first() -> None:
    pool = PagePool(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second, pool.free) == ([0, 1], [2, 3, 4], 1)
    with pytest.raises(NoPages, match="2 context pages are needed, 1 are free"):
        pool.take(2)
    assert pool.free == 1
    pool.give(first)
    assert pool.take(3) == [0, 1, 5]


@pytest.mark.parametrize("causal", [True, False])
def test_warm_up_measures_and_leaves_nothing(causal: bool) -> None:
    runner = FreeRunner(slots=5, block_size=8, causal=causal)
    tree = resolve_spec(block_size=8)
    costs = measure(runner, tree)
    rows = [4, 8] if causal else [8]
    assert [(c.slots, c.rows) for c in costs] == [(n, n * r) for n in (1, 2, 4) for r in rows]
    assert all(cost.ns > 0 for cost in costs)
    assert runner.contexts == []


def test_warm_up_stops_where_pages_end() -> None:
    pages = -(-(PREFIX + 8) // 16)
    costs = measure(FreeRunner(slots=8, block_size=8, pages=pages), resolve_spec(block_size=8))
    assert {cost.slots for cost in costs} == {1}


class FreeRunner(FakeDraftRunner):
    """A fake that takes any rows: the warm-up's are no target's."""

    def open_context(self):  # type: ignore[no-untyped-def]
        context = super().open_context()
        context.write = lambda rows: None  # type: ignore[method-assign]
        context.draft = lambda entries: []  # type: ignore[method-assign]
        return context
