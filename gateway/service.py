"""Requests from either door to the scheduler: the one implementation behind REST and gRPC."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gateway.chat.answer import PLAIN, AnswerFormat
from gateway.checkpoint import Checkpoint
from gateway.dialogue import NO_OPTIONS, ChatOptions, Dialogue, Question, bound_text
from gateway.fields import refuse, show
from gateway.generation import Bridge, Generation, ShownPrompt
from gateway.grammar import Bound
from gateway.grammar_check import Checker, Drawn
from gateway.metrics import FrontMetrics
from gateway.openai import AnswerShape, Kind
from gateway.prepare import (
    Restriction,
    answer_shape,
    banned_ids,
    choice_params,
    end_ids,
    most_tokens,
    shown_prompt,
    text_stream,
    wishes_of,
)
from gateway.request import GenerateParams, ModelInfo, no_grammars, too_long
from gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    TokenizeChatBody,
)
from gateway.stops import StopStrings
from slipstream.errors import (
    ContextTooLong,
    Draining,
    InvalidRequest,
    NotFound,
    PeerLost,
)
from slipstream.grammar import vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

_MOST_NAMES = 100  # unknown fields that are told apart; clients choose their names
_MOST_CHARS = 64
_LONG = 1 << 16  # characters of messages that are laid out on the event loop

Ids = list[int]


class SchedulerPort(Protocol):
    """What the front needs of the scheduler; every method is safe on any thread."""

    @property
    def ready(self) -> bool:
        """Whether it is connected to a target."""

    @property
    def info(self) -> ModelInfo:
        """What it serves; only once it is or was ready."""

    def submit(self, params: GenerateParams) -> int:
        """The number of the new request. Raises RequestError, Draining or PeerLost."""

    def cancel(self, request_id: int) -> None:
        """Gives a request up; nothing when it has ended."""


class Service:
    """Starts requests and knows which of them run.

    Attributes:
        draining: no new request is taken.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        bridge: Bridge,
        checkpoint: Checkpoint,
        metrics: FrontMetrics,
        served_names: Sequence[str] = (),
        chat: ChatOptions = NO_OPTIONS,
        max_output_tokens: int = 0,
    ) -> None:
        """`max_output_tokens` cuts every answer; 0: none.

        Raises ConfigError naming an option of `chat` that cannot be had.
        """
        self._scheduler = scheduler
        self._bridge = bridge
        self._served_names = tuple(served_names)
        template = checkpoint.template
        self._dialogue = None if template is None else Dialogue(template, chat)
        self._checker = Checker(self._words)
        self._max_output_tokens = max_output_tokens
        self.checkpoint = checkpoint
        self.metrics = metrics
        self.draining = False
        self._unknown: set[str] = set()
        self._active: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self._scheduler.ready and not self.draining

    def info(self) -> ModelInfo:
        """What is served. Raises Draining, or PeerLost while there is no target."""
        if self.draining:
            raise Draining("the server is shutting down")
        if not self._scheduler.ready:
            raise PeerLost("the model is not connected")
        return self._scheduler.info

    @property
    def models(self) -> tuple[str, ...]:
        """The names clients may use, the usual one first. Raises as `info`."""
        model = self.info().model
        return self._served_names or (model,)

    def named(self, name: str | None) -> str:
        """The model that a client calls `name`; None or "": the usual one. Raises NotFound."""
        served = self.models
        if not name:
            return served[0]
        if name not in served:
            known = ", ".join(map(repr, served))
            raise NotFound(f"model: {show(name)} does not exist, this server has {known}", "model")
        return name

    def ignored(self, names: Iterable[str]) -> None:
        """Counts fields that nobody knows; each is logged once."""
        for name in names:
            short = name if len(name) <= _MOST_CHARS else f"{name[:_MOST_CHARS]}..."
            if short not in self._unknown:
                if len(self._unknown) >= _MOST_NAMES:
                    short = "(others)"
                else:
                    self._unknown.add(short)
                    log.info("unknown fields of requests are ignored: %r", short)
            self.metrics.unknown_fields.add(1, short)

    def shape(self, kind: Kind, body: GenerateBody) -> AnswerShape:
        """How the answer to `body` is written."""
        return answer_shape(kind, body, self.checkpoint)

    async def completion(self, body: CompletionBody) -> Generation:
        """Starts a completion. Raises RequestError, Draining or PeerLost; then nothing runs."""
        model = self.named(body.model)
        tokenizer = self.checkpoint.tokenizer
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        ids = [prompt for prompt in body.prompt if isinstance(prompt, list)]
        if texts:
            ids = await self._encode(texts, body)
        self._check_lengths(ids, body)
        prompts = [
            await shown_prompt(body, prompt, texts[index] if texts else None, tokenizer)
            for index, prompt in enumerate(ids)
        ]
        restriction = await self._restrict(body, bound_text(body))
        return self._start(f"cmpl-{uuid.uuid4().hex}", model, body, prompts, restriction)

    async def chat(self, body: ChatBody) -> Generation:
        """Starts an answer to a conversation. Raises as `completion`."""
        model = self.named(body.model)
        asked = await self._ask(body)
        restriction = await self._restrict(body, asked.bound)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        with _prompt_is("messages"):
            ids = await self._encode([asked.prompt], body)
            self._check_lengths(ids, body)
            prompts = [ShownPrompt(ids[0])]
            return self._start(name, model, body, prompts, restriction, asked.form)

    async def _ask(self, body: ChatBody) -> Question:
        if self._dialogue is None:
            raise InvalidRequest("messages: the model has no chat template", "messages")
        if sum(64 + len(message["content"]) for message in body.messages) > _LONG:
            return await asyncio.to_thread(self._dialogue.read, body)
        return self._dialogue.read(body)

    async def _encode(self, texts: Sequence[str], body: CompletionBody | ChatBody) -> list[Ids]:
        """Ids of prompts. Raises ContextTooLong, where it can before it makes them."""
        window, tokenizer = self.info().max_model_len, self.checkpoint.tokenizer
        answer = 0 if body.token_limit == 0 else 1
        for text in texts:
            least = tokenizer.bound.least(text) if len(text) > window else 0
            if least + answer > window:
                raise too_long(window, f"at least {least}")
        return await tokenizer.encode(texts, special=body.add_special_tokens)

    def _check_lengths(self, prompts: Iterable[Ids], body: GenerateBody) -> None:
        """Raises ContextTooLong: before anything is made of a prompt that does not fit."""
        window, answer = self.info().max_model_len, 0 if body.token_limit == 0 else 1
        for ids in prompts:
            if len(ids) + answer > window:
                raise too_long(window, str(len(ids)))

    async def _restrict(self, body: GenerateBody, bound: Bound) -> Restriction:
        """What the request says an answer may not be. Raises InvalidRequest naming the field."""
        info, tokenizer = self.info(), self.checkpoint.tokenizer
        ends = end_ids(info, tokenizer)
        most = most_tokens(body, self._max_output_tokens)
        banned = banned_ids(body.bad_words, tokenizer)
        if not bound.binds:
            return Restriction(most, ends, banned)
        if not info.grammars:
            raise no_grammars(bound.param)
        drawn = Drawn(banned, ends | set(body.stop_token_ids), most or info.max_model_len)
        grammar = await self._checker.admit(bound, tokenizer.token_id, drawn)
        return Restriction(most, ends, banned, grammar, bound.param)

    def _words(self) -> LLTokenizer:
        info, tokenizer = self.info(), self.checkpoint.tokenizer
        return vocabulary(tokenizer.to_json(), info.vocab_size, info.eos_ids)

    def prepare(self) -> None:
        """Makes what a first request would wait for; blocks."""
        if self._scheduler.info.grammars:
            with suppress(InvalidRequest):  # a request that needs it is told
                self._checker.prepare()

    async def tokenize(self, body: TokenizeBody | TokenizeChatBody) -> dict[str, Any]:
        """The ids of a text or a conversation. Raises as `completion`."""
        self.named(body.model)
        tokenizer = self.checkpoint.tokenizer
        if isinstance(body, TokenizeChatBody):
            text = (await self._ask(body)).prompt
        else:
            text = body.prompt
        (ids,) = await tokenizer.encode([text], special=body.add_special_tokens, aside=True)
        names = None
        if body.return_token_strs:
            names = await asyncio.to_thread(lambda: [*map(tokenizer.vocabulary.name, ids)])
        return {
            "count": len(ids),
            "max_model_len": self.info().max_model_len,
            "tokens": ids,
            "token_strs": names,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The text of ids. Raises as `completion`."""
        self.named(body.model)
        size = self.info().vocab_size
        if body.tokens and max(body.tokens) >= size:
            index = next(i for i, token in enumerate(body.tokens) if token >= size)
            raise refuse(f"tokens[{index}]", f"must be in [0, {size})", body.tokens[index])
        decode = self.checkpoint.tokenizer.literal.decode
        return {"prompt": await asyncio.to_thread(decode, body.tokens)}

    def _start(
        self,
        name: str,
        model: str,
        body: GenerateBody,
        prompts: Sequence[ShownPrompt],
        restriction: Restriction,
        form: AnswerFormat = PLAIN,
    ) -> Generation:
        info, tokenizer = self.info(), self.checkpoint.tokenizer
        generation = Generation(
            name,
            model,
            sum(len(prompt.ids) for prompt in prompts),
            self._bridge,
            self._scheduler.cancel,
            self.metrics,
            wishes=wishes_of(body, restriction.end_ids, form),
            done=self._forget,
        )
        stops = StopStrings(body.stop) if body.stop else None
        defaults = self.checkpoint.defaults
        try:
            for prompt in prompts:
                params = choice_params(
                    body, prompt.ids, info, defaults=defaults, restriction=restriction
                )
                for choice in range(body.n):
                    generation.add(
                        text_stream(body, tokenizer, stops, len(prompt.text), form.marks),
                        prompt,
                        partial(self._submit, params, choice),
                    )
        except BaseException:
            generation.cancel()
            raise
        self.metrics.prompt_tokens.add(generation.prompt_tokens)
        self._active.add(generation)
        self._idle.clear()
        return generation

    def _submit(self, params: partial[GenerateParams], choice: int) -> int:
        return self._scheduler.submit(params(choice=choice))

    def _forget(self, generation: Generation) -> None:
        self._active.discard(generation)
        if not self._active:
            self._idle.set()

    def close(self) -> None:
        """Ends its worker threads once their present work is done."""
        self._checker.close()

    async def drain(self, seconds: float) -> bool:
        """Takes nothing new and waits for what runs; what is left after `seconds` is ended.

        Returns whether everything came to its own end.
        """
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for generation in tuple(self._active):
                generation.fail(Draining(f"the server shut down and {seconds:g} s were not enough"))
            return False
        return True


@contextmanager
def _prompt_is(param: str) -> Iterator[None]:
    """Errors about the prompt name the field that the client wrote."""
    try:
        yield
    except (ContextTooLong, InvalidRequest) as error:
        if error.param == "prompt":
            error.param = param
        raise
