"""Stop strings: found at the character that completes them, however the text was cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
