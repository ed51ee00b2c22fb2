"""Single tokens as a client may see them: their bytes, and a name for each."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Vocabulary:
    """The tokens of a tokenizer, one by one.

    What a token shows inside a text may depend on its neighbours: a stripped space, part of a
    character. Its bytes do not, so those of consecutive tokens join to the text.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        kinds = _decoders(raw)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._metaspace = bool(kinds & {"Metaspace", "Replace"})
        self._added = {
            number: token.content for number, token in raw.get_added_tokens_decoder().items()
        }
        self._known: dict[int, tuple[bytes, str]] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of `token`; none when there is no such token."""
        return self._look_up(token)[0]

    def name(self, token: int) -> str:
        """`token` as text; one that is no whole number of characters as `bytes:` and their codes,
        an id that is no token as `token_id:` and the id."""
        return self._look_up(token)[1]

    def _look_up(self, token: int) -> tuple[bytes, str]:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._find(token)
        return known

    def _find(self, token: int) -> tuple[bytes, str]:
        piece = self._raw.id_to_token(token)
        if piece is None:
            return b"", f"token_id:{token}"
        data = self._bytes(token, piece)
        try:
            return data, data.decode()
        except UnicodeDecodeError:
            return data, "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int, piece: str) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if self._byte_level:
            if all(char in BYTE_LETTERS for char in piece):
                return bytes(BYTE_LETTERS[char] for char in piece)
            return piece.encode()
        if self._byte_fallback and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        if self._metaspace:
            return piece.replace(_METASPACE, " ").encode()
        return str(self._raw.decode([token], skip_special_tokens=False)).encode()


def _decoders(raw: RawTokenizer) -> set[str]:
    """Names of what the tokenizer's decoder is made of."""
    decoder: Any = raw.decoder
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself where it can be printed,
    else the next free one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in set(printed)]
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


BYTE_LETTERS = _byte_letters()
"""The byte of each letter in byte-level vocabularies."""
