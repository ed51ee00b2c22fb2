"""How few tokens a text can have: never more than it has, whatever the tokenizer is made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.lengths import COMPOSED, NO_BOUND, TokenBound, read
from gateway.vocabulary import BYTE_LETTERS

WORDS = ("Ġth", "ing", "aaaa", "ĠĠĠĠĠĠĠĠ")


def byte_level(
    *,
    without: bytes = b"",
    normalizer: object = None,
    added: Sequence[AddedToken] = (),
    **more: str,
) -> Tokenizer:
    letters = [letter for letter, byte in BYTE_LETTERS.items() if byte not in without]
    merges, pieces = [], list(letters)
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            pieces.append(word[:end])
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *more.values()]))}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), **more))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.add_tokens(list(added))
    return raw


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "▁aa", "漢"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁a", "a")]
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return raw


def split(behavior: str) -> Tokenizer:
    raw = byte_level()
    parts = [
        pre_tokenizers.Split(Regex(r"\s+"), behavior),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    raw.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return raw


BOUNDED = {
    "plain": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "marks": byte_level(added=[AddedToken("<|a long special mark|>", special=True)]),
    "strips": byte_level(added=[AddedToken("<m>", lstrip=True, rstrip=True, normalized=False)]),
    "some bytes missing": byte_level(without=bytes([4, 0xF1, 0xFF])),
    "bytes no text has missing": byte_level(without=bytes([0xC0, 0xFF])),
    "fallback": byte_fallback(),
    "split": split("isolated"),
}


def without_pre_tokenizer() -> Tokenizer:
    raw = byte_level()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return raw


UNBOUNDED = {
    "white space is dropped": without_pre_tokenizer(),
    "matches are dropped": split("removed"),
    "folded": byte_level(normalizer=normalizers.NFKC()),
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "cut": byte_level(normalizer=normalizers.Replace("aa", "a")),
    "by pattern": byte_level(normalizer=normalizers.Replace(Regex("a+"), "a")),
    "composed, and bytes missing": byte_level(without=b"\x04", normalizer=normalizers.NFC()),
    "unknown is one token": byte_level(without=b"\x04", unk_token="?"),
    "words": Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
}

TEXTS = st.lists(
    st.sampled_from(
        [
            "a",
            "aaaa",
            " thing",
            " ",
            "\n\t",
            "<m>",
            "<|a long special mark|>",
            "\x04",
            "é",
            "e\u0301",
        ]
        + [
            "\u1fbe\u0308\u0301",
            "\u212a",
            "\u1100\u1161\u11a8",
            "漢字",
            "😀",
            "\U00040000",
            "▁",
            "\x85",
        ]
    ),
    max_size=40,
).map("".join) | st.text(max_size=40)


@pytest.mark.parametrize("name", BOUNDED)
def test_never_more_than_there_are(name: str) -> None:
    raw = BOUNDED[name]
    bound = read(raw)
    assert bound.longest > 0

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert bound.least(text) <= len(raw.encode(text).ids)

    check()
    assert bound.least("x" * 10_000) >= 10_000 // (len("<|a long special mark|>") * COMPOSED)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bound_where_text_may_vanish(name: str) -> None:
    assert read(UNBOUNDED[name]) == NO_BOUND
    assert NO_BOUND.least("x" * 10_000) == 0


def test_what_counts() -> None:
    assert TokenBound(4).least("é" * 6) == 3
    assert TokenBound(4).least("a") == 1
    assert TokenBound(4).least("") == 0
    assert TokenBound(4, strips=True).least(" a\n" * 8) == 2
    assert TokenBound(2, dropped=b"\x04").least("a\x04\x04\x04b") == 1
