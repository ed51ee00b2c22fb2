"""Single tokens as clients see them, and log-probabilities in OpenAI's shapes."""

from __future__ import annotations

import json
import math

import pytest

from gateway.logprobs import LogprobShape
from gateway.request import TokenLogprob
from gateway.stream import Scored
from tests.unit.test_front_stream import TEXT, byte_level, sentencepiece


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_bytes_of_tokens_join_to_the_text(make) -> None:
    tokenizer = make()
    ids = tokenizer._encode([TEXT], False)[0]
    text = b"".join(map(tokenizer.vocabulary.bytes_of, ids)).decode()
    assert text.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")


def test_names_of_tokens() -> None:
    tokenizer = byte_level()
    name = tokenizer.vocabulary.name
    part = tokenizer._encode(["\U0001f984"], False)[0][0]
    assert name(part) == "bytes:\\xf0\\x9f"
    assert tokenizer.vocabulary.bytes_of(part) == b"\xf0\x9f"
    assert name(tokenizer._encode([" "], False)[0][0]) == " "
    assert (name(1), tokenizer.vocabulary.bytes_of(1)) == ("</s>", b"</s>")
    beyond = tokenizer.vocab_size + 3
    assert (name(beyond), tokenizer.vocabulary.bytes_of(beyond)) == (f"token_id:{beyond}", b"")


class Twins:
    """Two ids to each name."""

    def name(self, token: int) -> str:
        return chr(97 + token // 2)

    def bytes_of(self, token: int) -> bytes:
        return self.name(token).encode()


def test_tokens_that_read_the_same_keep_apart() -> None:
    shape = LogprobShape(Twins(), top=3)
    row = TokenLogprob(-2.5, ((0, -0.5), (2, -1.0), (3, -1.5)))
    found = shape.completion([Scored(1, 0, row)])
    assert found["top_logprobs"] == [{"token_id:0": -0.5, "b": -1.0, "token_id:3": -1.5, "a": -2.5}]
    assert found["token_logprobs"] == [-2.5]
    found = LogprobShape(Twins(), top=1).completion([Scored(1, 0, row)])
    assert found["top_logprobs"] == [{"token_id:0": -0.5, "a": -2.5}]


def test_the_same_number_in_both_places() -> None:
    row = TokenLogprob(-0.1, ((4, -0.10000001), (2, -3.0)))
    for top in (1, 2):
        shape = LogprobShape(Twins(), top)
        (found,) = shape.completion([Scored(4, 0, row)])["top_logprobs"]
        assert found["c"] == -0.1 == max(found.values())
        (entry,) = shape.chat([Scored(4, 0, row)])["content"]
        assert entry["top_logprobs"][0] == {"token": "c", "logprob": -0.1, "bytes": [99]}
        assert len(entry["top_logprobs"]) == top


def test_what_json_cannot_say() -> None:
    row = TokenLogprob(-math.inf, ((0, 0.0), (2, -math.inf)))
    shape = LogprobShape(Twins(), 2)
    rows = [Scored(6, 0, row)]
    for found in (shape.completion(rows), shape.chat(rows), shape.prompt([1, 6], [row])):
        assert "-9999" in json.dumps(found, allow_nan=False)


def test_a_rank_is_told_only_where_it_is_known() -> None:
    row = TokenLogprob(-2.5, ((0, -0.5), (2, -1.0)))
    _, found = LogprobShape(Twins(), 2).prompt([5, 4], [row])
    assert found is not None
    assert [entry.get("rank") for entry in found.values()] == [1, 2, None]
    assert "rank" not in found["4"]
