"""How families of models write tool calls and thinking, and how a chat template gives that away.

A checkpoint says in no field which way its model was trained to call tools. Its chat template
shows it, since it writes earlier calls of the conversation in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError

ToolParserName = Literal["auto", "none", "hermes", "llama3_json", "json"]
ReasoningParserName = Literal["auto", "none", "think"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a call is written: a JSON object with a name and arguments, and what stands around it.

    Attributes:
        opening: the mark before calls; empty when there is none.
        closing: the mark after a call; empty when there is none.
        bare: whether an answer that begins with JSON is a call too, if it names a declared tool.
        key: name of the arguments when the format is enforced; all of `ARGUMENT_KEYS` are read.
        before, after: what stands between the marks and the object when enforced.
        between: what stands between two calls when enforced.
        list: whether several calls are enforced as a JSON list.
    """

    name: str
    opening: str = ""
    closing: str = ""
    bare: bool = False
    key: str = "arguments"
    before: str = ""
    after: str = ""
    between: str = "\n"
    list: bool = False


ARGUMENT_KEYS = ("arguments", "parameters")

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", before="\n", after="\n")
"""Hermes, and Qwen 2.5 and 3: each call in its own pair of marks."""

LLAMA3 = ToolFormat("llama3_json", "<|python_tag|>", bare=True, key="parameters", between="; ")
"""Llama 3.1 to 3.3: the answer is the call, with or without the mark before it."""

JSON = ToolFormat("json", bare=True, list=True, between=", ")
"""For models of no known family: the answer is one call, or a list of calls."""

_FORMATS = {item.name: item for item in (HERMES, LLAMA3, JSON)}


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """The marks around a thinking part at the beginning of an answer."""

    opening: str = "<think>"
    closing: str = "</think>"


THINK = ThinkFormat()


def tool_format(name: ToolParserName, template: str) -> ToolFormat | None:
    """The format called `name`; for "auto" what the template's source shows. None: calls are text.

    Raises ConfigError for a name that is not known.
    """
    if name == "none":
        return None
    if name != "auto":
        if name not in _FORMATS:
            raise ConfigError(f"--tool-parser: {name!r} is not one of {', '.join(_FORMATS)}")
        return _FORMATS[name]
    # Some templates of Hermes' marks hold no JSON between them but tags of their own.
    if HERMES.opening in template and "<function=" not in template:
        return HERMES
    if LLAMA3.opening in template:
        return LLAMA3
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA3
    return JSON


def think_format(name: ReasoningParserName, template: str) -> ThinkFormat | None:
    """The format called `name`; for "auto" what the template's source shows. None: no thinking."""
    if name == "none" or (name == "auto" and THINK.closing not in template):
        return None
    return THINK
