"""From the tokens of one choice to the text that may be shown: detokenising, stop strings, the end
of an answer.

Tokens come in runs, several per step. Text leaves as soon as it is final: never half a character,
and never text that could still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from gateway.request import TokenLogprob
from gateway.stops import StopStrings

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_TRIM = 24  # ids a window may hold before it is cut; decoding costs about 0.15 us an id
_MAX_HELD = 64  # trailing U+FFFD; a longer run of broken bytes will never become text


class Decoder(Protocol):
    """What detokenising needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""

    def is_silent(self, token: int) -> bool:
        """Whether `token` never shows text."""


class Detokenizer:
    """Incremental decoding of one token sequence.

    What an id adds to the text depends on the ids before it (a stripped leading space, the bytes of
    a character), so a window of past ids is decoded again with the new ones and only what lies
    beyond the text already given is new. Invariant: `_given` characters of decode(`_window`) were
    given; both `_window`[0] and `_window`[`_mark`] begin a character.
    """

    __slots__ = ("_decoder", "_given", "_mark", "_window")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._given = 0
        self._mark = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with `ids`; a trailing incomplete character is held back."""
        window = self._window
        is_silent = self._decoder.is_silent
        before = len(window)
        window.extend([token for token in ids if not is_silent(token)])
        if len(window) == before:
            return ""
        text = self._decoder.decode(window)
        if text.endswith(REPLACEMENT):
            final = len(text.rstrip(REPLACEMENT))
            if len(text) - final <= _MAX_HELD:
                new = text[self._given : final]
                self._given = max(self._given, final)
                return new
        new = text[self._given :]
        if len(window) > _TRIM:
            del window[: self._mark]
            self._given = len(self._decoder.decode(window))
        else:
            self._given = len(text)
        self._mark = len(window)
        return new

    def flush(self) -> str:
        """The text still held back, with U+FFFD for what never became a character.

        Ends the sequence.
        """
        text = self._decoder.decode(self._window) if self._window else ""
        new = text[self._given :]
        self._window.clear()
        self._given = self._mark = 0
        return new


FinishReason = Literal["stop", "length"]


class Scored(NamedTuple):
    """A token of an answer, or of the prompt that it begins with.

    `offset` is the number of characters before the token's own text, `logprob` None for a prompt's
    first token.
    """

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Piece:
    """What one run of tokens added to an answer.

    `tokens` are those that belong to the answer, hidden end tokens included; `finish` is None while
    it goes on; `scored` has one row per token, where wanted; `stop` is the stop string that ended
    the answer; `first` marks a choice's first piece.
    """

    text: str
    tokens: Sequence[int]
    finish: FinishReason | None
    scored: list[Scored] = field(default_factory=list)
    stop: str | None = None
    first: bool = False


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    if len(pieces) == 1:
        return pieces[0]
    text = "".join([piece.text for piece in pieces])
    tokens = [token for piece in pieces for token in piece.tokens]
    scored = [row for piece in pieces for row in piece.scored]
    last = pieces[-1]
    return Piece(text, tokens, last.finish, scored, last.stop, pieces[0].first)


class TextStream:
    """The text of one choice.

    A stop string counts when it is completed by a token after the first `min_tokens`. It ends the
    answer at that token and is not shown, nor is a stop token (`finish` "stop"), though it counts;
    with `keep_stop` both are. With `scored` every token gets a row, its offset counted from
    `offset`.
    """

    __slots__ = (
        "_count",
        "_detokenizer",
        "_keep_stop",
        "_length",
        "_min_tokens",
        "_pending",
        "_scored",
        "_state",
        "_stop",
        "_stops",
    )

    def __init__(
        self,
        decoder: Decoder,
        stops: StopStrings | None,
        min_tokens: int = 0,
        *,
        keep_stop: bool = False,
        scored: bool = False,
        offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._stops = stops
        self._min_tokens = min_tokens
        self._keep_stop = keep_stop
        self._scored = scored
        self._length = offset  # characters of all tokens so far
        self._state = 0
        self._pending = ""  # final text that may still begin a stop string
        self._count = 0
        self._stop: str | None = None

    def feed(
        self,
        tokens: Sequence[int],
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Piece:
        """Takes one run; `logprobs` has a row for each of `tokens` where they are scored. `finish`
        says why the target ended the request with it.

        Not to be called after an end.
        """
        shown = tokens if finish != "stop" or self._keep_stop else tokens[:-1]
        if self._stops is None and not self._scored:
            text = self._detokenizer.push(shown)
            if finish is not None:
                text += self._detokenizer.flush()
            return Piece(text, tokens, finish)
        return self._feed_each(tokens, shown, finish, logprobs)

    def _feed_each(
        self,
        tokens: Sequence[int],
        shown: Sequence[int],
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprob],
    ) -> Piece:
        push = self._detokenizer.push
        offsets: list[int] = []
        used, ended = len(tokens), False
        for index in range(len(shown)):
            self._count += 1
            offsets.append(self._length)
            if self._add(push(shown[index : index + 1])):
                used, ended = index + 1, True
                break
        if not ended and finish is not None:
            offsets += [self._length] * (len(tokens) - len(shown))
            ended = self._add(self._detokenizer.flush())
        scored: list[Scored] = []
        if self._scored:
            rows = zip(tokens[:used], offsets, logprobs[:used], strict=True)
            scored = [Scored(*row) for row in rows]
        if ended:
            return Piece(self._pending, tokens[:used], "stop", scored, self._stop)
        if finish is not None:
            return Piece(self._pending, tokens, finish, scored)
        held = 0 if self._stops is None else self._stops.held(self._state)
        final = len(self._pending) - held
        text, self._pending = self._pending[:final], self._pending[final:]
        return Piece(text, tokens, None, scored)

    def _add(self, text: str) -> bool:
        """Appends to the pending text.

        True when a stop string ended it; all that follows is cut off, and the stop string too
        unless it is kept.
        """
        self._length += len(text)
        stops = self._stops
        if stops is None:
            self._pending += text
            return False
        armed = self._count > self._min_tokens
        self._state, end, length = stops.scan(self._state, text, armed)
        end += len(self._pending)
        self._pending += text
        if not length:
            return False
        self._stop = self._pending[end - length : end]
        self._pending = self._pending[: end if self._keep_stop else end - length]
        return True
