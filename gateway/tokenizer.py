"""Text to ids and back, from a checkpoint folder's tokenizer.json.

Encoding runs in worker threads through `encode_batch_fast`, which releases the interpreter lock:
one `encode` of a long prompt would hold it for many milliseconds, and the scheduler's thread with
it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from gateway.lengths import read
from gateway.stream import Decoder
from gateway.vocabulary import Vocabulary
from slipstream.errors import ConfigError

NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that a tokenizer configuration names and a chat template may refer to."""


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        config: tokenizer_config.json as it stands, {} when the folder has none.
        special_tokens: the named special tokens, by name ("bos_token": "<s>").
        eos_id: id of the tokenizer's own end token, None when it names none.
        vocab_size: one more than the largest id, added tokens included.
        vocabulary: its tokens one by one.
        literal: decodes special tokens as they are written.
        bound: how few tokens a text can have.
    """

    def __init__(self, raw: RawTokenizer, config: dict[str, Any], workers: int = 2) -> None:
        self._raw = raw
        self._decode = raw.decode
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="tokenize-aside")
        self.config = config
        self.special_tokens = _named_specials(config)
        eos = self.special_tokens.get("eos_token")
        self.eos_id: int | None = None if eos is None else raw.token_to_id(eos)
        self.vocab_size = 1 + max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
        self._silent = frozenset(
            number for number, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self.vocabulary = Vocabulary(raw)
        self.literal = LiteralDecoder(raw, self.vocab_size)
        self.bound = read(raw)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `folder`. Raises ConfigError naming the file that is missing or unreadable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {str(folder)!r}")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path}: not a tokenizer: {error}") from error
        raw.no_truncation()
        raw.no_padding()
        return cls(raw, read_json(folder / "tokenizer_config.json"))

    async def encode(
        self, texts: Sequence[str], special: bool, *, aside: bool = False
    ) -> list[list[int]]:
        """Ids of each text, in order.

        `special` adds what the tokenizer puts around a text (a BOS token). `aside` is for texts of
        any length, megabytes and seconds: no other text waits for them.
        """
        pool = self._aside if aside else self._pool
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, self._encode, texts, special)

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        return self._raw.to_str()

    def token_id(self, text: str) -> int | None:
        """The id of the token that `text` is, None when it is none."""
        return self._raw.token_to_id(text)

    def showing(self, ids: Collection[int]) -> Decoder:
        """Decodes with the special tokens in `ids` as they are written, and no others."""
        hidden = self._silent - frozenset(ids)
        return LiteralDecoder(self._raw, self.vocab_size, hidden) if ids else self

    def encode_now(self, text: str) -> list[int]:
        """Ids of a short text, without special tokens."""
        return self._encode([text], False)[0]

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        encodings = self._raw.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens.

        A character that is cut short at either end becomes U+FFFD.
        """
        return self._decode(ids)

    def is_silent(self, token: int) -> bool:
        """Whether `token` shows no text wherever it stands: a special token, or no token at all."""
        return token in self._silent or token >= self.vocab_size

    def close(self) -> None:
        """Ends the worker threads once their present work is done."""
        for pool in (self._pool, self._aside):
            pool.shutdown(wait=False, cancel_futures=True)


class LiteralDecoder:
    """Decodes with special tokens as they are written, but for those in `hidden`."""

    def __init__(
        self, raw: RawTokenizer, vocab_size: int, hidden: frozenset[int] = frozenset()
    ) -> None:
        self._decode = raw.decode
        self._vocab_size = vocab_size
        self._hidden = hidden

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, none of which is silent."""
        return self._decode(ids, skip_special_tokens=False)

    def is_silent(self, token: int) -> bool:
        """Whether `token` is hidden, or no token at all."""
        return token in self._hidden or token >= self._vocab_size


def resolve_folder(name: str | None) -> Path:
    """The folder of `name`: a folder, or what the engine's model resolver knows by that name.

    A hub id or the embedded model is resolved in a process of its own, since preparing a model
    needs torch, which never enters this one. Raises ConfigError naming what could not be found.
    """
    if name is None:
        raise ConfigError("--tokenizer: a folder, hub id or embedded model name is required")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream.models.prepare", name],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not found or not Path(found[-1]).is_dir():
        reason = (done.stderr.strip() or done.stdout.strip() or "nothing found").splitlines()[-1]
        raise ConfigError(f"--tokenizer: cannot resolve {name!r}: {reason}")
    return Path(found[-1])


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} when there is no such file.

    Raises ConfigError when it is not one.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _named_specials(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens: strings, or objects with the string under "content"."""
    found: dict[str, str] = {}
    for name in NAMED_SPECIALS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
