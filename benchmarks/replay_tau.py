"""tau of a head and a tree by replaying known greedy answers: the draft server's model, no verify.

With lossless greedy decoding the target's tokens are known beforehand, so acceptance follows from
walking every drafted tree along them. One target pass per prompt gives the context features.
`benchmarks.lossless` measures the same through whole stacks; this one is quick enough for many
trees. Resumable: finished trees are read from the result file.

    python -m benchmarks.replay_tau --golden FILE.jsonl --out benchmarks/results/replay_tau.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.stack import machine, save
from services.draft.loading import load_runner
from services.draft.model_runner import ModelContext
from services.draft.runner import ContextRows, DraftEntry, Drafting
from services.draft.settings import DraftSettings
from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.rows import RowBatch
from slipstream.models import (
    CausalLM,
    ContextProjector,
    load_draft_config,
    resolve_draft,
    resolve_model,
)
from slipstream.tree import Tree, TreeSpec, resolve_spec

TARGET = "smollm2-135m-instruct"
PAGE = 16
BATCH = 10
TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("chain", {"width": 1, "budget": 16}),
    "top2gap w4 b32": ("top2gap", {"width": 4, "budget": 32, "spine": False}),
    "accum_logp w4 b32": ("accum_logp", {"width": 4, "budget": 32, "spine": False}),
    "top2gap w7 b64": ("top2gap", {"width": 7, "budget": 64, "spine": False}),
    "accum_logp w7 b64": ("accum_logp", {"width": 7, "budget": 64, "spine": False}),
    "top2gap w4 b32, spine": ("top2gap", {"width": 4, "budget": 32}),
    "top2gap w4 b64, spine": ("top2gap", {"width": 4, "budget": 64}),
    "top2gap w4 b128, spine": ("top2gap", {"width": 4, "budget": 128}),
    "top2gap w7 b64, spine": ("top2gap", {"width": 7, "budget": 64}),
    "top2gap w7 b128, spine": ("top2gap", {"width": 7, "budget": 128}),
    "best_first b32, spine": ("best_first", {"width": 31, "budget": 32}),
    "best_first b64, spine": ("best_first", {"width": 63, "budget": 64}),
}


@dataclass
class Answer:
    """A known greedy answer, its context features, and how far the replay is."""

    name: str
    ids: list[int]
    prompt: int
    features: memoryview
    row_bytes: int
    start: int = 0
    steps: int = 0

    @property
    def done(self) -> bool:
        return self.start >= len(self.ids) - 1

    def rows(self, slot: int, first: int, last: int) -> ContextRows:
        part = self.features[first * self.row_bytes : last * self.row_bytes]
        return ContextRows(slot, first, last - first, part)


def features(
    model: CausalLM, project: ContextProjector, taps: Sequence[int], ids: list[int]
) -> memoryview:
    """The context features of all of `ids`, as the target would publish them."""
    config = model.config
    pages = -(-len(ids) // PAGE)
    shape = (config.num_layers, pages, PAGE, config.num_kv_heads, config.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    batch = RowBatch.build([len(ids)], [0], [list(range(pages))])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        write_kv(keys[layer], values[layer], k, v, batch)
        return paged_attention(q, keys[layer], values[layer], batch, scale=config.scale)

    out = model.forward(torch.tensor(ids), batch.positions, attend, taps)
    assert out.taps is not None
    return memoryview(project(out.taps).contiguous().numpy()).cast("B")


def accepted(tree: Tree, answer: Answer) -> int:
    """Drafts of `tree` that the answer's next tokens walk over."""
    node, count = 0, 0
    for token in answer.ids[answer.start + 1 :]:
        child = next(
            (i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token), None
        )
        if child is None:
            break
        node, count = child, count + 1
    return count


def replay(context: ModelContext, answers: list[Answer], spec: TreeSpec) -> None:
    """Drafts and walks until every answer is through; sets `steps`."""
    for slot, answer in enumerate(answers):
        answer.start, answer.steps = answer.prompt, 0
        context.admit(slot, Drafting(spec, 0.0, 0, 0))
        context.reserve(slot, answer.start)
        context.write([answer.rows(slot, 0, answer.start)])
    while live := [slot for slot, answer in enumerate(answers) if not answer.done]:
        entries = [
            DraftEntry(slot, answers[slot].start, answers[slot].ids[answers[slot].start],
                       spec.budget)
            for slot in live
        ]  # fmt: skip
        writes = []
        for slot, tree in zip(live, context.draft(entries), strict=True):
            answer = answers[slot]
            first = answer.start
            answer.steps += 1
            answer.start = min(first + accepted(tree, answer) + 1, len(answer.ids) - 1)
            context.reserve(slot, answer.start)
            writes.append(answer.rows(slot, first, answer.start))
        context.write(writes)
    for slot in range(len(answers)):
        context.release(slot)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--heads", default="jetspec,dflash")
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES), metavar="TREE")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/replay_tau.json"))
    args = parser.parse_args()
    golden = [json.loads(line) for line in args.golden.read_text().splitlines()]
    model = CausalLM.load(resolve_model(TARGET), torch.float32)
    result: dict[str, Any] = {"machine": machine(), "prompts": len(golden), "tau": {}}
    if args.out.exists():
        result["tau"] = json.loads(args.out.read_text())["tau"]
    for head in args.heads.split(","):
        runner = load_runner(
            DraftSettings(model=TARGET, draft=head, dtype="float32", slots=BATCH, pages=800)
        )
        folder = resolve_draft(head)
        project = ContextProjector.load(folder, torch.float32, "cpu")
        taps = load_draft_config(folder).target_layer_ids
        answers = [
            Answer(row["set"], ids, len(row["prompt_ids"]), features(model, project, taps, ids),
                   runner.spec.row_bytes)
            for row in golden
            for ids in [row["prompt_ids"] + row["greedy_ids"]]
        ]  # fmt: skip
        context = runner.open_context()
        for name in args.trees:
            if f"{head} {name}" in result["tau"]:
                continue
            mode, options = TREES[name]
            spec = resolve_spec(mode, block_size=runner.spec.block_size, **options)
            began = time.perf_counter()
            for first in range(0, len(answers), BATCH):
                replay(context, answers[first : first + BATCH], spec)
            taus = {
                group: round(
                    sum(len(a.ids) - a.prompt - 1 for a in answers if a.name == group)
                    / sum(a.steps for a in answers if a.name == group),
                    3,
                )
                for group in dict.fromkeys(a.name for a in answers)
            }
            result["tau"][f"{head} {name}"] = taus
            print(f"{head} {name}: {taus} ({time.perf_counter() - began:.0f} s)", flush=True)
            save(args.out, result)
        context.close()


if __name__ == "__main__":
    main()
