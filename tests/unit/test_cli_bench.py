"""bench: prompt files, the client, the figures, and the whole command against a fake gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli import bench, prompts, report
from slipstream.cli.client import CHAT, Answer, Options, RequestFailed, ask, chat_body, client
from slipstream.cli.prompts import Conversation
from slipstream.errors import ConfigError
from tests.fakes.rest import FakeRest, fake_rest


@pytest.fixture
def rest() -> Iterator[FakeRest]:
    with fake_rest() as server:
        yield server


def answer(tokens: int, accepted: list[int], nodes: list[int], times: list[float]) -> Answer:
    return Answer(
        sent=0.0,
        finish="stop",
        tokens=tokens,
        steps=len(accepted),
        accepted=accepted,
        nodes=nodes,
        chunk_times=times,
    )


def test_percentiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert report.percentile(values, 50) == 2.5
    assert report.percentile(values, 0) == 1.0
    assert report.percentile(values, 100) == 4.0
    assert report.percentile([7.0], 99) == 7.0
    assert report.percentile([], 50) is None


def test_figures_of_a_run() -> None:
    first = answer(10, [2, 0, 4], [16, 1, 16], [0.1, 0.2, 1.0])
    second = answer(3, [1], [16], [0.3])
    run = report.Run(2, 2.0, [first, second], ["HTTP 400: no"])
    summary = run.summary()
    assert summary["output_tok_s"] == 6.5
    assert summary["tau"] == round((9 + 2) / 4, 3)
    assert summary["tau_mean_of_answers"] == 2.5
    assert summary["accepted_histogram"] == {"0": 1, "1": 1, "2": 1, "4": 1}
    # The step of one node drafted nothing and says nothing about acceptance.
    assert summary["acceptance_by_depth"] == [1.0, 0.6667, 0.3333, 0.3333]
    assert summary["ttft_ms"]["p50"] == 200.0
    assert summary["time_per_token_ms"]["p50"] == 100.0  # of the only answer with two chunks
    assert (summary["requests"], summary["errors"]) == (3, 1)
    assert first.gaps == pytest.approx([0.1, 0.8])


def test_an_answer_without_a_step_has_no_tau() -> None:
    summary = report.Run(1, 1.0, [answer(1, [], [], [0.1])], []).summary()
    assert summary["tau"] is None
    assert summary["time_per_token_ms"]["p50"] is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: unexpected end"),
        ("[]", "line 2: want a JSON object"),
        ('{"id": 1}', "has none of prompt, turns, messages, prompt_ids"),
        ('{"prompt": ""}', "prompt: want a str"),
        ('{"prompt_ids": ["a"]}', "prompt_ids: want a list of integers"),
        ('{"turns": [1]}', "turns: want a list of strings"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "last one must be the user's"),
        ('{"messages": ["x"]}', "want objects with role and content"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        prompts.load(path)


def test_rows_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    dialogue = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"prompt_ids": [1, 2]}, {"messages": dialogue}]
    path.write_text("\n".join(map(json.dumps, rows)))
    loaded = prompts.load(path)
    assert loaded[0] == Conversation("1", turns=["a"])
    assert loaded[1] == Conversation("2", turns=["b", "c"])
    assert loaded[2] == Conversation("3", prompt=[1, 2])
    assert loaded[3] == Conversation("4", messages=dialogue[:1], turns=["u"])
    assert prompts.load(path, "completions", 1) == [Conversation("1", prompt="a")]
    with pytest.raises(ConfigError, match="line 3: prompt_ids cannot go to the chat endpoint"):
        prompts.load(path, "chat")
    with pytest.raises(ConfigError, match="line 4: messages cannot go to the completions endpoint"):
        prompts.load(path, "completions")


def test_the_bundled_prompts_are_ten() -> None:
    rows = prompts.load(prompts.BUNDLED)
    assert len(rows) == len({row.turns[0] for row in rows}) == 10


@pytest.mark.anyio
async def test_an_answer_is_read_chunk_by_chunk(rest: FakeRest) -> None:
    rest.pause_s = 0.01
    seen: list[str] = []
    body = chat_body([{"role": "user", "content": "hi"}], Options(max_tokens=5, seed=3))
    async with client(rest.url) as http:
        got = await ask(http, CHAT, body, seen.append)
    assert seen == [f"w{n} " for n in range(5)]
    assert got.text == "".join(seen)
    assert (got.tokens, got.prompt_tokens, got.steps, got.finish) == (10, 7, 3, "stop")
    assert got.tau == 3.0
    assert got.ttft is not None and got.chunk_times == sorted(got.chunk_times)
    assert got.chunk_times[-1] - got.chunk_times[0] >= 0.03
    assert rest.bodies[0][1]["seed"] == 3
    assert "temperature" not in rest.bodies[0][1]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "said"), [("fail", "HTTP 400: messages: not today"), ("break", "target lost")]
)
async def test_refusals_are_told(rest: FakeRest, text: str, said: str) -> None:
    async with client(rest.url) as http:
        with pytest.raises(RequestFailed, match=said):
            await ask(http, CHAT, chat_body([{"role": "user", "content": text}], Options()))


@pytest.mark.anyio
async def test_runs_keep_their_concurrency(rest: FakeRest) -> None:
    rest.pause_s = 0.02
    rows = [Conversation(str(n), turns=[f"question {n}", "and then?"]) for n in range(6)]
    async with client(rest.url, 3) as http:
        run = await bench.run_all(http, rows, 3, Options())
    assert (len(run.answers), run.errors, rest.most) == (12, [], 3)
    second = [body["messages"] for _, body in rest.bodies if len(body["messages"]) == 3]
    assert len(second) == 6
    assert second[0][1] == {"role": "assistant", "content": run.answers[0].text}


def test_the_command(rest: FakeRest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    rows = [{"prompt": "one"}, {"prompt_ids": [4, 2]}, {"prompt": bench.WARMUP.format(2)}]
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = [f"--url={rest.url}", f"--prompts={path}", f"--out={out}", "--concurrency=1,2"]
    assert bench.main([*argv, "--no-draft", "--max-tokens=9"]) == 0
    shown = capsys.readouterr()
    result = json.loads(out.read_text())
    assert shown.out.rstrip().endswith(out.read_text().rstrip())
    assert "throughput and latency" in shown.out
    assert [run["concurrency"] for run in result["runs"]] == [1, 2]
    assert [run["output_tokens"] for run in result["runs"]] == [30, 30]
    assert (result["model"], result["draft"], result["rows"]) == ("fake-model", False, 3)
    assert result["client"]["cpu"] and result["client"]["versions"]["slipstream"]
    warm, measured = rest.bodies[:3], rest.bodies[3:]
    assert "3 warm-up requests" in shown.err  # the fourth text is one of the measured
    asked = [body.get("prompt") or body["messages"][-1]["content"] for _, body in measured]
    assert not {body["messages"][-1]["content"] for _, body in warm} & {str(a) for a in asked}
    assert [body["speculative"]["enabled"] for _, body in measured] == [False] * 6
    assert {body["max_tokens"] for _, body in measured} == {9}
    assert ("/v1/completions", [4, 2]) in [(where, body.get("prompt")) for where, body in measured]


def test_failures_are_counted(
    rest: FakeRest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    path.write_text('{"prompt": "fine"}\n{"prompt": "fail"}\n{"prompt": "break"}\n')
    assert bench.main([f"--url={rest.url}", f"--prompts={path}", f"--out={out}"]) == 1
    [run] = json.loads(out.read_text())["runs"]
    assert (run["requests"], run["errors"]) == (3, 2)
    assert run["error_messages"] == ["HTTP 400: messages: not today", "target lost"]


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["--prompts=/nowhere"], 2, "error: --prompts: /nowhere: No such file"),
        (["--concurrency=0"], 2, "error: --concurrency: .*got '0'"),
        (["--out=/no/such/folder/x"], 2, "error: --out: no folder /no/such/folder"),
        (["--url=http://127.0.0.1:9"], 1, "error: http://127.0.0.1:9: "),
    ],
)
def test_bad_input(
    argv: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(argv) == status
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(said, line)
