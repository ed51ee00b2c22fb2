"""Are answers with a JSON schema valid, and what do grammars cost a stack that drafts?

200 chats over 20 schemas, whose strings, arrays and white space are bounded so that every answer
comes to its end, on the embedded pair with its draft; half of them greedy, half sampled with a
seed. Every answer is checked with the `jsonschema` package. Then the same chats as plain text, as
long each as the bound answer was: tau of both, and the time of a step of both.

The tree is pinned: a step verifies as many nodes with a grammar as without. The time of a step is
the time between two messages of one stream while the others run, and the target's own measurement
of a step, prefill among them; both without the short run that warms up.

    pip install 'slipstream[eval]'
    python -m benchmarks.structured --out benchmarks/results/structured.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.speed import scrape
from benchmarks.stack import Stack, machine, save, stack
from slipstream.cli.client import CHAT, Answer, ask, client

Schema = dict[str, Any]

STREAMS = 8
SLICE = 40  # requests
MOST = 512  # tokens: far more than the longest answer that a schema allows is likely to need
TREE = ("--tree", "top2gap", "--width", "4", "--budget", "16")
SUBJECTS = (
    *("a lighthouse on an island", "a small bakery", "an old bicycle", "the city of Lisbon"),
    *("a robot that sorts letters", "a garden in winter", "a jazz concert", "a mountain railway"),
    *("a school library", "the planet Mars"),
)


def text(most: int = 24) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def word(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def several(items: Schema, least: int = 1, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(**fields: Schema) -> Schema:
    """An object of exactly these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def optional(schema: Schema, **fields: Schema) -> Schema:
    """`schema` with fields that may be left out."""
    return schema | {"properties": schema["properties"] | fields}


YES = {"type": "boolean"}
POINT = record(x=whole(-90, 90), y=whole(-180, 180))
PERSON = record(name=text(), age=whole(1, 120))
TREE_OF_PARTS = {
    **record(name=text(16), parts=several({"$ref": "#/$defs/part"}, 0, 2)),
    "$defs": {"part": record(name=text(16), price=whole(0, 999))},
}

SCHEMAS: dict[str, Schema] = {
    "flat": record(name=text(), count=whole(0, 1000), open=YES),
    "text only": record(summary=text(64)),
    "list of texts": record(tags=several(text(12), 2, 4)),
    "list of numbers": record(scores=several(whole(0, 10), 3, 5)),
    "enumeration": record(mood=one_of("calm", "busy", "sad", "happy"), level=one_of(1, 2, 3)),
    "constant": record(kind={"const": "place"}, title=text()),
    "nested": record(title=text(), owner=PERSON),
    "list of objects": record(people=several(PERSON, 1, 3)),
    "point": record(name=text(16), where=POINT),
    "points": several(POINT, 1, 3),
    "optional": optional(record(name=text()), note=text(32), year=whole(1000, 2100)),
    "nullable": record(name=text(), closed={"anyOf": [whole(0, 24), {"type": "null"}]}),
    "either": {"anyOf": [record(error=text(32)), record(result=text(32), sure=YES)]},
    "pattern": record(code=word("[A-Z]{2}-[0-9]{3}"), price=word(r"[0-9]{1,3}\.[0-9]{2}")),
    "date": record(day=word("20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"), what=text()),
    "defined parts": TREE_OF_PARTS,
    "pair": {"type": "array", "prefixItems": [text(), whole(0, 9)], "items": False, "minItems": 2},
    "deep": record(a=record(b=record(c=record(d=text(16))))),
    "switches": record(water=YES, food=YES, music=YES, parking=YES, pets=YES),
    "report": record(
        title=text(32), points=several(record(text=text(32), weight=whole(1, 5)), 1, 3), final=YES
    ),
}


@dataclass(frozen=True)
class Chat:
    """One request; `max_tokens` and no schema: plain text of that length."""

    name: str
    subject: str
    seed: int | None
    schema: Schema | None = None
    max_tokens: int = MOST

    @property
    def body(self) -> dict[str, Any]:
        """A streamed chat whose last message tells what drafting did."""
        content = f"Describe {self.subject} as JSON. The form: {self.name}."
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": 0 if self.seed is None else 0.8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculative": {"stats": True},
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.schema is None:
            return body | {"ignore_eos": True}
        spec = {"name": "answer", "strict": True, "schema": self.schema}
        return body | {"response_format": {"type": "json_schema", "json_schema": spec}}


def chats(count: int) -> list[Chat]:
    """`count` requests, schema by schema; of each two neighbours one is greedy."""
    names = list(SCHEMAS)
    found = []
    for i in range(count):
        name, lap = names[i % len(names)], i // len(names)
        seed = None if (i + lap) % 2 == 0 else 100 + i
        found.append(Chat(name, SUBJECTS[lap % len(SUBJECTS)], seed, SCHEMAS[name]))
    return found


def plain(chats: Sequence[Chat], answers: Sequence[Answer]) -> list[Chat]:
    """The same requests without a schema, as many tokens each."""
    return [
        Chat(chat.name, chat.subject, chat.seed, None, max(2, answer.tokens))
        for chat, answer in zip(chats, answers, strict=True)
    ]


async def run(url: str, chats: Sequence[Chat], streams: int) -> list[Answer]:
    """All of them, `streams` at once, answers in order."""
    gate = asyncio.Semaphore(streams)
    async with client(url, streams) as http:

        async def one(chat: Chat) -> Answer:
            async with gate:
                return await ask(http, CHAT, chat.body)

        return await asyncio.gather(*map(one, chats))


def fault(chat: Chat, answer: Answer) -> str | None:
    """What is wrong with an answer."""
    if answer.finish != "stop":
        return f"finish_reason {answer.finish}"
    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return f"no JSON: {error}"
    assert chat.schema is not None
    found = next(Draft202012Validator(chat.schema).iter_errors(value), None)
    return None if found is None else str(found.message)


def tau(answers: Sequence[Answer]) -> float:
    """(tokens - 1) / steps, summed over answers."""
    return round(sum(a.tokens - 1 for a in answers) / max(1, sum(a.steps for a in answers)), 3)


@dataclass(frozen=True)
class Measured:
    """Answers to some requests; `spent`: what the stack counted meanwhile."""

    answers: list[Answer]
    seconds: float
    spent: dict[str, float]


def measure(running: Stack, chats: Sequence[Chat], streams: int) -> Measured:
    url = f"http://127.0.0.1:{running.http_port}"
    before, began = scrape(running), time.perf_counter()
    answers = asyncio.run(run(url, chats, streams))
    seconds, after = time.perf_counter() - began, scrape(running)
    return Measured(answers, seconds, {name: after[name] - before[name] for name in after})


def in_turn(
    running: Stack, chats: Sequence[Chat], streams: int
) -> tuple[list[Measured], list[Measured]]:
    """With grammar and as plain text, slice by slice: the machine's mood hits both."""
    bound, free = [], []
    for start in range(0, len(chats), SLICE):
        some = chats[start : start + SLICE]
        bound.append(measure(running, some, streams))
        free.append(measure(running, plain(some, bound[-1].answers), streams))
    return bound, free


def answers_of(runs: Sequence[Measured]) -> list[Answer]:
    return [answer for one in runs for answer in one.answers]


def figures(runs: Sequence[Measured]) -> dict[str, Any]:
    """What the requests of some runs have in common."""
    answers = answers_of(runs)
    spent = {name: sum(one.spent[name] for one in runs) for name in runs[0].spent}
    gaps = sorted(1e3 * gap for answer in answers for gap in answer.gaps)
    nodes = [n for answer in answers for n in answer.nodes]
    tokens, steps = sum(a.tokens for a in answers), spent["decode_steps"] + spent["prefill_steps"]
    return {
        "tokens": tokens,
        "tokens_s": round(tokens / sum(one.seconds for one in runs), 1),
        "tau": tau(answers),
        "steps_of_answers": sum(a.steps for a in answers),
        "nodes_per_step": round(statistics.mean(nodes), 2) if nodes else None,
        "gap_ms_median": round(statistics.median(gaps), 2) if gaps else None,
        "gap_ms_p90": round(gaps[int(0.9 * len(gaps))], 2) if gaps else None,
        "target_ms_per_step": round(1e3 * spent["computed"] / max(1.0, steps), 2),
        "decode_steps": int(spent["decode_steps"]),
        "prefill_steps": int(spent["prefill_steps"]),
    }


def by_temperature(chats: Sequence[Chat], answers: Sequence[Answer]) -> dict[str, float]:
    """tau of the greedy answers, and of the sampled ones."""
    pairs = list(zip(chats, answers, strict=True))
    return {
        "greedy": tau([a for chat, a in pairs if chat.seed is None]),
        "temperature 0.8": tau([a for chat, a in pairs if chat.seed is not None]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--alone", type=int, default=20, help="requests one at a time")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft", default="jetspec")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    asked = chats(args.requests)
    alone = asked[: args.alone]
    options = ["--draft", args.draft, "--dtype", args.dtype, *TREE]
    with stack(*options, "--max-model-len", "1024", "--slots", str(STREAMS)) as running:
        warm = measure(running, chats(STREAMS), STREAMS)
        measure(running, plain(chats(STREAMS), warm.answers), STREAMS)
        bound, free = in_turn(running, asked, STREAMS)
        bound_1, free_1 = in_turn(running, alone, 1)
    answers = answers_of(bound)
    faults = [
        {"schema": chat.name, "subject": chat.subject, "seed": chat.seed, "fault": found}
        | {"text": answer.text}
        for chat, answer in zip(asked, answers, strict=True)
        if (found := fault(chat, answer)) is not None
    ]
    result: dict[str, Any] = {
        "tree": " ".join(TREE),
        "requests": len(asked),
        "schemas": len({chat.name for chat in asked}),
        "valid": len(asked) - len(faults),
        "faults": faults,
        "different_texts": len({answer.text for answer in answers}),
        "tau_with_grammar": by_temperature(asked, answers),
        "tau_without": by_temperature(asked, answers_of(free)),
        "streams": STREAMS,
        "with_grammar": figures(bound),
        "without": figures(free),
        "with_grammar_alone": figures(bound_1),
        "without_alone": figures(free_1),
    }
    result["machine"] = machine()
    for package in ("llguidance", "jsonschema"):
        result["machine"]["versions"][package] = metadata.version(package)
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))
    if args.out is not None:
        save(args.out, result)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
