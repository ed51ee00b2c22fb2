"""The choice of nodes and of groups: costs, acceptance, and that drafting never loses."""

from __future__ import annotations

import itertools
import random

import pytest

from gateway.acceptance import Acceptance
from gateway.costs import CostCurve, StepCosts
from gateway.nodes import NodeChooser, candidates
from gateway.pingpong import PATIENCE, PingPong

BLOCK = 16


def test_costs_are_linear_between_and_beyond_the_points() -> None:
    curve = CostCurve([(1, 1, 10.0), (1, 17, 26.0), (8, 8, 20.0), (8, 128, 80.0)])
    assert curve.ms(1, 1) == 10 and curve.ms(1, 9) == pytest.approx(18)
    assert curve.ms(1, 33) == pytest.approx(42), "the last slope goes on"
    assert curve.ms(8, 68) == pytest.approx(50)
    low, high = curve.ms(1, 16), curve.ms(8, 16)
    assert curve.ms(4, 16) == pytest.approx(low + 3 / 7 * (high - low))
    assert curve.ms(16, 128) == pytest.approx(80) and curve.ms(1, 0) == 10


def test_a_causal_draft_computes_only_the_depths_of_the_plan() -> None:
    draft = [(1, 1, 1.0), (1, 16, 16.0)]
    causal = StepCosts([(1, 1, 10.0)], draft, BLOCK, causal=True)
    block = StepCosts([(1, 1, 10.0)], draft, BLOCK, causal=False)
    assert causal.draft_ms(1, 4) == pytest.approx(4) and block.draft_ms(1, 4) == 16
    assert causal.draft_ms(1, 32) == block.draft_ms(1, 32) == 16
    assert causal.draft_ms(1, 1) == 0


def test_ping_pong_hides_the_draft_behind_the_verify() -> None:
    costs = StepCosts([(1, 1, 10.0)], [(1, 16, 8.0)], BLOCK, causal=False)
    assert costs.step_ms(16, 1, 0, paired=False) == pytest.approx(18.4)
    assert costs.step_ms(16, 1, 0, paired=True) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("budget", "most", "want"),
    [(32, 64, (1, 4, 8, 16, 32)), (16, 64, (1, 4, 8, 16)), (6, 64, (1, 4, 6)), (32, 8, (1, 4, 8)),
     (1, 64, (1,))],
)  # fmt: skip
def test_candidates(budget: int, most: int, want: tuple[int, ...]) -> None:
    assert candidates(budget, BLOCK, most) == want


def test_acceptance_learns_by_depth_and_shares_it_between_prefixes() -> None:
    acceptance = Acceptance(BLOCK, [0.5, 0.25], chain=BLOCK)
    assert acceptance.expected(1) == 1
    assert acceptance.expected(3) == pytest.approx(1.625)
    assert acceptance.expected(32) > acceptance.expected(16)
    for _ in range(1_000):
        acceptance.observe(4, 3)
    acceptance.refresh()
    assert acceptance.expected(4) == pytest.approx(4, abs=0.2)
    assert acceptance.expected(16) > 4, "deeper is known at least as far"
    for _ in range(3_000):
        acceptance.observe(16, 0)
    acceptance.refresh()
    assert acceptance.expected(4) < 2.1


def walk(dice: random.Random, nodes: int, chance: float) -> int:
    """Drafts accepted, each with `chance` after the one before (better in a tree)."""
    if nodes > BLOCK:
        chance = 1 - (1 - chance) ** 1.35
    most = min(nodes - 1, BLOCK - 1)
    return next((d for d in range(most) if dice.random() >= chance), most)


def simulate(
    chance: float, row_cost: float, draft_ms: float, wrong: float, slots: int, steps: int = 4_000
) -> tuple[float, float, float]:
    """Tokens per ms by the chooser, by plain decoding, and by the best fixed number of nodes.

    A step takes 10 ms + `row_cost` per further row + the draft's time; the start-up measurements
    were off by the factor `wrong` for more than one row, and times are noisy.
    """
    dice = random.Random(f"{chance},{row_cost},{draft_ms},{wrong},{slots}")

    def true_ms(nodes: int) -> float:
        ms = 10 + row_cost * (nodes * slots - 1)
        return ms + (draft_ms + 0.7 if nodes > 1 else 0)

    points = [
        (slots, slots * n, (10 + row_cost * (n * slots - 1)) * (1 if n == 1 else wrong))
        for n in (1, 4, 16, 32)
    ]
    costs = StepCosts(points, [(slots, slots * BLOCK, draft_ms * wrong)], BLOCK, causal=False)
    chooser = NodeChooser(costs, Acceptance(BLOCK, (), BLOCK), 32, BLOCK, 64, pinned=False)
    tokens = ms = 0.0
    for _ in range(steps):
        nodes = chooser.choose(slots, 0, False)
        took = true_ms(nodes) * dice.uniform(0.9, 1.15)
        for _ in range(slots):
            accepted = walk(dice, nodes, chance) if nodes > 1 else 0
            tokens += 1 + accepted
            if nodes > 1:
                chooser.observe_accepted(nodes, accepted)
        ms += took
        chooser.observe_step(nodes, slots, 0, False, took)
    mean = 1.025
    best = 0.0
    for nodes in chooser.candidates:
        got = 1 + sum(walk(dice, nodes, chance) for _ in range(2_000)) / 2_000 if nodes > 1 else 1
        best = max(best, slots * got / (true_ms(nodes) * mean))
    return tokens / ms, slots / (true_ms(1) * mean), best


CASES = list(itertools.product((0.05, 0.5, 0.85), (0.02, 0.4, 1.5), (1.0, 9.0), (0.5, 2.0)))


@pytest.mark.parametrize("slots", [1, 8])
def test_drafting_never_loses_and_finds_the_gain(slots: int) -> None:
    worst, missed = [], []
    for case in CASES:
        got, plain, best = simulate(*case, slots=slots, steps=1_000 if slots == 8 else 2_500)
        worst.append((got / plain, case))
        missed.append((got / best, case))
    assert min(worst)[0] >= 0.95, min(worst)
    assert min(missed)[0] >= 0.85, min(missed)


def test_pinned_is_always_the_whole_tree() -> None:
    costs = StepCosts([(1, 1, 1.0), (1, 32, 500.0)], [], BLOCK, causal=False)
    chooser = NodeChooser(costs, Acceptance(BLOCK, (), BLOCK), 32, BLOCK, 64, pinned=True)
    assert {chooser.choose(1, 0, False) for _ in range(200)} == {32}
    assert chooser.choose(0, 3, False) == 1


def test_plain_probes_at_most_once_in_64_steps() -> None:
    costs = StepCosts([(1, 1, 10.0), (1, 32, 40.0)], [(1, 16, 10.0)], BLOCK, causal=False)
    chooser = NodeChooser(costs, Acceptance(BLOCK, [0.05], BLOCK), 32, BLOCK, 64, pinned=False)
    chosen = [chooser.choose(1, 0, False) for _ in range(6_400)]
    assert 0 < sum(nodes > 1 for nodes in chosen) <= 100


def test_ping_pong_pays_by_the_formula() -> None:
    flat = [(1, 1, 10.0), (16, 16, 10.0), (16, 256, 12.0)]
    steep = [(n, n * 16, 1.0 * n) for n in (1, 2, 4, 8, 16)]
    slow_draft = StepCosts(steep, [(n, n * 16, 0.9 * n) for n in (1, 2, 4, 8, 16)], BLOCK, False)
    assert PingPong("auto", slow_draft).pays(16, 16)
    assert not PingPong("auto", slow_draft).pays(16, 1)
    assert not PingPong("auto", StepCosts(flat, [(1, 16, 1.0)], BLOCK, False)).pays(16, 16)


def test_ping_pong_modes_and_measurement() -> None:
    costs = StepCosts([(n, n * 16, 1.0 * n) for n in (1, 8, 16)],
                      [(n, n * 16, 0.9 * n) for n in (1, 8, 16)], BLOCK, False)  # fmt: skip
    assert PingPong("off", costs).groups(16, 16, True) == 1
    on = PingPong("on", costs)
    assert on.groups(16, 16, True) == 2
    assert on.groups(1, 16, True) == on.groups(16, 16, False) == 1
    auto = PingPong("auto", costs)

    def plans(one_ms: float, two_ms: float) -> int:
        groups = 1
        for _ in range(6 * PATIENCE):
            groups = auto.groups(16, 16, True)
            auto.observe(groups, 16, one_ms if groups == 1 else two_ms, 10)
        return groups

    assert plans(10.0, 6.0) == 2
    assert plans(10.0, 14.0) == 1, "what was measured decides"
