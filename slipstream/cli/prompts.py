"""Prompt files: one JSON object a line, with `prompt`, `turns`, `messages` or `prompt_ids`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from slipstream.errors import ConfigError

Endpoint = Literal["auto", "chat", "completions"]
BUNDLED = Path(__file__).parent / "data" / "demo_prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row: a chat of `turns` after `messages`, or the completion of `prompt`.

    Exactly one of `turns` and `prompt` is set.
    """

    name: str
    messages: Sequence[dict[str, str]] = ()
    turns: Sequence[str] = ()
    prompt: str | Sequence[int] | None = None

    @property
    def texts(self) -> list[str]:
        """Every text that this row sends, to tell it from others."""
        own = [self.prompt] if isinstance(self.prompt, str) else []
        return [*own, *self.turns, *(message["content"] for message in self.messages)]


def load(path: Path, endpoint: Endpoint = "auto", limit: int | None = None) -> list[Conversation]:
    """The first `limit` rows of `path`.

    `auto` sends token ids to completions and all else to chat. Raises ConfigError naming the file,
    the line and what is wrong with it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts: {path}: {error.strerror}") from error
    rows: list[Conversation] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(rows) == limit:
            break
        try:
            rows.append(_row(orjson.loads(line), number, endpoint))
        except (orjson.JSONDecodeError, ValueError) as error:
            raise ConfigError(f"--prompts: {path}, line {number}: {error}") from error
    if not rows:
        raise ConfigError(f"--prompts: {path} has no prompts")
    return rows


def _row(row: Any, number: int, endpoint: Endpoint) -> Conversation:
    if not isinstance(row, dict):
        raise ValueError("want a JSON object")
    name = str(row.get("id", number))
    if "prompt_ids" in row:
        if endpoint == "chat":
            raise ValueError("prompt_ids cannot go to the chat endpoint")
        if not all(isinstance(item, int) for item in _filled(row, "prompt_ids", list)):
            raise ValueError("prompt_ids: want a list of integers")
        return Conversation(name, prompt=row["prompt_ids"])
    if "messages" in row:
        if endpoint == "completions":
            raise ValueError("messages cannot go to the completions endpoint")
        return _dialogue(name, _filled(row, "messages", list))
    if "turns" in row:
        turns = _filled(row, "turns", list)
        if not all(isinstance(turn, str) for turn in turns):
            raise ValueError("turns: want a list of strings")
        if endpoint == "completions":
            return Conversation(name, prompt=turns[0])
        return Conversation(name, turns=turns)
    if "prompt" in row:
        prompt = _filled(row, "prompt", str)
        if endpoint == "completions":
            return Conversation(name, prompt=prompt)
        return Conversation(name, turns=[prompt])
    raise ValueError("has none of prompt, turns, messages, prompt_ids")


def _filled(row: dict[str, Any], key: str, kind: type) -> Any:
    value = row[key]
    if not isinstance(value, kind) or not value:
        raise ValueError(f"{key}: want a {kind.__name__} that is not empty, got {value!r}")
    return value


def _dialogue(name: str, messages: list[Any]) -> Conversation:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"messages: want objects with role and content, got {message!r}")
    if messages[-1].get("role") != "user":
        raise ValueError("messages: the last one must be the user's")
    return Conversation(name, messages=messages[:-1], turns=[messages[-1]["content"]])
