"""How few tokens a text can have, known before it is tokenised.

A token stands for no more bytes than the longest of the vocabulary has, so a text has at least its
bytes divided by that. This holds where every byte that counts ends up in some token: not where a
tokenizer drops text, folds it, or has one token for all that it does not know. `read` sees that in
the parts that the tokenizer is made of, and knows no bound where it sees a part it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from gateway.vocabulary import BYTE_LETTERS

COMPOSED = 4
"""Most bytes that NFC makes one of: U+1FBE and two marks, 7 bytes, become U+0390, 2 bytes."""

_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_NEVER = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that no text has


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The bound of one tokenizer.

    Attributes:
        longest: bytes of a text that one token may stand for; 0: no bound is known.
        strips: white space may vanish beside special tokens.
        dropped: bytes that are in no token.
    """

    longest: int
    strips: bool = False
    dropped: bytes = b""

    def least(self, text: str) -> int:
        """A number of tokens that `text` has at least."""
        if self.longest == 0:
            return 0
        counted = "".join(text.split()) if self.strips else text
        return -(-len(counted.encode().translate(None, self.dropped)) // self.longest)


NO_BOUND = TokenBound(0)


def read(raw: RawTokenizer) -> TokenBound:
    """The bound of `raw`."""
    state = json.loads(raw.to_str())
    model, factor = state["model"], _shrinks(state["normalizer"])
    known = model["type"] == "BPE" and not any(
        model.get(part) for part in ("continuing_subword_prefix", "end_of_word_suffix")
    )
    if not (known and factor and _keeps(state["pre_tokenizer"])):
        return NO_BOUND
    vocab: Mapping[str, int] = model["vocab"]
    dropped = _dropped(vocab, bytes_as_letters=_byte_level(state["pre_tokenizer"]), model=model)
    if dropped is None or (dropped and factor > 1):
        return NO_BOUND
    added = state["added_tokens"]
    sizes = [_size(piece) for piece in vocab] + [len(t["content"].encode()) for t in added]
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    return TokenBound(factor * max(sizes), strips, dropped)


def _size(piece: str) -> int:
    """Bytes that a token of the model stands for at most; a byte-level letter is one byte."""
    return len(piece) if all(char in BYTE_LETTERS for char in piece) else len(piece.encode())


def _dropped(
    vocab: Mapping[str, int], *, bytes_as_letters: bool, model: Mapping[str, Any]
) -> bytes | None:
    """The bytes that are in no token; None where that depends on more than the byte."""
    if bytes_as_letters:
        missing = {byte for letter, byte in BYTE_LETTERS.items() if letter not in vocab}
        return None if missing and model.get("unk_token") else bytes(sorted(missing - _NEVER))
    whole = all(f"<0x{byte:02X}>" in vocab for byte in range(256) if byte not in _NEVER)
    return b"" if model.get("byte_fallback") and whole else None


def _parts(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("pretokenizers") or part.get("normalizers") or ()
    return [found for item in inner for found in _parts(item)]


def _byte_level(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return any(item["type"] == "ByteLevel" for item in _parts(pre_tokenizer))


def _keeps(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether it splits without dropping anything."""
    return all(
        item["type"] in _SPLITTERS
        or (item["type"] in ("Split", "Punctuation") and item.get("behavior") != "Removed")
        for item in _parts(pre_tokenizer)
    )


def _shrinks(normalizer: Mapping[str, Any] | None) -> int:
    """How many bytes it makes one of at most; 0: not known."""
    factor = 1
    for item in _parts(normalizer):
        if item["type"] == "NFC":
            factor *= COMPOSED
        elif item["type"] == "Replace":
            pattern = item["pattern"].get("String")
            if not pattern or len(item["content"].encode()) < len(pattern.encode()):
                return 0
        elif item["type"] != "Prepend":
            return 0
    return factor
