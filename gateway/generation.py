"""One client request as it runs: its choices, the text they give, and the way tokens come here.

The scheduler's thread hands over one batch of chunks per step; `Bridge` carries it to the event
loop with a single wake-up, whatever the number of requests. Everything else here runs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from gateway.chat.answer import PLAIN, AnswerFormat
from gateway.logprobs import prompt_rows
from gateway.metrics import FrontMetrics
from gateway.request import Chunk, TokenLogprob
from gateway.stream import FinishReason, Piece, TextStream, joined
from slipstream.errors import EngineFailed, SlipstreamError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written; an end token that is not shown counts."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class SpeculativeStats:
    """What drafting did: per verify step, the draft tokens accepted and the nodes verified.

    `emitted` counts the answer's tokens, cut where the answer was cut; the first of a choice comes
    from prefill, so `tau` leaves one per choice out.
    """

    emitted: int = 0
    choices: int = 1
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Verify steps."""
        return len(self.nodes)

    @property
    def tau(self) -> float:
        """(emitted - 1) / steps; 0 without a verify step."""
        return (self.emitted - self.choices) / self.steps if self.nodes else 0.0


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt as its answers may show it: `offsets` has the beginning of each token's text."""

    ids: Sequence[int]
    text: str = ""
    offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants beside the text.

    Attributes:
        stats: speculative statistics.
        echo: answers begin with the prompt.
        scored: a row of log-probability for every token shown.
        stop_ids: tokens that are told as what ended an answer.
        form: how a chat's answers are taken apart.
    """

    stats: bool = False
    echo: bool = False
    scored: bool = False
    stop_ids: frozenset[int] = frozenset()
    form: AnswerFormat = PLAIN


class Choice:
    """One answer of a request.

    Attributes:
        request_id: the scheduler's number for it, set when it is submitted.
        prompt_logprobs: of the prompt's tokens from the second on, where wanted.
        finish: why it ended, None while it runs.
        stop: the stop string or token that ended it.
    """

    __slots__ = (
        "begun",
        "finish",
        "generation",
        "index",
        "last",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "stats",
        "stop",
        "text",
    )

    def __init__(
        self, generation: Generation, index: int, text: TextStream, prompt: ShownPrompt
    ) -> None:
        self.generation = generation
        self.index = index
        self.text = text
        self.prompt = prompt
        self.prompt_logprobs: list[TokenLogprob] = []
        self.request_id = -1
        self.begun = False
        self.finish: FinishReason | None = None
        self.stop: str | int | None = None
        self.stats = SpeculativeStats()
        self.last = 0.0


Delta = tuple[Choice, Piece]
"""What one or several steps added to a choice. A piece with `finish` set is the choice's last."""


def merged(deltas: list[Delta]) -> list[Delta]:
    """At most one delta per choice, in order of their first: what several steps gave it, joined."""
    if len(deltas) == 1:
        return deltas
    pieces: dict[Choice, list[Piece]] = {}
    for choice, piece in deltas:
        pieces.setdefault(choice, []).append(piece)
    return [(choice, joined(parts)) for choice, parts in pieces.items()]


class Bridge:
    """From the scheduler's thread to the choices on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._choices: dict[int, Choice] = {}

    def deliver(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        """Takes the chunks of one step; called on the scheduler's thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, batch)
        except RuntimeError:  # the loop is closed: nobody is left to read
            log.debug("chunks after the end: %d", len(batch))

    def attach(self, choice: Choice) -> None:
        """From now on `choice` gets the chunks of its request."""
        self._choices[choice.request_id] = choice

    def detach(self, choice: Choice) -> bool:
        """Later chunks of the choice's request are dropped; False when it had been detached."""
        return self._choices.pop(choice.request_id, None) is not None

    def _dispatch(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        now = time.perf_counter()
        choices = self._choices
        for request_id, chunk in batch:
            choice = choices.get(request_id)
            if choice is None:
                continue
            try:
                choice.generation.feed(choice, chunk, now)
            except Exception as error:  # one request's text must not stop the others
                log.exception("request %s", choice.generation.id)
                choice.generation.fail(EngineFailed(f"text could not be made: {error}"))


class Generation:
    """A running request. Used as a context manager: leaving it cancels what still runs.

    Attributes:
        id: the name the client gets.
        created: Unix time in s.
        model: name of the served model.
        prompt_tokens: tokens of all prompts.
        choices: every choice, prompts in order, n of each.
        wishes: what the client wants beside the text.
    """

    def __init__(
        self,
        name: str,
        model: str,
        prompt_tokens: int,
        bridge: Bridge,
        cancel: Callable[[int], None],
        metrics: FrontMetrics,
        *,
        wishes: Wishes,
        done: Callable[[Generation], None],
    ) -> None:
        self.id = name
        self.created = int(time.time())
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.choices: list[Choice] = []
        self.wishes = wishes
        self._bridge = bridge
        self._cancel = cancel
        self._metrics = metrics
        self._done = done
        self._arrived = time.perf_counter()
        self._open = 0  # choices that still run
        self._error: SlipstreamError | None = None
        self._ready: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        self._done(self)

    def add(self, text: TextStream, prompt: ShownPrompt, submit: Callable[[], int]) -> None:
        """Submits one more choice. Raises what `submit` raises."""
        choice = Choice(self, len(self.choices), text, prompt)
        choice.request_id = submit()
        self.choices.append(choice)
        self._bridge.attach(choice)
        self._open += 1

    async def next(self) -> list[Delta]:
        """Waits for the next pieces, one per choice; [] after the end or a cancellation.

        A piece holds what the steps since the last call gave: a client that is slow, or a loop that
        is, gets fewer and larger ones in place of a backlog. A message costs more than its tokens.
        Raises the error that ended the request, after everything that came before it.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return merged(ready)

    def feed(self, choice: Choice, chunk: Chunk, now: float) -> None:
        """Takes what one step gave `choice`; `now` is the time it arrived, in s."""
        if chunk.finish == "error" or chunk.finish == "cancelled":
            self.fail(chunk.error or EngineFailed(f"the request was {chunk.finish}"))
            return
        choice.prompt_logprobs += chunk.prompt_logprobs
        finish = None if chunk.finish == "none" else chunk.finish
        piece = choice.text.feed(chunk.tokens, finish, chunk.logprobs or ())
        self._count(choice, chunk, len(piece.tokens), now)
        if piece.finish is not None:
            self._end(choice, piece, running=chunk.finish == "none")
        elif not piece.tokens:
            return
        if not choice.begun:
            self._begin(choice, piece)
        self._ready.append((choice, piece))
        self._wake()

    def _begin(self, choice: Choice, piece: Piece) -> None:
        """Puts the prompt before a choice's first piece, if it is to be shown."""
        choice.begun = piece.first = True
        if not self.wishes.echo:
            return
        prompt = choice.prompt
        piece.text = prompt.text + piece.text
        if self.wishes.scored:
            rows = prompt_rows(prompt.ids, prompt.offsets, choice.prompt_logprobs)
            piece.scored[:0] = rows

    def _count(self, choice: Choice, chunk: Chunk, tokens: int, now: float) -> None:
        stats, metrics = choice.stats, self._metrics
        if chunk.nodes:
            stats.nodes.append(chunk.nodes)
            stats.accepted.append(chunk.accepted)
            metrics.accepted.observe(chunk.accepted)
        if tokens == 0:
            return
        metrics.output_tokens.add(tokens)
        if stats.emitted:
            metrics.inter_token.observe((now - choice.last) / tokens)
        else:
            metrics.first_token.observe(now - self._arrived)
        choice.last = now
        stats.emitted += tokens

    def _end(self, choice: Choice, piece: Piece, running: bool) -> None:
        choice.finish, choice.stop = piece.finish, piece.stop
        if piece.finish == "stop" and piece.stop is None and piece.tokens:
            last = piece.tokens[-1]
            choice.stop = last if last in self.wishes.stop_ids else None
        self._bridge.detach(choice)
        self._open -= 1
        if running:  # a stop string: the scheduler knows nothing of text
            self._cancel(choice.request_id)
        self._metrics.finished(choice.stats)

    def fail(self, error: SlipstreamError) -> None:
        """Ends the request with `error`, its other choices too."""
        if self._error is None:
            self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Gives up every choice that still runs; safe to call again, and after the end."""
        for choice in self.choices:
            if self._bridge.detach(choice):
                self._open -= 1
                self._cancel(choice.request_id)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def usage(self, choice: Choice | None = None) -> Usage:
        """Tokens so far, of one choice or of all."""
        choices = self.choices if choice is None else (choice,)
        return Usage(self.prompt_tokens, sum(item.stats.emitted for item in choices))

    @property
    def finished(self) -> bool:
        """Whether every choice came to its own end."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def error(self) -> SlipstreamError | None:
        """What ended the request early."""
        return self._error

    def stats(self) -> SpeculativeStats:
        """Statistics of all choices together, in order."""
        total = SpeculativeStats(choices=len(self.choices))
        for choice in self.choices:
            total.emitted += choice.stats.emitted
            total.accepted += choice.stats.accepted
            total.nodes += choice.stats.nodes
        return total
