"""Fields whose values are more than one type can say: prompts, stop strings, biases.

Each function takes decoded JSON and returns the field's value, or raises an InvalidRequest that
names the field, the index within it, and the bad value.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

from gateway.request import MAX_LOGPROBS
from slipstream.errors import InvalidRequest
from slipstream.params import MAX_BIAS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_WORDS = 1024
MAX_BIASES = 1024
MAX_ID = 2**31 - 1
_MOST_NAME = 100

Prompt = str | list[int]
"""One prompt: text, or token ids."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 120


def show(value: object) -> str:
    """`value` for a message, shortened."""
    return "null" if value is None else _short.repr(value)


def short(name: str) -> str:
    """A client's own name for something, as part of a `param`."""
    return name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}..."


def refuse(param: str, wanted: str, value: object) -> InvalidRequest:
    """The error for a bad `value` of the field `param`."""
    return InvalidRequest(f"{param}: {wanted}, got {show(value)}", param)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def prompts(value: object) -> list[Prompt]:
    """The prompts of a `prompt` field: one text, one list of ids, or a list of either."""
    if isinstance(value, str):
        return [_nonempty("prompt", value)]
    if not isinstance(value, list):
        raise refuse("prompt", "must be text, token ids, or a list of either", value)
    if not value:
        raise refuse("prompt", "must not be empty", value)
    if not isinstance(value[0], str | list):
        return [ids("prompt", value)]
    found: list[Prompt] = []
    for index, item in enumerate(value):
        param = f"prompt[{index}]"
        if type(item) is not type(value[0]):
            raise refuse(param, "must be of the same kind as the first prompt", item)
        found.append(_nonempty(param, item) if isinstance(item, str) else ids(param, item))
    return found


def _nonempty(param: str, text: str) -> str:
    if not text:
        raise refuse(param, "must not be empty", text)
    return text


def ids(param: str, value: list[Any]) -> list[int]:
    """A list of at least one token id."""
    if not value:
        raise refuse(param, "must not be empty", value)
    if not all(map(_is_id, value)):
        index = next(i for i, item in enumerate(value) if not _is_id(item))
        raise refuse(f"{param}[{index}]", "must be a token id", value[index])
    return value


def stops(value: object) -> list[str]:
    """Stop strings: one, or a list of them."""
    if isinstance(value, str):
        return [_text("stop", value)]
    return _texts("stop", value, MAX_STOPS)


def words(value: object) -> list[str]:
    """Words that the answer must not have."""
    return _texts("bad_words", value, MAX_WORDS)


def _texts(param: str, value: object, most: int) -> list[str]:
    if not isinstance(value, list):
        raise refuse(param, "must be a list of strings", value)
    if len(value) > most:
        raise refuse(param, f"must have at most {most} strings", len(value))
    return [_text(f"{param}[{index}]", item) for index, item in enumerate(value)]


def _text(param: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_STOP_CHARS:
        raise refuse(param, f"must be a string of 1 to {MAX_STOP_CHARS} characters", value)
    return value


def logit_bias(value: object) -> dict[int, float]:
    """Token ids, as JSON has the keys of objects, and what is added to their logits."""
    if not isinstance(value, dict):
        raise refuse("logit_bias", "must be an object of token ids and numbers", value)
    if len(value) > MAX_BIASES:
        raise refuse("logit_bias", f"must have at most {MAX_BIASES} tokens", len(value))
    found: dict[int, float] = {}
    for key, bias in value.items():
        text = str(key)
        if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= MAX_ID):
            raise refuse("logit_bias", "must have token ids as keys", key)
        if text != str(int(text)):  # else two keys could say the same token
            raise refuse("logit_bias", "must have keys without leading zeros", key)
        if not _is_number(bias) or abs(bias) > MAX_BIAS:
            wanted = f"must be a number from -{MAX_BIAS:g} to {MAX_BIAS:g}"
            raise refuse(f"logit_bias.{text}", wanted, bias)
        found[int(text)] = float(bias)
    return found


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def logprobs(value: object) -> int | None:
    """The `logprobs` of a completion: how many of the best tokens; false is none at all."""
    if value is False:
        return None
    if type(value) is not int or not 0 <= value <= MAX_LOGPROBS:
        raise refuse("logprobs", f"must be a number from 0 to {MAX_LOGPROBS}", value)
    return value


Neutral = Callable[[object], bool]
"""Whether a value of a field changes nothing."""


def neutral(*values: object) -> Neutral:
    """Only `values` change nothing; 0 and false are different values."""
    return lambda value: any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in values
    )
