"""The embedded pair through stacks of three processes: the same tokens with and without a draft.

All in fp32, where equality is promised. The reference is the stack without a draft, which is itself
compared with transformers' greedy generation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import slipstream.cli
from benchmarks.stack import Answer, Ask, Stack, stack

PROMPTS = Path(slipstream.cli.__file__).parent / "data" / "demo_prompts.jsonl"
TOKENS = 16
SMALL = ("--dtype", "float32", "--max-model-len", "512", "--slots", "8")
STRANGERS = 7

STACKS = {
    "jetspec chain": ("jetspec", {"tree": "chain", "width": 1, "budget": 16}, "1"),
    "jetspec top2gap": ("jetspec", {"tree": "top2gap", "width": 4, "budget": 32}, "1"),
    "jetspec wide, lock-step": ("jetspec", {"tree": "top2gap", "width": 7, "budget": 64}, "0"),
    "dflash top2gap": ("dflash", {"tree": "top2gap", "width": 4, "budget": 32}, "1"),
    "dflash best_first": ("dflash", {"tree": "best_first", "width": 4, "budget": 32}, "1"),
}


def prompts() -> list[str]:
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [row["prompt"] for row in rows]


def greedy_asks() -> list[Ask]:
    return [Ask(text, TOKENS) for text in prompts()]


def seeded_asks() -> list[Ask]:
    return [
        Ask(text, TOKENS, temperature=0.8, top_p=0.95, seed=1234 + i, ignore_eos=True)
        for i, text in enumerate(prompts()[:4])
    ]


@dataclass
class Results:
    """What one stack answered."""

    greedy: list[Answer]
    seeded: list[Answer]
    among_strangers: Answer


def strangers() -> list[Ask]:
    return [replace(seeded_asks()[0], seed=9000 + i) for i in range(STRANGERS)]


def collect(running: Stack) -> Results:
    mixed = running.ask_all([*strangers()[:4], seeded_asks()[0], *strangers()[4:]], STRANGERS + 1)
    alone, *others = seeded_asks()
    return Results(
        greedy=running.ask_all(greedy_asks(), 8),
        seeded=[running.ask(alone), *running.ask_all(others, len(others))],
        among_strangers=mixed[4],
    )


@pytest.fixture(scope="module", autouse=True)
def no_warm_up() -> Iterator[None]:
    """Trees are pinned, so nobody needs the times that a warm-up measures."""
    with pytest.MonkeyPatch.context() as patch:
        for process in ("TARGET", "DRAFT"):
            patch.setenv(f"SLIPSTREAM_{process}_WARMUP", "false")
        yield


@pytest.fixture(scope="module")
def plain() -> Iterator[Results]:
    with ExitStack() as cleanup:
        running = cleanup.enter_context(stack("--draft", "none", *SMALL))
        yield collect(running)


# A chain and a tree, a head each, are enough for every change; lock-step runs over the fakes.
SLOW = ("jetspec top2gap", "jetspec wide, lock-step", "dflash best_first")


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW), id=n) for n in STACKS],
)
def drafted(request: pytest.FixtureRequest) -> Iterator[Results]:
    head, spec, depth = STACKS[request.param]
    options = ["--draft", head, *SMALL, "--pipeline-depth", depth]
    with stack(*options, "--speculative-config", json.dumps(spec)) as running:
        yield collect(running)


def ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def test_greedy_tokens_are_those_of_plain_decoding(plain: Results, drafted: Results) -> None:
    assert ids(drafted.greedy) == ids(plain.greedy)
    assert [a.finish for a in drafted.greedy] == [a.finish for a in plain.greedy]
    nodes = [n for answer in drafted.greedy for n in answer.nodes]
    assert sum(n > 1 for n in nodes) > 0.8 * len(nodes)
    assert sum(sum(a.accepted) for a in drafted.greedy) > len(prompts())


def test_seeded_tokens_are_those_of_plain_decoding(plain: Results, drafted: Results) -> None:
    assert ids(drafted.seeded) == ids(plain.seeded)
    assert len({tuple(answer.ids) for answer in drafted.seeded}) == len(drafted.seeded)


def test_strangers_in_the_batch_change_nothing(plain: Results, drafted: Results) -> None:
    assert plain.among_strangers.ids == plain.seeded[0].ids
    assert drafted.among_strangers.ids == plain.seeded[0].ids


def test_plain_tokens_are_those_of_transformers(plain: Results) -> None:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from slipstream.models.resolve import resolve_model

    folder = resolve_model("smollm2-135m-instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text, answer in list(zip(prompts(), plain.greedy, strict=True))[:3]:
        given = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            whole = model.generate(
                given, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(given)
            )
        assert answer.ids == whole[0, given.shape[1] :].tolist()
