"""Requests made from the served OpenAPI schema: the server answers all of them, and lives on.

A random body, whether the schema allows it or not, is nearly always refused. So most of them get
what a model can answer: a few fields, with values from `SENSIBLE`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.tiny import make_tokenizer

LIMIT_S = 30.0
"""Most seconds of one request."""

MOST_EVENTS = 1_000_000  # streams are read to their end
PROBE = {"prompt": "once upon a time", "max_tokens": 12, "temperature": 0}
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "maxLength": 4}}},
    {"type": "string", "pattern": "^(a|b)+$"},
    {"not": {}},
    {},
]
SENSIBLE: Mapping[str, Sequence[Any]] = {
    "messages": [
        [USER],
        [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, USER],
        [USER, {"role": "assistant", "content": "It is"}],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        [USER, {"role": "assistant"}, {"role": "user", "content": [{"type": "image_url"}]}],
    ],
    "prompt": ["once", ["once", "\ud83d\ude00 é"], [5, 6, 7], [[5], [6, 7]], "x" * 300, "\0"],
    "tokens": [[], [5, 6, 7], [319], [320], [200] * 50],
    "tools": [[WEATHER], []],
    "tool_choice": [
        "auto", "none", "required", {"type": "function", "function": {"name": "weather"}},
    ],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": {"name": "n", "schema": s}} for s in SCHEMAS),
    ],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"json": SCHEMAS[0]}],
    "guided_json": [*SCHEMAS, json.dumps(SCHEMAS[0]), "{"],
    "guided_regex": ["a+", "(", "(a|b){1,20}"],
    "guided_choice": [["a", "bc"], [""]],
    "guided_grammar": ['start: "a"+', "start: x"],
    "logit_bias": [{"5": 3}, {"6": -100, "7": 100}, {"320": 1}],
    "bad_words": [["a"], ["b", " c"]],
    "stop": ["a", ["b", "zz"]],
    "stop_token_ids": [[], [5], [7, 9]],
    "max_tokens": [1, 7, 40, None],
    "max_completion_tokens": [1, 40],
    "min_tokens": [0, 1, 5],
    "n": [1, 2, 5],
    "best_of": [1, 2],
    "logprobs": [0, 3, 20, True, False],
    "top_logprobs": [0, 2],
    "prompt_logprobs": [0, 2],
    "stream_options": [{"include_usage": True}, {}],
    "chat_template_kwargs": [{}, {"enable_thinking": False}, {"messages": []}],
    "speculative": [{"stats": True}, {"enabled": False}, {"width": 1, "budget": 4}, {"budget": 1}],
}  # fmt: skip
BODIES = {
    "/v1/completions": ("CompletionBody", "prompt"),
    "/v1/chat/completions": ("ChatBody", "messages"),
    "/tokenize": ("TokenizeChatBody", "messages"),
    "/detokenize": ("DetokenizeBody", "tokens"),
}
"""Each path's body, and the field that it needs."""


@st.composite
def answerable(draw: st.DrawFn, schema: Any, generated: st.SearchStrategy[Case]) -> Case:
    """A generated case with few fields, most of them with sensible values."""
    case = draw(generated)
    body = case.body if isinstance(case.body, dict) else {}
    component, needed = BODIES[case.operation.path]
    known = schema.raw_schema["components"]["schemas"][component]["properties"]
    names = sorted(name for name in known if name in SENSIBLE or name in body and name != "model")
    kept = {needed, *draw(st.lists(st.sampled_from(names), max_size=3, unique=True))}
    case.body = {
        name: draw(st.sampled_from(SENSIBLE[name])) if name in SENSIBLE else body[name]
        for name in sorted(kept)
    }
    if "stream_options" in kept:
        case.body["stream"] = True
    return case


def cases(schema: Any) -> st.SearchStrategy[Case]:
    """All that is sent."""
    posts = schema.include(method="POST")
    allowed = posts.as_strategy(generation_mode=GenerationMode.POSITIVE)
    doors = schema.include(path_regex="completions$")
    answers = answerable(schema, doors.as_strategy(generation_mode=GenerationMode.POSITIVE))
    return st.one_of(
        answers,
        answers,
        answers,
        answerable(schema, allowed),
        schema.as_strategy(generation_mode=GenerationMode.POSITIVE),
        posts.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )


@dataclass
class Served:
    """A running gateway, and what it wrote to its log.

    Attributes:
        answers: how often each status came back, by method and path.
    """

    process: subprocess.Popen[str]
    url: str
    log: Path
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.search(rf"^\w*{name} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def probe(self) -> Any:
        """What is said to a request that is always the same."""
        response = httpx.post(
            f"{self.url}/v1/completions", json=PROBE, timeout=LIMIT_S, trust_env=False
        )
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    def send(self, case: Case) -> None:
        """Sends a case and checks what comes back."""
        begun = time.monotonic()
        response = case.call(base_url=self.url, timeout=LIMIT_S)
        taken = time.monotonic() - begun
        status = response.status_code
        self.answers[case.operation.label, status] += 1
        told = f"{status} after {taken:.1f} s: {case.as_curl_command()}\n{response.text[-2000:]}"
        assert taken < LIMIT_S, told
        assert status < 500 or status == 503, told
        assert self.process.poll() is None, told
        if "text/event-stream" in str(response.headers["content-type"]):
            assert response.text.endswith("data: [DONE]\n\n"), told
            assert '{"error":' not in response.text, told
            return
        case.validate_response(response, checks=CHECKS)


@contextmanager
def process(
    log: Path, module: str, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A process that has said READY, and what it said with it."""
    command = [sys.executable, "-m", module, *flags]
    with log.open("a") as lines:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines, text=True)
    try:
        assert child.stdout is not None
        word, _, data = child.stdout.readline().partition(" ")
        assert word == "READY", log.read_text()
        yield child, json.loads(data)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def attack(served: Served, count: int) -> None:
    """`count` cases, and the same server before and after."""
    config = schemathesis.Config.from_dict({"max-stream-events": MOST_EVENTS})
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", config=config)

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(cases(schema))
    def send(case: Case) -> None:
        served.send(case)

    served.answers.clear()
    before = served.probe()
    send()
    deadline = time.monotonic() + LIMIT_S
    while served.metric("running_slots") + served.metric("queue_length"):
        assert time.monotonic() < deadline, "requests that nobody waits for still run"
        time.sleep(0.05)
    assert served.probe() == before
    assert served.metric("free_pages") == served.metric("pages")
    assert httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200
    assert "Traceback" not in served.log.read_text(), served.log.read_text()[-4000:]
    told = sorted(served.answers.items())
    print("\n".join(f"{n:5} {label} {status}" for (label, status), n in told))
    assert served.answers.total() >= count
    answered = sum(n for (label, status), n in told if "completions" in label and status == 200)
    assert answered >= count / 12


@pytest.fixture(scope="module")
def on_fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    log = folder / "log"
    flags = ("--tokenizer", str(folder), "--port", "0", "--log-level", "warning")
    with process(log, "tests.fakes.whole", *flags) as (child, ready):
        yield Served(child, f"http://{ready['http']}", log)


def test_some_cases(on_fakes: Served) -> None:
    attack(on_fakes, 100)


@pytest.mark.slow
def test_many_cases(on_fakes: Served) -> None:
    attack(on_fakes, 2000)


@pytest.mark.slow
def test_the_embedded_pair(tmp_path: Path) -> None:
    model = ("--model", "smollm2-135m-instruct", "--draft", "jetspec")
    common = (*model, "--dtype", "float32", "--slots", "8", "--port", "0", "--no-warmup")
    log = tmp_path / "log"
    with (
        process(log, "services.target", *common, "--max-model-len", "512") as (_, target),
        process(log, "services.draft", *common) as (_, draft),
        process(
            log,
            "gateway",
            *("--target", target["grpc"], "--draft", draft["grpc"], "--port", "0"),
            *("--tokenizer", "smollm2-135m-instruct", "--log-level", "warning"),
            *("--max-output-tokens", "16"),
        ) as (child, ready),
    ):
        attack(Served(child, f"http://{ready['http']}", log), 50)
