"""Grammars before a request is admitted: compiled as the target will, and tried.

What the target could not take or afford is refused here, naming the field and with the grammar
library's own words: a check compiles the grammar for the model's own tokens and takes its first
steps, in a worker thread. It also looks for an answer that the request's bans leave.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.chat.tools import parameters
from gateway.fields import refuse
from gateway.grammar import Bound, arguments
from slipstream.errors import InvalidRequest
from slipstream.grammar import Grammar, Specials, first_lines, limits, source

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHECK_S = 0.5
"""Most processor time of a check."""

_STEPS = 8  # tokens that a check takes beyond compiling: some grammars are costly only then
_SEARCHED = 64  # places of a grammar that a search for an answer looks at
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Drawn:
    """What else decides about a request's tokens.

    Attributes:
        banned: tokens that are never drawn.
        ends: tokens that end an answer.
        most: tokens of the answer at most.
    """

    banned: Collection[int] = ()
    ends: Collection[int] = ()
    most: int = 1 << 31


ANYTHING = Drawn()


class Checker:
    """Checks grammars beside the event loop and remembers those that passed."""

    def __init__(self, words: Callable[[], LLTokenizer], workers: int = 2) -> None:
        """`words` makes the model's tokens; it is called once, when they are first needed."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._passed: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._make_words = words
        self._words: tuple[LLTokenizer, Specials] | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Makes the model's tokens now. Raises InvalidRequest when they cannot be matched."""
        with self._lock:
            if self._words is None:
                try:
                    words = self._make_words()
                    self._words = words, Specials(words)
                except ValueError as error:
                    raise InvalidRequest(f"no grammar can be matched: {error}") from error

    async def admit(
        self, bound: Bound, token: Callable[[str], int | None], drawn: Drawn = ANYTHING
    ) -> Grammar | None:
        """The grammar of `bound`; None when it binds nothing.

        `token` gives the id of a text that is a token of its own. Raises InvalidRequest naming the
        field when the grammar cannot be had, or `bad_words` when they leave no answer.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._admit, bound, token, drawn)

    def _admit(
        self, bound: Bound, token: Callable[[str], int | None], drawn: Drawn
    ) -> Grammar | None:
        try:
            grammar = bound.grammar(token)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{bound.param}: {error}", bound.param) from error
        if grammar is None:
            return None
        matcher = self._passed.get(grammar)
        if matcher is None:
            matcher = self._check_all(bound, grammar)
            self._passed[grammar] = matcher
            while len(self._passed) > _KEPT:
                self._passed.popitem(last=False)
        words = self._words
        assert words is not None
        if drawn.banned and not _answerable(matcher, words[1], drawn):
            raise InvalidRequest(
                f"bad_words: they leave no answer that {bound.param} allows", "bad_words"
            )
        return grammar

    def _check_all(self, bound: Bound, grammar: Grammar) -> LLMatcher:
        """Checks the parts first: they have a field each."""
        try:
            self.prepare()
        except InvalidRequest as error:
            raise InvalidRequest(f"{bound.param}: {error}", bound.param) from error
        words = self._words
        assert words is not None
        for index, tool in bound.forced.items():
            name = f"tools[{index}].function.parameters"
            _check(*words, arguments(tool), name)
            kind = parameters(tool).get("type", "object")
            if kind != "object":  # no arguments could be read from the answer
                raise refuse(f"{name}.type", "must be 'object' where a call is required", kind)
        if bound.content is not None and bound.content.grammar != grammar:
            _check(*words, bound.content.grammar, bound.content.param)
        return _check(*words, grammar, bound.param)

    def close(self) -> None:
        """Ends the worker threads once their present work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _check(words: LLTokenizer, specials: Specials, grammar: Grammar, param: str) -> LLMatcher:
    """The compiled grammar, at its beginning.

    Raises InvalidRequest naming `param`; the library lets go of Python's lock meanwhile.
    """
    from llguidance import LLMatcher

    begun = time.thread_time()
    try:
        written = source(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {str(error).removeprefix('grammar: ')}", param) from error
    compiled = LLMatcher(words, written, log_level=0, limits=limits())
    matcher = compiled.deep_copy()
    ends = _bits(words.eos_tokens)
    for step in range(_STEPS):
        mask = _mask(matcher, specials)
        if matcher.is_error():
            raise InvalidRequest(f"{param}: {first_lines(matcher.get_error())}", param)
        if time.thread_time() - begun > MAX_CHECK_S:
            raise InvalidRequest(f"{param}: takes too much time to match", param)
        if mask == 0 and step == 0:
            raise InvalidRequest(f"{param}: no token of the model can begin it", param)
        mask &= ~ends
        if mask == 0:
            break
        matcher.consume_token(_lowest(mask))
    return compiled


def _answerable(matcher: LLMatcher, specials: Specials, drawn: Drawn) -> bool:
    """Whether an answer may come to its end, or to its length, in spite of the bans.

    Follows the grammar's ways in depth, at each place the free token with the lowest id first; True
    where it takes too long to see.
    """
    free, ends = ~_bits(drawn.banned), _bits(drawn.ends)
    begun, looked = time.thread_time(), 0
    ways: list[tuple[LLMatcher, Iterator[int], int]] = []
    here, length = matcher.deep_copy(), 0
    while True:
        looked += 1
        mask = _mask(here, specials) & free
        ended = bool(mask & ends) or (here.is_accepting() and bool(ends & free))
        if here.is_error() or ended or length >= drawn.most:
            return True
        if looked >= _SEARCHED or time.thread_time() - begun > MAX_CHECK_S:
            return True
        ways.append((here, _each(mask), length))
        while ways:
            before, tokens, length = ways[-1]
            token = next(tokens, None)
            if token is not None:
                break
            ways.pop()
        else:
            return False
        here = before.deep_copy()
        here.consume_token(token)
        length += 1


def _mask(matcher: LLMatcher, specials: Specials) -> int:
    """The tokens that may come next, a bit each."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    alone = mask != 0 and mask & (mask - 1) == 0
    return 1 << specials.corrected(matcher, _lowest(mask)) if alone else mask


def _bits(tokens: Collection[int]) -> int:
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _each(bits: int) -> Iterator[int]:
    while bits:
        token = _lowest(bits)
        bits ^= 1 << token
        yield token
