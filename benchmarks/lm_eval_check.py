"""Does lm-eval score a running stack as it scores the same model in transformers?

The stack runs in fp32 with a draft, and prompts in chunks of a few rows, so that scores are put
together across their borders. lm-eval's `local-completions` asks it over REST; its `hf` model is
transformers on the same folder, in fp32. Two tasks over JSON data that is written here (no hub is
reached): loglikelihoods of continuations, and greedy texts with stop strings. Equal are
log-likelihoods to 1e-3, whether a continuation is the greedy one, and every text.

    pip install 'slipstream[eval]'
    python -m benchmarks.lm_eval_check --out benchmarks/results/lm_eval_check.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.stack import Stack, machine, save, stack

MODEL = "smollm2-135m-instruct"
WINDOW = 1024
CHUNK = 16  # prompt rows between two decode steps
NEAR = 1e-3
NEW_TOKENS = 48
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
SCORES, TEXTS = "continuations", "answers"

CAPITALS = (
    ("France", "Paris"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Japan", "Tokyo"),
    ("Germany", "Berlin"),
    ("Austria", "Vienna"),
    ("Egypt", "Cairo"),
    ("Greece", "Athens"),
    ("Portugal", "Lisbon"),
    ("Norway", "Oslo"),
    ("Kenya", "Nairobi"),
    ("Peru", "Lima"),
    ("Cuba", "Havana"),
)
STORIES = (
    ("The bakery opens at six, long before the street wakes", "and the bread is still warm"),
    ("Tokens come back as bytes: naïve, 東京, 🙂 and so on", "— every one of them, 日本語 too"),
    ("def area(width, height):\n    return", "width * height\n\nprint(area(3, 4))"),
    ("A train leaves the station at nine and arrives at noon. The journey takes", "three hours"),
    ("Water boils at one hundred degrees Celsius, and it freezes at", "zero degrees Celsius."),
    ("The quick brown fox jumps over the lazy", "dog"),
)
ASKED = (
    "Q: What is a {0}?\nA: A {0} is",
    "Here is a short story about a {0}. Once upon a time",
    "Three facts about a {0}:\n1.",
    "To draw a {0}, first",
    "Question: What is a {0} used for?\nAnswer:",  # many of these answers end at once
)
THINGS = (
    *("kitchen", "bicycle", "library", "garden", "ship", "clock", "bridge", "letter", "river"),
    "telescope",
)


def scored_items(count: int) -> list[dict[str, str]]:
    """Contexts and continuations: likely ones, unlikely ones, and long ones."""
    items = [
        {"context": f"The capital of {land} is", "continuation": f" {city}"}
        for land, city in CAPITALS
    ]
    items += [
        {"context": f"Q: What is the capital of {land}?\nA:", "continuation": f" {other}."}
        for (land, _), (_, other) in zip(CAPITALS, CAPITALS[1:] + CAPITALS[:1], strict=True)
    ]
    items += [{"context": text, "continuation": f" {more}"} for text, more in STORIES]
    rows = random.Random(7)
    while len(items) < count:  # several chunks long
        facts = rows.sample(CAPITALS, 6)
        told = " ".join(f"The capital of {land} is {city}." for land, city in facts)
        land, city = rows.choice(facts)
        items.append(
            {"context": f"{told} Once more: the capital of {land} is", "continuation": f" {city}."}
        )
    rows.shuffle(items)
    return items[:count]


def asked_items(count: int) -> list[dict[str, str]]:
    """Prompts of greedy texts; some of the answers meet a stop string."""
    prompts = [form.format(thing) for thing in THINGS for form in ASKED]
    return [{"prompt": text, "answer": ""} for text in prompts[:count]]


def task(name: str, path: Path, **fields: Any) -> dict[str, Any]:
    """lm-eval's description of a task over the lines of one file."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "num_fewshot": 0,
        "target_delimiter": "",
        **fields,
    }


def tasks(folder: Path, items: int) -> list[dict[str, Any]]:
    """Both tasks, their data written to `folder`."""
    scored, asked = folder / "scored.jsonl", folder / "asked.jsonl"
    for path, rows in ((scored, scored_items(items)), (asked, asked_items(items))):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        task(
            SCORES,
            scored,
            output_type="loglikelihood",
            doc_to_text="{{context}}",
            doc_to_target="{{continuation}}",
            metric_list=[{"metric": "acc"}],
        ),
        task(
            TEXTS,
            asked,
            output_type="generate_until",
            doc_to_text="{{prompt}}",
            doc_to_target="{{answer}}",
            generation_kwargs={
                "until": ["Question:", "\n\n\n", "3.", " because"],
                "max_gen_toks": NEW_TOKENS,
                "do_sample": False,
            },
            metric_list=[{"metric": "exact_match"}],
        ),
    ]


def evaluate(model: str, args: dict[str, Any], folder: Path, items: int) -> dict[str, list[Any]]:
    """What a model of lm-eval answered, by task, in the order of the items."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model,
        model_args=args,
        tasks=tasks(folder, items),
        batch_size=1,
        bootstrap_iters=0,
        log_samples=True,
    )
    return {
        name: [sample["resps"][0][0] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in found["samples"].items()
    }


def through_stack(running: Stack, model: Path, folder: Path, items: int) -> dict[str, list[Any]]:
    args = {
        "model": MODEL,
        "base_url": f"http://127.0.0.1:{running.http_port}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(model),
        "num_concurrent": 8,
        "max_retries": 1,
        "max_length": WINDOW,
    }
    return evaluate("local-completions", args, folder, items)


def through_transformers(model: Path, folder: Path, items: int) -> dict[str, list[Any]]:
    args = {"pretrained": str(model), "dtype": "float32", "device": "cpu", "max_length": WINDOW}
    return evaluate("hf", args, folder, items)


def compare(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> dict[str, Any]:
    """How many items agree, and those that do not."""
    scores = list(zip(ours[SCORES], theirs[SCORES], strict=True))
    texts = list(zip(ours[TEXTS], theirs[TEXTS], strict=True))
    errors = [abs(float(a[0]) - float(b[0])) for a, b in scores]
    return {
        SCORES: {
            "items": len(scores),
            "equal": sum(error <= NEAR for error in errors),
            "largest_difference": max(errors),
            "same_flag": sum(bool(a[1]) == bool(b[1]) for a, b in scores),
            "greedy": sum(bool(b[1]) for _, b in scores),
            "different": [
                {"item": i, "stack": a, "transformers": b}
                for i, ((a, b), error) in enumerate(zip(scores, errors, strict=True))
                if error > NEAR or bool(a[1]) != bool(b[1])
            ],
        },
        TEXTS: {
            "items": len(texts),
            "equal": sum(a == b for a, b in texts),
            "not_empty": sum(bool(b) for _, b in texts),
            "different": [
                {"item": i, "stack": a, "transformers": b}
                for i, (a, b) in enumerate(texts)
                if a != b
            ],
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=50, help="of each task")
    parser.add_argument("--draft", default="jetspec")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in OFFLINE:
        os.environ[name] = "1"
    os.environ["SLIPSTREAM_GATEWAY_MAX_PREFILL_CHUNK"] = str(CHUNK)
    from slipstream.models.resolve import resolve_model

    model = resolve_model(MODEL)
    with tempfile.TemporaryDirectory(prefix="lm-eval-check-") as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        options = ["--draft", args.draft, "--dtype", "float32"]
        began = time.perf_counter()
        with stack(*options, "--max-model-len", str(WINDOW), "--slots", "8") as running:
            ours = through_stack(running, model, folder, args.items)
        middle = time.perf_counter()
        theirs = through_transformers(model, folder, args.items)
        ended = time.perf_counter()
    result = compare(ours, theirs)
    result["seconds"] = {"stack": round(middle - began, 1), "hf": round(ended - middle, 1)}
    result["machine"] = machine() | {"lm_eval": metadata.version("lm-eval")}
    print(json.dumps({name: result[name] for name in (SCORES, TEXTS, "seconds")}, indent=1))
    if args.out is not None:
        save(args.out, result)
    scores, texts = result[SCORES], result[TEXTS]
    alike = scores["equal"] == scores["same_flag"] == scores["items"]
    return 0 if alike and texts["equal"] == texts["items"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
