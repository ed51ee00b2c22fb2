"""Text of a choice: characters cut anywhere, stop strings at every index, ends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from gateway.stops import StopStrings
from gateway.stream import Detokenizer, TextStream
from gateway.tokenizer import Tokenizer

TEXT = (
    "Hello, wörld! 😀👩\u200d👩\u200d👧\u200d👦 漢字かな交じり文, 한국어; "
    "e\u0301 n\u0303 a\u0328\u0301 — عربى हिन्दी 🏳\ufe0f\u200d🌈 done\n\n  indented\ttext  "
)
BROKEN = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Tokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT, "hello world the quick brown fox"], trainer)
    return Tokenizer(raw, {"eos_token": "</s>"})


def sentencepiece() -> Tokenizer:
    """Metaspaces and byte fallback, as older Llama checkpoints have them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [*"▁Helo,wrd!\n", "▁w", "ll"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    raw = RawTokenizer(
        models.BPE(
            vocab, [("▁", "w"), ("l", "l")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(raw, {"eos_token": {"content": "</s>"}})


def cuts(ids: list[int], rng: random.Random, most: int) -> list[list[int]]:
    runs, at = [], 0
    while at < len(ids):
        size = rng.randint(1, most)
        runs.append(ids[at : at + size])
        at += size
    return runs


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_no_half_character_at_any_border(make) -> None:
    tokenizer = make()
    ids = tokenizer._encode([TEXT], False)[0]
    whole = tokenizer.decode(ids)
    assert BROKEN not in whole
    for seed in range(60):
        rng = random.Random(seed)
        stream = Detokenizer(tokenizer)
        text = ""
        for run in cuts(ids, rng, most=1 + seed % 20):
            piece = stream.push(run)
            assert BROKEN not in piece
            text += piece
        assert text + stream.flush() == whole


def test_text_leaves_at_the_token_that_completes_it() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer)
    given = ""
    ids = tokenizer._encode([TEXT], False)[0]
    for count, token in enumerate(ids, 1):
        given += stream.push([token])
        assert given == tokenizer.decode(ids[:count]).rstrip(BROKEN)


def test_special_and_unknown_tokens_show_nothing() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer)
    first, second = (tokenizer._encode([text], False)[0] for text in ("hello", " world"))
    assert stream.push([0, *first]) == "hello"
    assert stream.push([1, 0, tokenizer.vocab_size + 7]) == ""
    assert stream.push(second) == " world"
    assert stream.flush() == ""


def test_random_bytes_end_as_the_decoder_has_them() -> None:
    tokenizer = byte_level()
    for seed in range(40):
        rng = random.Random(seed)
        ids = [rng.randrange(2, tokenizer.vocab_size) for _ in range(rng.randint(1, 300))]
        stream = Detokenizer(tokenizer)
        text = "".join(stream.push(run) for run in cuts(ids, rng, most=9))
        assert text + stream.flush() == tokenizer.decode(ids)


def test_an_endless_run_of_broken_bytes_leaves_and_costs_little() -> None:
    tokenizer = byte_level()
    token = next(
        token for token in range(2, tokenizer.vocab_size) if tokenizer.decode([token]) == BROKEN
    )
    stream = Detokenizer(tokenizer)
    text = ""
    for _ in range(400):
        text += stream.push([token])
        assert len(stream._window) < 160
    assert set(text) == {BROKEN}
    assert text + stream.flush() == BROKEN * 400


def test_an_unfinished_character_at_the_end_is_shown_broken() -> None:
    tokenizer = byte_level()
    ids = tokenizer._encode(["ab\U0001f984"], False)[0]
    stream = TextStream(tokenizer, None)
    assert stream.feed(ids[:-1], None).text == "ab"
    assert stream.feed([], "length").text == BROKEN


class Letters:
    """A decoder whose tokens are the characters themselves."""

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))

    def is_silent(self, token: int) -> bool:
        return False


class Words(Letters):
    """A decoder whose tokens are words of up to three characters."""

    words = ("a", "b", "ab", "ba", "aba", "c", "ca", "bc")

    def decode(self, ids) -> str:
        return "".join(self.words[i] for i in ids)


def run_stream(stream: TextStream, runs, finish="length"):
    text, tokens = "", 0
    for index, run in enumerate(runs):
        piece = stream.feed(run, finish if index == len(runs) - 1 else None)
        text += piece.text
        tokens += len(piece.tokens)
        if piece.finish is not None:
            return text, tokens, piece.finish
    raise AssertionError("no end")


def reference(words: list[str], stops: list[str], min_tokens: int):
    """Character by character: the first stop string to be completed, the longest of several."""
    text = ""
    for count, word in enumerate(words, 1):
        for char in word:
            text += char
            found = [stop for stop in stops if text.endswith(stop)]
            if found and count > min_tokens:
                return text[: -max(map(len, found))], count, "stop"
    return text, len(words), "length"


@pytest.mark.parametrize("size", range(1, 13))
@pytest.mark.parametrize("at", range(12))
def test_a_stop_string_at_every_index_of_a_run(at: int, size: int) -> None:
    text = "x" * at + "STOP" + "y" * 8
    runs = cuts([ord(char) for char in text], random.Random(1), 1)
    ids = [run[0] for run in runs]
    stream = TextStream(Letters(), StopStrings(["STOP"]))
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    assert run_stream(stream, chunks) == ("x" * at, at + 4, "stop")


def test_random_stops_equal_the_reference() -> None:
    decoder = Words()
    for seed in range(600):
        rng = random.Random(seed)
        ids = [rng.randrange(len(decoder.words)) for _ in range(rng.randint(1, 25))]
        stops = [
            "".join(rng.choice("abc") for _ in range(rng.randint(1, 6)))
            for _ in range(rng.randint(1, 4))
        ]
        min_tokens = rng.choice((0, 0, 3, 10))
        expected = reference([decoder.words[i] for i in ids], stops, min_tokens)
        stream = TextStream(decoder, StopStrings(stops), min_tokens)
        assert run_stream(stream, cuts(ids, rng, rng.randint(1, 8))) == expected, seed


def test_what_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    stream = TextStream(Letters(), StopStrings(["abcd", "bcx"]))
    shown = [stream.feed([ord(char)], None).text for char in "zabcabc"]
    assert shown == ["z", "", "", "", "abc", "", ""]
    assert stream.feed([ord("x")], None).finish == "stop"


def test_held_text_is_given_at_the_end() -> None:
    stream = TextStream(Letters(), StopStrings(["STOP"]))
    assert stream.feed([ord(char) for char in "one STO"], None).text == "one "
    end = stream.feed([], "length")
    assert (end.text, end.finish) == ("STO", "length")


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_stop_string_in_the_last_run_wins(finish: str) -> None:
    stream = TextStream(Letters(), StopStrings(["!"]))
    piece = stream.feed([ord(char) for char in "ab!cd"], finish)
    assert (piece.text, len(piece.tokens), piece.finish) == ("ab", 3, "stop")


def test_a_stop_token_counts_and_is_not_shown() -> None:
    for stops in (None, StopStrings(["zz"])):
        stream = TextStream(Letters(), stops)
        piece = stream.feed([ord("a"), ord("b")], "stop")
        assert (piece.text, len(piece.tokens), piece.finish) == ("a", 2, "stop")


def test_stop_strings_do_not_count_within_min_tokens() -> None:
    stream = TextStream(Letters(), StopStrings(["aa"]), min_tokens=3)
    assert run_stream(stream, [[97], [97], [97], [97], [98]]) == ("aa", 4, "stop")


def test_a_stop_string_spans_characters_of_several_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level()
    ids = tokenizer._encode(["say 漢字 now"], False)[0]
    for size in range(1, len(ids) + 1):
        stream = TextStream(tokenizer, StopStrings(["字 n"]))
        runs = [ids[i : i + size] for i in range(0, len(ids), size)]
        text, tokens, finish = run_stream(stream, runs)
        assert (text, finish) == ("say 漢", "stop")
        assert "字 n" in tokenizer.decode(ids[:tokens])
        assert "字 n" not in tokenizer.decode(ids[: tokens - 1])
