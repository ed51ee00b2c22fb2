"""Matching answers against grammars: which tokens may come next, along any path of a tree.

Everything here is on the host and deterministic: what is allowed after a path depends on the tokens
of the path and on nothing else, so a tree sees what plain decoding would have seen.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.target.runner import SlotAdmit
from slipstream.errors import InvalidRequest
from slipstream.grammar import Grammar, Specials, first_lines, limits, source, vocabulary
from slipstream.tree import Tree

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

KEPT = 64
"""Compiled grammars that are kept for the next request with the same text."""

Words = npt.NDArray[np.int32]


class Vocabulary:
    """The tokens of a model as texts, and the grammars compiled for them."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        """`vocab_size` is the model's; `end_ids` are its end tokens."""
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._specials = SpecialBits(Specials(tokenizer), vocab_size)
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, folder: Path, vocab_size: int, end_ids: Collection[int]) -> Vocabulary | None:
        """That of the model in `folder`; None where grammars cannot be matched, which is logged."""
        path = folder / "tokenizer.json"
        try:
            words = vocabulary(path.read_text(encoding="utf-8"), vocab_size, end_ids)
        except ImportError:
            log.warning("llguidance is not installed: no request with a grammar can be served")
            return None
        except (OSError, ValueError) as error:
            log.warning("%s: no request with a grammar can be served: %s", path, error)
            return None
        return cls(words, vocab_size, end_ids or words.eos_tokens)

    def matcher(
        self, grammar: Grammar, stop_ids: Collection[int], output_ids: Iterable[int] = ()
    ) -> Matcher:
        """For a request with these stop ids and output so far.

        Raises InvalidRequest when the grammar cannot be compiled or the output does not follow it.
        """
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        ends = self._end_ids | frozenset(stop_ids)
        words = -(-self._tokenizer.vocab_size // 32)
        bits = bitmap(ends, self.vocab_size)
        matcher = Matcher(compiled.deep_copy(), ends, bits, words, self._specials)
        matcher.advance(output_ids)
        if matcher.failed:
            raise InvalidRequest(f"grammar: output_ids: {matcher.failed}", "grammar")
        return matcher

    def pool(self) -> LLExecutor:
        """Threads for the masks of many nodes, most of the cores there are."""
        from llguidance import LLExecutor

        return LLExecutor()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._tokenizer, source(grammar), log_level=0, limits=limits())
        if compiled.is_error():
            raise InvalidRequest(f"grammar: {first_lines(compiled.get_error())}", "grammar")
        return compiled


class SpecialBits:
    """`Specials` over bitmaps."""

    def __init__(self, specials: Specials, vocab_size: int) -> None:
        self._specials = specials
        bits = bitmap(tuple(specials), vocab_size)
        self._places = np.flatnonzero(bits)
        self._bits = bits[self._places]

    def corrected(self, library: LLMatcher, bits: Words) -> Words:
        """What `library` allows, given the bitmap that it made."""
        if not (bits[self._places] & self._bits).any():
            return bits
        places = np.flatnonzero(bits)
        word = int(bits[places[0]]) & 0xFFFFFFFF
        if len(places) > 1 or word & (word - 1):
            return bits
        token = int(places[0]) * 32 + word.bit_length() - 1
        return bitmap((self._specials.corrected(library, token),), len(bits) * 32)


class Matcher:
    """Where a request's answer stands in its grammar.

    Attributes:
        failed: why it can say no more; empty while it can. For good.
        library: the library's matcher.
        words: of a bitmap as the library makes it, no fewer than of the model's vocabulary.
    """

    __slots__ = ("_end_bits", "_ended", "_ends", "_specials", "failed", "library", "words")

    def __init__(
        self,
        library: LLMatcher,
        ends: frozenset[int],
        end_bits: Words,
        words: int,
        specials: SpecialBits,
    ) -> None:
        self.library, self.words, self._specials = library, words, specials
        self._ends, self._end_bits, self._ended = ends, end_bits, False
        self.failed = ""

    def fork(self) -> Matcher:
        """One that stands at the same place and goes its own way."""
        library = self.library.deep_copy()
        twin = Matcher(library, self._ends, self._end_bits, self.words, self._specials)
        twin.failed, twin._ended = self.failed, self._ended
        return twin

    @property
    def asks(self) -> bool:
        """Whether the library has to say what may come next."""
        return not self.failed and not self._ended

    def allowed(self) -> Words:
        """Bitmap of the tokens that may come next, bit v % 32 of word v // 32; none once failed.

        An end token may come where the answer is complete, and after one only another. A stop id
        that the grammar has for text may also come as text.
        """
        if self.failed:
            return np.zeros_like(self._end_bits)
        if self._ended:
            return self._end_bits
        return self.completed(np.frombuffer(self.library.compute_bitmask(), np.int32))

    def completed(self, bits: Words) -> Words:
        """`allowed`, given the bitmap that the library made."""
        if self.library.is_error():
            self._fail()
            return np.zeros_like(self._end_bits)
        bits = bits[: len(self._end_bits)]
        if self.library.is_accepting():
            return bits | self._end_bits
        return self._specials.corrected(self.library, bits)

    def advance(self, tokens: Iterable[int]) -> None:
        """`tokens` come next; fails when the grammar does not allow them."""
        for token in tokens:
            if self.failed or self._ended:
                return
            if token in self._ends and self.library.is_accepting():
                self._ended = True
            elif not self.library.consume_token(token):
                self._fail()

    def _fail(self) -> None:
        self.failed = first_lines(self.library.get_error()) or "the grammar allows no more"
        log.warning("a grammar failed: %s", self.failed)


def admitted(vocabulary: Vocabulary | None, request: SlotAdmit) -> Matcher | None:
    """The matcher of a request at its admission; None without a grammar. Raises InvalidRequest."""
    if request.grammar is None:
        return None
    if vocabulary is None:
        raise InvalidRequest("grammar: this target matches none", "grammar")
    return vocabulary.matcher(request.grammar, request.stop_ids, request.output_ids)


def bitmap(ids: Collection[int], vocab_size: int) -> Words:
    """Bit v % 32 of word v // 32 for every id of the vocabulary in `ids`, no other."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[token for token in ids if 0 <= token < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def tree_masks(
    requests: Sequence[tuple[Matcher, Tree]], pool: LLExecutor | None = None
) -> list[dict[int, Words]]:
    """What may be drawn at each node of each tree that the grammar lets a walk reach.

    A request's matcher stands at its anchor, node 0, and is left there. `pool` has threads for it.
    """
    masks: list[dict[int, Words]] = [{} for _ in requests]
    children = [_children(tree) for _, tree in requests]
    level = [(which, 0, matcher.fork()) for which, (matcher, _) in enumerate(requests)]
    while level:  # all nodes of one depth
        following: list[tuple[int, int, Matcher]] = []
        found = _all_allowed([here for _, _, here in level], pool)
        for (which, node, here), mask in zip(level, found, strict=True):
            masks[which][node] = mask
            tokens = requests[which][1].tokens
            reached = [child for child in children[which][node] if _has(mask, tokens[child])]
            for index, child in enumerate(reached):
                there = here if index == len(reached) - 1 else here.fork()
                there.advance((tokens[child],))
                following.append((which, child, there))
        level = following
    return masks


def _children(tree: Tree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    return children


def _all_allowed(matchers: Sequence[Matcher], pool: LLExecutor | None) -> list[Words]:
    """`allowed` of each."""
    asking = [matcher for matcher in matchers if matcher.asks]
    if pool is None or len(asking) < 2:
        return [matcher.allowed() for matcher in matchers]
    from llguidance.numpy import fill_next_token_bitmask_par

    bits = np.empty((len(asking), asking[0].words), np.int32)
    fill_next_token_bitmask_par(
        pool, [(matcher.library, place) for place, matcher in enumerate(asking)], bits
    )
    found = iter(bits)
    return [m.completed(next(found)) if m.asks else m.allowed() for m in matchers]


def _has(mask: Sequence[int] | Words, token: int) -> bool:
    return bool((int(mask[token >> 5]) >> (token & 31)) & 1)
