"""What a client may ask for: one validated model per endpoint; gRPC goes through the same ones.

A null counts as absent, at the top level and in nested objects. Unknown fields are ignored, since
clients of this API send many (`unknown_fields` names them); a known field that would change the
answer and is not supported is refused by name. Every refusal is an InvalidRequest that names the
field and the bad value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gateway import fields
from gateway.chat.messages import conversation
from gateway.chat.tools import Choice, Named, chosen, declarations
from gateway.fields import Neutral, Prompt, neutral, refuse, show
from gateway.request import MAX_LOGPROBS
from gateway.template import RESERVED
from slipstream.errors import InvalidRequest
from slipstream.wire import MAX_NODES

MAX_CHOICES = 128
"""Most choices of one request: prompts times n."""

MAX_STOP_IDS = 256
MAX_TOKENS = 2**31 - 1  # far above any window; the window is the scheduler's to check

_UNSUPPORTED: Mapping[str, Neutral] = {
    "length_penalty": neutral(1),
    "early_stopping": neutral(False),
    "use_beam_search": neutral(False),
    "guided_whitespace_pattern": neutral(),
    "allowed_token_ids": neutral([]),
    "truncate_prompt_tokens": neutral(),
    "spaces_between_special_tokens": neutral(True),
    "prompt_embeds": neutral(),
    "logits_processors": neutral([]),
    "custom_logit_processor": neutral(),
    "regex": neutral(),
    "ebnf": neutral(),
    "json_schema": neutral(),
    "structural_tag": neutral(),
    "stop_regex": neutral([], ""),
    "min_new_tokens": neutral(0),
    "lora_path": neutral(),
}
_UNSUPPORTED_COMPLETION: Mapping[str, Neutral] = {**_UNSUPPORTED, "suffix": neutral("")}
_UNSUPPORTED_CHAT: Mapping[str, Neutral] = {
    **_UNSUPPORTED,
    "echo": neutral(False),
    "suffix": neutral(""),
    "functions": neutral([]),
    "function_call": neutral("none", "auto"),
    "modalities": neutral(["text"]),
    "audio": neutral(),
    "web_search_options": neutral(),
    "reasoning_effort": neutral("none"),
    "verbosity": neutral("medium"),
    "chat_template": neutral(),
    "documents": neutral([]),
    "include_reasoning": neutral(True),
    "separate_reasoning": neutral(True),
}

_WITHOUT_EFFECT = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields of this API that change nothing here and are nobody's mistake."""


class _Body(BaseModel):
    """Strict types, nulls as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, Neutral]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unsupported.keys() & data.keys():
            if data[name] is not None and not cls.unsupported[name](data[name]):
                raise refuse(name, "is not supported", data[name])
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(_Body):
    """`include_usage`: one more chunk at the end, with the request's usage."""

    include_usage: bool = False


class Speculative(_Body):
    """`stats`: tell what drafting did. `enabled`: whether anything is drafted.

    `width` and `budget`: children per node and nodes of a tree (root included), at most the
    server's own.
    """

    stats: bool = False
    enabled: bool = True
    width: int | None = Field(default=None, ge=1, lt=MAX_NODES)
    budget: int | None = Field(default=None, ge=1, le=MAX_NODES)


class GenerateBody(_Body):
    """What both endpoints share. Sampling that is not given is the model's own default."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
    logit_bias: Annotated[
        dict[int, float],
        PlainValidator(fields.logit_bias, json_schema_input_type=dict[str, float]),
    ] = Field(default_factory=dict)
    bad_words: Annotated[
        list[str], PlainValidator(fields.words, json_schema_input_type=list[str])
    ] = Field(default_factory=list, description="words of one token each")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[
        list[str], PlainValidator(fields.stops, json_schema_input_type=str | list[str])
    ] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=fields.MAX_ID)]] = Field(
        default_factory=list, max_length=MAX_STOP_IDS
    )
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="equal to n")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = Field(None, description="a JSON schema, an object or its text")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="in llguidance's dialect of Lark")
    user: str | None = None
    speculative: Speculative = Speculative()

    @model_validator(mode="after")
    def _consistent(self) -> GenerateBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options: only allowed with stream true, got stream false", "stream_options"
            )
        if self.best_of not in (None, self.n):
            raise refuse("best_of", f"must be equal to n ({self.n})", self.best_of)
        if self.stream and self.prompt_logprobs is not None:
            raise refuse("prompt_logprobs", "not allowed with stream", self.prompt_logprobs)
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise refuse("min_tokens", f"must not exceed max_tokens ({limit})", self.min_tokens)
        return self

    @property
    def token_limit(self) -> int | None:
        """Output tokens at most; the newer of the two names wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def scores(self) -> int | None:
        """Log-probabilities of output tokens: None for none, else how many of the best."""
        return None

    @property
    def prompt_scores(self) -> int | None:
        """The same of prompt tokens."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with the prompt."""
        return False


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    unsupported = _UNSUPPORTED_COMPLETION

    prompt: Annotated[
        list[Prompt],
        PlainValidator(
            fields.prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    max_tokens: int | None = Field(16, ge=0, le=MAX_TOKENS, description="0: only with echo")
    echo: bool = False
    logprobs: Annotated[
        int | None, PlainValidator(fields.logprobs, json_schema_input_type=int | bool)
    ] = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        choices = len(self.prompt) * self.n
        if choices > MAX_CHOICES:
            raise refuse("n", f"prompts times n must be at most {MAX_CHOICES}", choices)
        if self.token_limit == 0 and not self.echo:
            raise refuse("max_tokens", "must be at least 1 without echo", 0)
        return self

    @property
    def scores(self) -> int | None:
        """As in `GenerateBody`."""
        return self.logprobs

    @property
    def prompt_scores(self) -> int | None:
        """With echo, prompt tokens are scored as the others are."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((k for k in wanted if k is not None), default=None)

    @property
    def echoes(self) -> bool:
        """As in `GenerateBody`."""
        return self.echo


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    unsupported = _UNSUPPORTED_CHAT

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(conversation, json_schema_input_type=list[dict[str, Any]]),
    ]
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[
        list[dict[str, Any]],
        PlainValidator(declarations, json_schema_input_type=list[dict[str, Any]]),
    ] = Field(default_factory=list)
    tool_choice: Annotated[
        Choice | Named, PlainValidator(chosen, json_schema_input_type=str | dict[str, Any])
    ] = Field("auto")
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = Field(
        None, description="default: true unless continue_final_message"
    )
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "only allowed with logprobs true", self.top_logprobs)
        if self.continue_final_message and self.add_generation_prompt:
            wanted = "not allowed with add_generation_prompt true"
            raise refuse("continue_final_message", wanted, True)
        for name in self.chat_template_kwargs:
            if name in RESERVED:
                raise refuse(
                    f"chat_template_kwargs.{name}",
                    "is the request's own",
                    self.chat_template_kwargs[name],
                )
        return self

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends where an answer begins."""
        wanted = self.add_generation_prompt
        return not self.continue_final_message if wanted is None else wanted

    @property
    def scores(self) -> int | None:
        """As in `GenerateBody`."""
        return self.top_logprobs if self.logprobs else None


class TokenizeBody(_Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatBody):
    """POST /tokenize with a conversation."""

    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=fields.MAX_ID)]]


def tokenize_body(data: object) -> type[TokenizeBody | TokenizeChatBody]:
    """Which of its two bodies POST /tokenize was given."""
    chat = isinstance(data, dict) and data.get("messages") is not None
    return TokenizeChatBody if chat else TokenizeBody


def unknown_fields(body: type[BaseModel], data: object) -> Iterator[str]:
    """Names in `data` that `body` does not know, those of nested objects with their path."""
    if not isinstance(data, dict):
        return
    unsupported: Mapping[str, Neutral] = getattr(body, "unsupported", {})
    for name, value in data.items():
        if name in body.model_fields:
            inner = _NESTED.get(name)
            if inner is not None:
                yield from (f"{name}.{part}" for part in unknown_fields(inner, value))
        elif name not in unsupported and name not in _WITHOUT_EFFECT:
            yield name


_NESTED: Mapping[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "speculative": Speculative,
}

B = TypeVar("B", bound=BaseModel)


def validate(body: type[B], data: object) -> B:
    """`data` (decoded JSON) as `body`. Raises InvalidRequest naming the first bad field."""
    try:
        return body.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def _explain(problem: ErrorDetails) -> InvalidRequest:
    param = _path(problem["loc"])
    if problem["type"] == "missing":
        return InvalidRequest(f"{param}: is required", param)
    if not param:
        return InvalidRequest(f"body: must be an object, got {show(problem['input'])}")
    return InvalidRequest(f"{param}: {problem['msg']}, got {show(problem['input'])}", param)


def _path(loc: Sequence[int | str]) -> str:
    """("stop_token_ids", 2) as stop_token_ids[2]."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
