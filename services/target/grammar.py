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
from slipstream.grammar import Grammar, first_lines, limits, source
from slipstream.tree import Tree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, folder: Path, vocab_size: int, end_ids: Collection[int]) -> Vocabulary | None:
        """That of the model in `folder`; None where grammars cannot be matched, which is logged."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            log.warning("llguidance is not installed: no request with a grammar can be served")
            return None
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            words = LLTokenizer(text, eos_token=sorted(end_ids) or None)
            if words.vocab_size < vocab_size:  # the model's has padding
                words = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(end_ids) or None)
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
        matcher = Matcher(compiled.deep_copy(), ends, bitmap(ends, self.vocab_size))
        matcher.advance(output_ids)
        if matcher.failed:
            raise InvalidRequest(f"grammar: output_ids: {matcher.failed}", "grammar")
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._tokenizer, source(grammar), log_level=0, limits=limits())
        if compiled.is_error():
            raise InvalidRequest(f"grammar: {first_lines(compiled.get_error())}", "grammar")
        return compiled


class Matcher:
    """Where a request's answer stands in its grammar.

    Attributes:
        failed: why it can say no more; empty while it can. For good.
    """

    __slots__ = ("_ended", "_end_bits", "_ends", "_matcher", "failed")

    def __init__(
        self, matcher: LLMatcher, ends: frozenset[int], end_bits: Words, ended: bool = False
    ) -> None:
        self._matcher, self._ends, self._end_bits, self._ended = matcher, ends, end_bits, ended
        self.failed = ""

    def fork(self) -> Matcher:
        """One that stands at the same place and goes its own way."""
        twin = Matcher(self._matcher.deep_copy(), self._ends, self._end_bits, self._ended)
        twin.failed = self.failed
        return twin

    def allowed(self) -> Words:
        """Bitmap of the tokens that may come next, bit v % 32 of word v // 32; none once failed.

        An end token may come where the answer is complete, and after one only another. A stop id
        that the grammar has for text may also come as text.
        """
        if self.failed:
            return np.zeros_like(self._end_bits)
        if self._ended:
            return self._end_bits
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._end_bits)]
        if self._matcher.is_error():
            self._fail()
            return np.zeros_like(self._end_bits)
        return bits | self._end_bits if self._matcher.is_accepting() else bits

    def advance(self, tokens: Iterable[int]) -> None:
        """`tokens` come next; fails when the grammar does not allow them."""
        for token in tokens:
            if self.failed or self._ended:
                return
            if token in self._ends and self._matcher.is_accepting():
                self._ended = True
            elif not self._matcher.consume_token(token):
                self._fail()

    def _fail(self) -> None:
        self.failed = first_lines(self._matcher.get_error()) or "the grammar allows no more"
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


def tree_masks(matcher: Matcher, tree: Tree) -> dict[int, Words]:
    """What may be drawn at each node of `tree` that the grammar lets a walk reach.

    The matcher stands at the anchor, node 0, and is left there.
    """
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    masks: dict[int, Words] = {}
    waiting = [(0, matcher.fork())]
    while waiting:
        node, here = waiting.pop()
        masks[node] = mask = here.allowed()
        reached = [child for child in children[node] if _has(mask, tree.tokens[child])]
        for index, child in enumerate(reached):
            last = index == len(reached) - 1
            there = here if last else here.fork()
            there.advance(tree.tokens[child : child + 1])
            waiting.append((child, there))
    return masks


def _has(mask: Sequence[int] | Words, token: int) -> bool:
    return bool((int(mask[token >> 5]) >> (token & 31)) & 1)
