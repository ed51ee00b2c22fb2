"""What a client may ask for: one validated model per endpoint; gRPC goes through the same ones.

A null counts as absent, at the top level and in nested objects. Unknown fields are ignored, since
clients of this API send many; a known field that would change the answer and is not supported is
refused by name. Every refusal is an InvalidRequest that names the field and the bad value.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from gateway.template import RESERVED
from slipstream.errors import InvalidRequest

MAX_CHOICES = 128
"""Most choices of one request: prompts times n."""

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
MAX_TOKENS = 2**31 - 1  # far above any window; the window is the scheduler's to check

Prompt = str | list[int]
"""One prompt: text, or token ids."""


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 120


def show(value: object) -> str:
    """`value` for a message, shortened."""
    return "null" if value is None else _short.repr(value)


def _refuse(param: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{param}: {wanted}, got {show(value)}", param)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _prompts(value: object) -> list[Prompt]:
    """The prompts of a `prompt` field: one text, one list of ids, or a list of either."""
    if isinstance(value, str):
        return [_nonempty("prompt", value)]
    if not isinstance(value, list):
        raise _refuse("prompt", "must be text, token ids, or a list of either", value)
    if not value:
        raise _refuse("prompt", "must not be empty", value)
    if not isinstance(value[0], str | list):
        return [_ids("prompt", value)]
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        param = f"prompt[{index}]"
        if type(item) is not type(value[0]):
            raise _refuse(param, "must be of the same kind as the first prompt", item)
        prompts.append(_nonempty(param, item) if isinstance(item, str) else _ids(param, item))
    return prompts


def _nonempty(param: str, text: str) -> str:
    if not text:
        raise _refuse(param, "must not be empty", text)
    return text


def _ids(param: str, value: list[Any]) -> list[int]:
    if not value:
        raise _refuse(param, "must not be empty", value)
    if not all(map(_is_id, value)):
        index = next(i for i, item in enumerate(value) if not _is_id(item))
        raise _refuse(f"{param}[{index}]", "must be a token id", value[index])
    return value


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _refuse("stop", "must be a string or a list of strings", value)
    if len(stops) > MAX_STOPS:
        raise _refuse("stop", f"must have at most {MAX_STOPS} strings", len(stops))
    for index, stop in enumerate(stops):
        param = "stop" if stops is not value else f"stop[{index}]"
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _refuse(param, f"must be a string of 1 to {MAX_STOP_CHARS} characters", stop)
    return stops


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, and what the template is told: templates know no developer."""


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _refuse("messages", "must be a list of at least one message", value)
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _message(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(param, "must be an object", value)
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refuse(f"{param}.role", f"must be one of {', '.join(ROLES)}", role)
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise _refuse(f"{param}.{name}", "is not supported yet", message[name])
    return message | {
        "role": ROLES[role],
        "content": _content(f"{param}.content", message.get("content")),
    }


def _content(param: str, value: object) -> str:
    """A message's text: a string, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refuse(param, "must be a string or a list of text parts", value)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _refuse(f"{param}[{index}].type", "only text parts are supported", kind)
        if not isinstance(part.get("text"), str):
            raise _refuse(f"{param}[{index}].text", "must be a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def _off(*neutral: object) -> Callable[[object], bool]:
    """Whether a value is one of those that change nothing; 0 and false are different values."""
    return lambda value: any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


_Neutral = Mapping[str, Callable[[object], bool]]

_UNSUPPORTED: _Neutral = {
    "min_p": _off(0),
    "presence_penalty": _off(0),
    "frequency_penalty": _off(0),
    "repetition_penalty": _off(1),
    "length_penalty": _off(1),
    "logit_bias": _off({}),
    "response_format": _off({"type": "text"}),
    "structured_outputs": _off(),
    "guided_json": _off(),
    "guided_regex": _off(),
    "guided_choice": _off([]),
    "guided_grammar": _off(),
    "bad_words": _off([]),
    "best_of": _off(1),
    "use_beam_search": _off(False),
    "include_stop_str_in_output": _off(False),
    "skip_special_tokens": _off(True),
    "prompt_logprobs": _off(),
    "truncate_prompt_tokens": _off(),
}
_UNSUPPORTED_COMPLETION: _Neutral = {
    **_UNSUPPORTED,
    "logprobs": _off(False),
    "echo": _off(False),
    "suffix": _off(""),
}
_UNSUPPORTED_CHAT: _Neutral = {
    **_UNSUPPORTED,
    "logprobs": _off(False),
    "top_logprobs": _off(0),
    "tools": _off([]),
    "tool_choice": _off("none", "auto"),
    "functions": _off([]),
    "function_call": _off("none", "auto"),
    "modalities": _off(["text"]),
    "audio": _off(),
    "web_search_options": _off(),
    "reasoning_effort": _off("none"),
    "verbosity": _off("medium"),
    "chat_template": _off(),
    "documents": _off([]),
    "continue_final_message": _off(False),
}


class _Body(BaseModel):
    """Strict types, nulls as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(_Body):
    """`include_usage`: one more chunk at the end, with the request's usage."""

    include_usage: bool = False


class Speculative(_Body):
    """`stats`: tell what drafting did. `enabled`: whether anything is drafted."""

    stats: bool = False
    enabled: bool = True


class GenerateBody(_Body):
    """What both endpoints share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS, description="0 and -1: off")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[str])] = (
        Field(default_factory=list)
    )
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(
        default_factory=list, max_length=MAX_STOP_IDS
    )
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    user: str | None = None
    speculative: Speculative = Speculative()

    @model_validator(mode="after")
    def _consistent(self) -> GenerateBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options: only allowed with stream true, got stream false", "stream_options"
            )
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise _refuse("min_tokens", f"must not exceed max_tokens ({limit})", self.min_tokens)
        return self

    @property
    def token_limit(self) -> int | None:
        """Output tokens at most; the newer of the two names wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(
            _prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    max_tokens: int | None = Field(16, ge=1, le=MAX_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _check_supported(data, _UNSUPPORTED_COMPLETION)

    @model_validator(mode="after")
    def _few_choices(self) -> CompletionBody:
        choices = len(self.prompt) * self.n
        if choices > MAX_CHOICES:
            raise _refuse("n", f"prompts times n must be at most {MAX_CHOICES}", choices)
        return self


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(_messages, json_schema_input_type=list[dict[str, Any]]),
    ]
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _check_supported(data, _UNSUPPORTED_CHAT)

    @model_validator(mode="after")
    def _free_variables(self) -> ChatBody:
        for name in self.chat_template_kwargs:
            if name in RESERVED:
                raise _refuse(
                    f"chat_template_kwargs.{name}",
                    "is the request's own",
                    self.chat_template_kwargs[name],
                )
        return self


def _check_supported(data: Any, neutral: _Neutral) -> Any:
    if isinstance(data, dict):
        for name in neutral.keys() & data.keys():
            if data[name] is not None and not neutral[name](data[name]):
                raise _refuse(name, "is not supported yet", data[name])
    return data


B = TypeVar("B", bound=GenerateBody)


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
