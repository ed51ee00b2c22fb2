"""Random lives of both engines: plans, faults, refusals; every plan ends, no row is stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.protocol.gateway_model import SLOTS, VOCAB, GatewayModel

Op = tuple[str, Any]

slots = st.integers(0, SLOTS - 1)
prompts = st.lists(st.integers(8, VOCAB - 1), min_size=1, max_size=14)
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "admit": st.tuples(slots, prompts),
    "prefill": st.none(),
    "decode": st.tuples(st.sampled_from([1, 4, 8, 12]), st.sampled_from([0, 3, 16])),
    "release": slots,
    "attach": st.none(),
    "detach": st.none(),
    "rewind": st.tuples(slots, st.integers(0, 40)),
    "stray": st.integers(0, 7),
    "hold": st.none(),
    "deliver": st.none(),
    "repeat": st.integers(0, 99),
    "break": st.none(),
    "lose draft": st.none(),
    "lose target": st.none(),
    "settle": st.none(),
}
OFTEN = {"decode": 14, "prefill": 4, "admit": 4, "attach": 2, "settle": 2, "repeat": 2}
NAMES = [name for name in ARGUMENTS for _ in range(OFTEN.get(name, 1))]


@st.composite
def operations(draw: st.DrawFn) -> Op:
    name = draw(st.sampled_from(NAMES))
    return name, draw(ARGUMENTS[name])


def table(model: GatewayModel) -> dict[str, Callable[[Any], object]]:
    def on_link(act: Callable[[Any], object]) -> object:
        link = model.link()
        return act(link) if link is not None else None

    def hold(link: Any) -> None:
        link.holding = True

    return {
        "admit": lambda a: model.admit(a[0], a[1], 20 + 5 * len(a[1])),
        "prefill": lambda _: model.prefill(),
        "decode": lambda a: model.decode(*a),
        "release": model.release,
        "attach": lambda _: model.attach(),
        "detach": lambda _: model.detach(),
        "rewind": lambda a: model.rewind(*a),
        "stray": model.stray,
        "hold": lambda _: on_link(hold),
        "deliver": lambda _: on_link(lambda link: link.deliver()),
        "repeat": lambda n: on_link(lambda link: link.repeat(n)),
        "break": lambda _: on_link(lambda link: link.close("broken")),
        "lose draft": lambda _: model.lose_draft_stream(),
        "lose target": lambda _: model.lose_target_stream(),
        "settle": lambda _: model.settle(),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(operations(), min_size=50, max_size=150))
def test_every_plan_ends_and_tokens_are_plain(script: list[Op]) -> None:
    model = GatewayModel()
    actions = table(model)
    model.attach()
    model.admit(0, [9, 10, 11], 80)
    model.admit(1, [12] * 12, 80)
    try:
        for name, argument in script:
            actions[name](argument)
        event(f"trees drafted: {min(model.draft_runner.drafted, 20) // 5 * 5} or more")
    finally:
        model.finish()


def test_a_quiet_life_drafts() -> None:
    """The model's happy path really verifies trees, so that the random test is not empty."""
    model = GatewayModel()
    model.attach()
    model.admit(0, [9, 10, 11, 12, 13, 14], 60)
    model.admit(1, [20], 60)
    for _ in range(3):
        model.prefill()
    for _ in range(20):
        model.decode(12, 0)
    model.settle()
    assert model.draft_runner.drafted > 10
    kinds = [rows > slots for kind, slots, rows in model.runner.calls if kind == "decode"]
    assert sum(kinds) > 5
    model.finish()
