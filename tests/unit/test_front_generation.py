"""A request's pieces on their way to the client: a backlog becomes one piece per choice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.generation import Bridge, Generation, ShownPrompt, Wishes
from gateway.metrics import FrontMetrics
from gateway.request import Chunk
from gateway.stream import TextStream

pytestmark = pytest.mark.anyio


class Letters:
    """Ids are letters."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in ids)

    def is_silent(self, token: int) -> bool:
        return False


def make(choices: int) -> tuple[Bridge, Generation]:
    bridge = Bridge(asyncio.get_running_loop())
    generation = Generation(
        "id", "model", 3, bridge, lambda _: None, FrontMetrics(), wishes=Wishes(stats=True),
        done=lambda _: None,
    )  # fmt: skip
    for number in range(choices):
        generation.add(
            TextStream(Letters(), None), ShownPrompt((1,)), lambda number=number: 10 + number
        )
    return bridge, generation


async def step(bridge: Bridge, *chunks: tuple[int, Chunk]) -> None:
    bridge.deliver(chunks)
    await asyncio.sleep(0)


async def test_a_reader_that_keeps_up_gets_every_step() -> None:
    bridge, generation = make(1)
    for token in range(3):
        await step(bridge, (10, Chunk((token,), nodes=1)))
        ((choice, piece),) = await generation.next()
        assert (choice.index, piece.text, list(piece.tokens)) == (0, "abc"[token], [token])


async def test_a_backlog_is_one_piece_per_choice() -> None:
    bridge, generation = make(2)
    await step(bridge, (10, Chunk((0, 1), nodes=4, accepted=1)), (11, Chunk((7,), nodes=4)))
    await step(bridge, (11, Chunk((8, 9), finish="length", nodes=4, accepted=1)))
    await step(bridge, (10, Chunk((2,), nodes=4)))
    first, second = await generation.next()
    assert (first[0].index, first[1].text, list(first[1].tokens)) == (0, "abc", [0, 1, 2])
    assert (second[0].index, second[1].text, second[1].finish) == (1, "hij", "length")
    assert first[1].finish is None
    # Statistics stay per step.
    assert generation.choices[0].stats.nodes == [4, 4]
    assert generation.choices[1].stats.accepted == [0, 1]
    await step(bridge, (10, Chunk((3,), finish="stop", nodes=4)))
    ((choice, piece),) = await generation.next()
    assert (choice.finish, piece.text, list(piece.tokens)) == ("stop", "", [3])
    assert await generation.next() == []
