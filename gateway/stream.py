"""From the tokens of one choice to the text that may be shown: detokenising, stop strings, the end
of an answer.

Tokens come in runs, several per step. Text leaves as soon as it is final: never half a character,
and never text that could still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


class StopStrings:
    """An Aho-Corasick automaton over a request's stop strings, shared by its choices.

    After each character, the state is the longest suffix of the text that begins some stop string.
    So a match is seen at the first character that completes it, however the text was cut into
    tokens; of several that end there, the longest counts.
    """

    __slots__ = ("_fail", "_goto", "_held", "_match")

    def __init__(self, stops: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self._match = [0]  # per state: length of the longest stop string that ends here
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._goto[state]:
                    self._goto[state][char] = len(self._goto)
                    self._goto.append({})
                    self._match.append(0)
                    depth.append(depth[state] + 1)
                state = self._goto[state][char]
            self._match[state] = depth[state]
        self._fail = self._link()
        # Per state: how many of the last characters may still grow into a stop string.
        self._held = [0] * len(self._goto)
        for state in sorted(range(1, len(self._goto)), key=depth.__getitem__):
            self._held[state] = depth[state] if self._goto[state] else self._held[self._fail[state]]

    def _link(self) -> list[int]:
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[fail[state]]
            for char, child in self._goto[state].items():
                fail[child] = self.step(fail[state], char, fail)
                queue.append(child)
        return fail

    def step(self, state: int, char: str, fail: Sequence[int] | None = None) -> int:
        """The state after `char`."""
        links = self._fail if fail is None else fail
        goto = self._goto
        while char not in goto[state]:
            if state == 0:
                return 0
            state = links[state]
        return goto[state][char]

    def scan(self, state: int, text: str, armed: bool) -> tuple[int, int, int]:
        """Follows `text` from `state`.

        Returns the state, and the end and length of the first stop string: it is
        text[end - length : end], its beginning negative when it lies in earlier text. Without one,
        or when not `armed`, length is 0.
        """
        goto, match, step = self._goto, self._match, self.step
        root = goto[0]
        for index, char in enumerate(text):
            if state == 0:
                state = root.get(char, 0)
            else:
                state = step(state, char)
            if armed and match[state]:
                return state, index + 1, match[state]
        return state, len(text), 0

    def held(self, state: int) -> int:
        """Characters at the end of the text that may still grow into a stop string."""
        return self._held[state]


FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Piece:
    """What one run of tokens added to an answer.

    `tokens` are those that belong to the answer, hidden end tokens included; `finish` is None while
    it goes on.
    """

    text: str
    tokens: Sequence[int]
    finish: FinishReason | None


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    if len(pieces) == 1:
        return pieces[0]
    text = "".join([piece.text for piece in pieces])
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(text, tokens, pieces[-1].finish)


class TextStream:
    """The text of one choice.

    A stop string counts when it is completed by a token after the first `min_tokens`. It ends the
    answer at that token and is not shown; so is a stop token (`finish` "stop") not shown, though it
    counts.
    """

    __slots__ = ("_count", "_detokenizer", "_min_tokens", "_pending", "_state", "_stops")

    def __init__(self, decoder: Decoder, stops: StopStrings | None, min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._stops = stops
        self._min_tokens = min_tokens
        self._state = 0
        self._pending = ""  # final text that may still begin a stop string
        self._count = 0

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> Piece:
        """Takes one run. `finish` says why the target ended the request with it.

        Not to be called after an end.
        """
        shown = tokens[:-1] if finish == "stop" else tokens
        if self._stops is None:
            text = self._detokenizer.push(shown)
            if finish is not None:
                text += self._detokenizer.flush()
            return Piece(text, tokens, finish)
        return self._feed_watched(self._stops, tokens, shown, finish)

    def _feed_watched(
        self,
        stops: StopStrings,
        tokens: Sequence[int],
        shown: Sequence[int],
        finish: FinishReason | None,
    ) -> Piece:
        push = self._detokenizer.push
        for index in range(len(shown)):
            self._count += 1
            if self._add(stops, push(shown[index : index + 1])):
                return Piece(self._pending, tokens[: index + 1], "stop")
        if finish is None:
            final = len(self._pending) - stops.held(self._state)
            text, self._pending = self._pending[:final], self._pending[final:]
            return Piece(text, tokens, None)
        if self._add(stops, self._detokenizer.flush()):
            return Piece(self._pending, tokens, "stop")
        return Piece(self._pending, tokens, finish)

    def _add(self, stops: StopStrings, text: str) -> bool:
        """Appends to the pending text.

        True when a stop string ended it; the stop string and all that follows are cut off.
        """
        armed = self._count > self._min_tokens
        self._state, end, length = stops.scan(self._state, text, armed)
        if length:
            end += len(self._pending)
            self._pending = (self._pending + text)[: end - length]
            return True
        self._pending += text
        return False
