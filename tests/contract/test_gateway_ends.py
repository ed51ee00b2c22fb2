"""Where an answer ends: a stop string, a stop token, the end token and the limit at every index of
the runs that a draft gives, alone and together, against plain decoding.

Both doors, the real scheduler, and the fake servers behind real streams: their tokens are a hash of
position and token before, so that text, ids and log-probabilities are known without them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.checkpoint import Checkpoint
from gateway.scheduler import Scheduler
from gateway.server import Front
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from tests.contract.test_cell_contract import Cell
from tests.fakes.draft import FakeDraftRunner
from tests.fakes.front import both
from tests.fakes.target import FakeTargetRunner, expected_output
from tests.tiny import EOS, make_tokenizer

pytestmark = pytest.mark.anyio

VOCAB = 320
BLOCK = 8
MOST = 40
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Ends:
    """What may end an answer."""

    max_tokens: int = MOST
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False

    def body(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name in self.__dataclass_fields__
            for value in (getattr(self, name),)
        }


def plain(prompt: list[int], ends: Ends, tokenizer: Tokenizer) -> tuple[str, list[int], str]:
    """Text, ids and reason of plain decoding, token by token, all text decoded anew each time."""
    stop_ids = {*ends.stop_token_ids, *(() if ends.ignore_eos else (EOS,))}
    limit = len(prompt) + ends.max_tokens
    ids = expected_output(prompt, limit, VOCAB, stop_ids, ends.min_tokens)
    stopped = ids[-1] in stop_ids and len(ids) > ends.min_tokens
    keep = ends.include_stop_str_in_output
    before = 0
    for count in range(1, len(ids) + 1):
        last = count == len(ids)
        shown = ids[: count - 1] if last and stopped and not keep else ids[:count]
        text = tokenizer.decode(shown)
        final = text if last else text.rstrip(BROKEN)
        found = [
            (end, -len(stop), stop)
            for stop in ends.stop
            for end in range(before + 1, len(final) + 1)
            if final[:end].endswith(stop)
        ]
        # The end token's own step shows no text: what ends there is what was held back.
        if found and len(shown) > ends.min_tokens:
            end, _, stop = min(found)
            return text[: end if keep else end - len(stop)], ids[:count], "stop"
        before = max(before, len(final))
    return tokenizer.decode(shown), ids, "stop" if stopped else "length"


@asynccontextmanager
async def front(folder: Path, cell: Cell) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    settings = GatewaySettings(
        target=cell.target, draft=cell.draft, port=0, pin_nodes=True, max_queue=1000
    )
    checkpoint = Checkpoint.load(folder)
    made = Front(settings, checkpoint, lambda deliver: Scheduler(settings.scheduler(), deliver))
    await made.start()
    try:
        await made.until_ready()
        url = f"http://{made.http}"
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=60, limits=limits
        ) as http:
            yield made, http
    finally:
        await made.stop(0.0)


@pytest.fixture
def cell() -> Any:
    target = FakeTargetRunner(vocab=VOCAB, eos_ids=(EOS,), paranoid=False)
    draft = FakeDraftRunner(vocab=VOCAB, block_size=BLOCK, slots=8, accept=0.85)
    with Cell(target, draft) as made:
        yield made


async def check(http: httpx.AsyncClient, tokenizer: Tokenizer, prompt: list[int], e: Ends) -> int:
    """One request, whole and streamed; the most tokens that one step gave."""
    text, ids, reason = plain(prompt, e, tokenizer)
    body = {"prompt": prompt, "logprobs": 1, "return_token_ids": True, "temperature": 0}
    body |= e.body() | {"speculative": {"stats": True}}
    whole = await both(http, "/v1/completions", body)
    (choice,) = whole["choices"]
    told = (choice["text"], choice["token_ids"], choice["finish_reason"])
    assert told == (text, ids, reason), (prompt, e)
    assert choice["logprobs"]["token_logprobs"] == [-float(token) for token in ids]
    assert whole["usage"]["completion_tokens"] == len(ids)
    return 1 + max(whole["speculative"]["accepted"], default=0)


def ending_at(index: int) -> list[int]:
    """A prompt whose answer has the end token at `index`, counted from 0, and not before."""
    for seed in itertools.count():
        dice = random.Random(1000 * index + seed)
        prompt = [dice.randrange(4, VOCAB) for _ in range(dice.randint(1, 99))]
        if len(expected_output(prompt, len(prompt) + index + 1, VOCAB, {EOS})) != index + 1:
            continue
        if expected_output(prompt, len(prompt) + index + 1, VOCAB)[index] == EOS:
            return prompt
    raise AssertionError


def places(prompt: list[int], index: int, tokenizer: Tokenizer) -> list[Ends]:
    """Every end at `index`, alone and with others, there or one token before or after."""
    dice = random.Random(index)
    ids = expected_output(prompt, len(prompt) + MOST, VOCAB)
    text = tokenizer.decode(ids[: index + 1])
    start = len(tokenizer.decode(ids[:index]).rstrip(BROKEN))
    stops = tuple({text[max(0, start - n) : start + 1].strip(BROKEN) or "!" for n in (0, 2)})
    near = [min(max(index + shift, 0), MOST - 2) for shift in (-1, 0, 1)]
    found = [
        Ends(),
        Ends(min_tokens=index + 1),
        Ends(ignore_eos=True),
        Ends(ignore_eos=True, max_tokens=index + 1),
        Ends(ignore_eos=True, stop_token_ids=(ids[index],)),
        Ends(ignore_eos=True, stop=stops),
        Ends(ignore_eos=True, stop=stops, min_tokens=index),
        Ends(ignore_eos=True, stop=stops, min_tokens=index + 1),
    ]
    for _ in range(4):
        found.append(
            Ends(
                max_tokens=dice.choice(near) + 1,
                ignore_eos=dice.random() < 0.5,
                stop=stops if dice.random() < 0.6 else (),
                stop_token_ids=(ids[dice.choice(near)],) if dice.random() < 0.6 else (),
                include_stop_str_in_output=dice.random() < 0.5,
            )
        )
    return found


async def test_every_end_at_every_index(tmp_path: Path, cell: Cell) -> None:
    make_tokenizer(tmp_path, VOCAB)
    tokenizer = Tokenizer.load(tmp_path)
    cases = []
    for index in range(2 * BLOCK + 2):
        prompt = ending_at(index)
        cases += [(prompt, ends) for ends in places(prompt, index, tokenizer)]
    async with front(tmp_path, cell) as (made, http):
        runs = await asyncio.gather(*(check(http, tokenizer, *case) for case in cases))
        assert max(runs) == BLOCK and sum(run > 2 for run in runs) > len(runs) // 2
        async with asyncio.timeout(5):
            while made.scheduler.snapshot().running:  # noqa: ASYNC110 - another thread changes it
                await asyncio.sleep(0.01)
        now = made.scheduler.snapshot()
        assert now.free_pages == now.pages
    tokenizer.close()


async def test_what_the_request_asks_of_its_own_tree(tmp_path: Path, cell: Cell) -> None:
    make_tokenizer(tmp_path, VOCAB)
    async with front(tmp_path, cell) as (_, http):
        body = {"prompt": [7, 9, 11], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        texts, nodes = set(), []
        for tree in ({}, {"width": 1}, {"budget": 12}, {"enabled": False}):
            asked = body | {"speculative": {"stats": True, **tree}}
            whole = (await http.post("/v1/completions", json=asked)).json()
            texts.add(whole["choices"][0]["text"])
            nodes.append(max(whole["speculative"]["nodes"]))
        assert len(texts) == 1
        assert nodes[0] > 12 and nodes[1:] == [BLOCK, 12, 1]
        for tree, param in (({"budget": 3}, "budget"), ({"width": 99}, "width")):
            response = await http.post("/v1/completions", json=body | {"speculative": tree})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == f"speculative.{param}"


async def test_bad_words_are_not_said(tmp_path: Path, cell: Cell) -> None:
    make_tokenizer(tmp_path, VOCAB)
    async with front(tmp_path, cell) as (_, http):
        vocabulary = Checkpoint.load(tmp_path).tokenizer.vocabulary
        body = {"prompt": [7, 9, 11], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        free = (await http.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
        banned = next(token for token in free if vocabulary.name(token).isalpha())
        body |= {"bad_words": [vocabulary.name(banned)]}
        bound = (await http.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
        assert banned not in bound and bound != free


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 500])
@pytest.mark.parametrize("limit", [0, 5])
async def test_a_prompt_is_scored_across_its_chunks(
    tmp_path: Path, cell: Cell, length: int, limit: int
) -> None:
    make_tokenizer(tmp_path, VOCAB)
    prompt = [random.Random(length).randrange(4, VOCAB) for _ in range(length)]
    body = {"prompt": [prompt, prompt[::-1]], "max_tokens": limit, "n": 2, "ignore_eos": True}
    async with front(tmp_path, cell) as (_, http):
        asked = body | {"echo": True, "logprobs": 1, "temperature": 0}
        whole = await both(http, "/v1/completions", asked)
        assert len(whole["choices"]) == 4
        for choice in whole["choices"]:
            ids = body["prompt"][choice["index"] // 2]
            output = expected_output(ids, length + limit, VOCAB)
            scores = choice["logprobs"]["token_logprobs"]
            assert scores == [None, *(-float(token) for token in [*ids[1:], *output])]
        assert whole["usage"]["prompt_tokens"] == 2 * length
        assert whole["usage"]["completion_tokens"] == 4 * limit
