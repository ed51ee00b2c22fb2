"""From a validated body to what the scheduler, the text and the answer's shape need of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from gateway.chat.answer import AnswerFormat
from gateway.checkpoint import Checkpoint
from gateway.defaults import SamplingDefaults
from gateway.fields import refuse
from gateway.generation import ShownPrompt, Wishes
from gateway.logprobs import LogprobShape
from gateway.openai import AnswerShape, Kind
from gateway.request import GenerateParams, ModelInfo
from gateway.schemas import CompletionBody, GenerateBody
from gateway.stops import StopStrings
from gateway.stream import Decoder, Detokenizer, TextStream
from gateway.tokenizer import Tokenizer
from slipstream.grammar import Grammar

_SEED_MASK = 2**64 - 1
_LEAST_MASS = 2.0**-100  # the wire is fp32, where 0 means off


def end_ids(info: ModelInfo, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer by themselves."""
    # Chat checkpoints exist whose config.json names only the base model's end token, while the
    # template's end of turn is the tokenizer's: they would never stop.
    own = tokenizer.eos_id
    ids = frozenset(info.eos_ids)
    return ids if own is None or own >= info.vocab_size else ids | {own}


@dataclass(frozen=True, slots=True)
class Restriction:
    """What an answer may not be.

    Attributes:
        most: tokens of the answer at most, None: as many as the window holds.
        end_ids: tokens that end an answer by themselves.
        banned: tokens that are never drawn.
        grammar, param: what binds it, and the client's field that says so.
    """

    most: int | None
    end_ids: frozenset[int]
    banned: Sequence[int] = ()
    grammar: Grammar | None = None
    param: str = ""


def most_tokens(body: GenerateBody, cap: int) -> int | None:
    """How long the answers may become, where the client or `cap` says so; 0: no cap."""
    wanted = body.token_limit
    if cap == 0:
        return wanted
    return cap if wanted is None else min(wanted, cap)


def choice_params(
    body: GenerateBody,
    prompt: Sequence[int],
    info: ModelInfo,
    *,
    defaults: SamplingDefaults,
    restriction: Restriction,
) -> partial[GenerateParams]:
    """The parameters of a prompt's choices, but for their number."""
    room = max(info.max_model_len - len(prompt), 1)  # no room at all: the scheduler refuses
    limit = room if restriction.most is None else restriction.most
    wanted, end_ids = body.speculative, restriction.end_ids

    def given(name: str) -> float:
        value = getattr(body, name)
        return float(getattr(defaults, name) if value is None else value)

    return partial(
        GenerateParams,
        prompt_ids=tuple(prompt),
        max_tokens=limit,
        min_tokens=min(body.min_tokens, limit),
        stop_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else end_ids),
        temperature=given("temperature"),
        top_p=max(given("top_p"), _LEAST_MASS),
        top_k=max(int(given("top_k")), 0),
        min_p=given("min_p"),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=given("repetition_penalty"),
        logit_bias=body.logit_bias,
        banned_ids=tuple(restriction.banned),
        seed=None if body.seed is None else body.seed & _SEED_MASK,
        logprobs=body.scores,
        prompt_logprobs=body.prompt_scores,
        grammar=restriction.grammar,
        grammar_param=restriction.param,
        draft=wanted.enabled,
        width=wanted.width,
        budget=wanted.budget,
    )


def text_stream(
    body: GenerateBody,
    tokenizer: Tokenizer,
    stops: StopStrings | None,
    offset: int,
    marks: Collection[str] = (),
) -> TextStream:
    """The text of one choice that begins after `offset` characters.

    `marks` are shown even where they are special tokens.
    """
    return TextStream(
        decoder_of(body, tokenizer, marks),
        stops,
        body.min_tokens,
        keep_stop=body.include_stop_str_in_output,
        scored=body.scores is not None,
        offset=offset,
    )


def decoder_of(body: GenerateBody, tokenizer: Tokenizer, marks: Collection[str] = ()) -> Decoder:
    """Shows special tokens, or does not, as the client wishes; those in `marks` always."""
    if not body.skip_special_tokens:
        return tokenizer.literal
    ids = {token for mark in marks if (token := tokenizer.token_id(mark)) is not None}
    return tokenizer.showing({token for token in ids if tokenizer.is_silent(token)})


async def shown_prompt(
    body: CompletionBody, ids: Sequence[int], text: str | None, tokenizer: Tokenizer
) -> ShownPrompt:
    """A prompt as the answers may show it; `text` is None for one that came as ids."""
    if not body.echo:
        return ShownPrompt(ids)
    decoder = decoder_of(body, tokenizer)
    if body.scores is None:
        return ShownPrompt(ids, decoder.decode(ids) if text is None else text)
    # Milliseconds for a long prompt: other requests' text must not wait for it.
    if text is None:
        return ShownPrompt(ids, *await asyncio.to_thread(_lay_out, decoder, ids))
    # The client wrote its special tokens out. What the tokenizer put before them is not in `text`.
    whole, offsets = await asyncio.to_thread(_lay_out, tokenizer.literal, ids)
    added = max(whole.find(text), 0)
    return ShownPrompt(ids, text, [min(max(offset - added, 0), len(text)) for offset in offsets])


def _lay_out(decoder: Decoder, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of `ids`, and where each token's part of it begins."""
    stream, parts, length = Detokenizer(decoder), [], 0
    offsets = []
    for token in ids:
        offsets.append(length)
        parts.append(stream.push([token]))
        length += len(parts[-1])
    parts.append(stream.flush())
    return "".join(parts), offsets


def banned_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The tokens that say one of `words`, after a space too.

    Raises InvalidRequest naming a word that is not one token.
    """
    found: list[int] = []
    for index, word in enumerate(words):
        bare = word.lstrip(" ")
        forms = {form: tokenizer.encode_now(form) for form in (word, bare, f" {bare}") if form}
        if len(forms[word]) != 1:
            wanted = f"must be a single token, but is {len(forms[word])}"
            raise refuse(f"bad_words[{index}]", wanted, word)
        found += [ids[0] for ids in forms.values() if len(ids) == 1]
    return sorted(set(found))


def wishes_of(body: GenerateBody, eos_ids: frozenset[int], form: AnswerFormat) -> Wishes:
    """What the client wants beside the text."""
    return Wishes(
        stats=body.speculative.stats,
        echo=body.echoes,
        scored=body.scores is not None,
        stop_ids=frozenset(body.stop_token_ids) - (frozenset() if body.ignore_eos else eos_ids),
        form=form,
    )


def answer_shape(kind: Kind, body: GenerateBody, checkpoint: Checkpoint) -> AnswerShape:
    """How the answer is written."""

    def shape(top: int | None) -> LogprobShape | None:
        if top is None:
            return None
        names = checkpoint.tokenizer.vocabulary
        return LogprobShape(names, top, body.return_tokens_as_token_ids)

    return AnswerShape(
        kind,
        include_usage=body.include_usage,
        logprobs=shape(body.scores),
        prompt_logprobs=shape(body.prompt_logprobs),
        token_ids=body.return_token_ids,
    )
