"""Requests from either door to the scheduler: the one implementation behind REST and gRPC."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from gateway.generation import Bridge, Generation
from gateway.metrics import FrontMetrics
from gateway.request import GenerateParams, ModelInfo
from gateway.schemas import ChatBody, CompletionBody, GenerateBody, Prompt
from gateway.stream import StopStrings, TextStream
from gateway.template import ChatTemplate
from gateway.tokenizer import Tokenizer
from slipstream.errors import (
    ContextTooLong,
    Draining,
    InvalidRequest,
    NotFound,
    PeerLost,
)

_SEED_MASK = 2**64 - 1


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
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        metrics: FrontMetrics,
        served_name: str | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._bridge = bridge
        self._tokenizer = tokenizer
        self._template = template
        self._served_name = served_name
        self.metrics = metrics
        self.draining = False
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
    def model(self) -> str:
        """The name clients use. Raises as `info`."""
        return self._served_name or self.info().model

    async def completion(self, body: CompletionBody) -> Generation:
        """Starts a completion. Raises RequestError, Draining or PeerLost; then nothing runs."""
        self._check_model(body.model)
        prompts = await self._encode(body.prompt)
        return self._start(f"cmpl-{uuid.uuid4().hex}", body, prompts)

    async def chat(self, body: ChatBody) -> Generation:
        """Starts an answer to a conversation. Raises as `completion`."""
        self._check_model(body.model)
        if self._template is None:
            raise InvalidRequest("messages: the model has no chat template", "messages")
        text = self._template.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        )
        prompts = await self._tokenizer.encode([text], special=False)
        with _prompt_is("messages"):
            return self._start(f"chatcmpl-{uuid.uuid4().hex}", body, prompts)

    def _check_model(self, name: str | None) -> None:
        served = self.model
        if name and name != served:
            raise NotFound(f"model: {name!r} does not exist, this server has {served!r}", "model")

    async def _encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            return await self._tokenizer.encode(texts, special=True)
        return [prompt for prompt in prompts if isinstance(prompt, list)]

    def _start(self, name: str, body: GenerateBody, prompts: Sequence[list[int]]) -> Generation:
        info = self.info()
        generation = Generation(
            name,
            self.model,
            sum(map(len, prompts)),
            self._bridge,
            self._scheduler.cancel,
            self.metrics,
            want_stats=body.speculative.stats,
            done=self._forget,
        )
        stops = StopStrings(body.stop) if body.stop else None
        try:
            for prompt in prompts:
                params = self._params(body, prompt, info)
                for choice in range(body.n):
                    generation.add(
                        TextStream(self._tokenizer, stops, body.min_tokens),
                        partial(self._scheduler.submit, params(choice=choice)),
                    )
        except BaseException:
            generation.cancel()
            raise
        self.metrics.prompt_tokens.add(generation.prompt_tokens)
        self._active.add(generation)
        self._idle.clear()
        return generation

    def _params(
        self, body: GenerateBody, prompt: Sequence[int], info: ModelInfo
    ) -> partial[GenerateParams]:
        """The request's parameters, but for the number of the choice."""
        room = max(info.max_model_len - len(prompt), 1)  # no room at all: the scheduler refuses
        limit = body.token_limit or room
        stop_ids = frozenset(body.stop_token_ids)
        if not body.ignore_eos:
            stop_ids |= frozenset(info.eos_ids) | self._own_eos(info)
        return partial(
            GenerateParams,
            prompt_ids=tuple(prompt),
            max_tokens=limit,
            min_tokens=min(body.min_tokens, limit),
            stop_ids=stop_ids,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            seed=None if body.seed is None else body.seed & _SEED_MASK,
            draft=body.speculative.enabled,
        )

    def _own_eos(self, info: ModelInfo) -> frozenset[int]:
        # Chat checkpoints exist whose config.json names only the base model's end token, while the
        # template's end of turn is the tokenizer's: they would never stop.
        eos = self._tokenizer.eos_id
        return frozenset() if eos is None or eos >= info.vocab_size else frozenset((eos,))

    def _forget(self, generation: Generation) -> None:
        self._active.discard(generation)
        if not self._active:
            self._idle.set()

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
