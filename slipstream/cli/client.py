"""A streaming client of the gateway's REST API that keeps the time of every chunk.

Shared by bench, chat and demo. Times are `time.perf_counter` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

try:
    import httpx
except ImportError as error:  # pragma: no cover - depends on the installation
    raise SystemExit("error: this command needs httpx: pip install 'slipstream[client]'") from error

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

OnText = Callable[[str], None]


class RequestFailed(Exception):
    """The gateway refused or broke off a request; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for, beside its prompt; None leaves a field to the gateway."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    draft: bool = True

    def body(self) -> dict[str, Any]:
        """The request's fields, streamed, with usage and what drafting did."""
        fields = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return given | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculative": {"stats": True, "enabled": self.draft},
        }


@dataclass(slots=True)
class Answer:
    """One streamed answer.

    Attributes:
        sent: when the request left.
        chunk_times: when each chunk that carried text came.
        tokens, prompt_tokens: as the gateway's usage counts them.
        accepted, nodes: draft tokens accepted and nodes verified, one item per verify step.
        steps: verify steps.
    """

    sent: float
    text: str = ""
    finish: str | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    accepted: Sequence[int] = ()
    nodes: Sequence[int] = ()
    chunk_times: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None for an answer without any."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds per token after the first chunk; None for answers of one chunk."""
        if self.tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks; with a draft a chunk often carries several tokens."""
        times = self.chunk_times
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    @property
    def tau(self) -> float | None:
        """(emitted tokens - 1) / verify steps: the bonus counts, the prefill's token does not."""
        return (self.tokens - 1) / self.steps if self.steps else None

    def take(self, event: dict[str, Any], now: float) -> str:
        """Adds one stream event and returns its text. Raises RequestFailed on an error event."""
        if "error" in event:
            raise RequestFailed(_message(event["error"]))
        usage = event.get("usage")
        if usage:
            self.tokens = usage["completion_tokens"]
            self.prompt_tokens = usage["prompt_tokens"]
        self._take_stats(event.get("speculative"))
        text = ""
        for choice in event.get("choices", ()):
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
            self._take_stats(choice.get("speculative"))
        if text:
            self.text += text
            self.chunk_times.append(now)
        return text

    def _take_stats(self, stats: dict[str, Any] | None) -> None:
        if stats:
            self.steps = stats["steps"]
            self.accepted = stats.get("accepted", ())
            self.nodes = stats.get("nodes", ())


def client(url: str, connections: int = 1, timeout_s: float = 600.0) -> httpx.AsyncClient:
    """A client for `connections` streams at once; no proxy, since it measures the gateway."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
    )


async def ask(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], on_text: OnText | None = None
) -> Answer:
    """Sends one request and reads its stream to the end.

    Raises RequestFailed when the gateway cannot be reached, refuses, or breaks off.
    """
    answer = Answer(time.perf_counter())
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise RequestFailed(_refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                text = answer.take(orjson.loads(line[6:]), time.perf_counter())
                if text and on_text is not None:
                    on_text(text)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{http.base_url}: {error or type(error).__name__}") from error
    answer.ended = time.perf_counter()
    if answer.finish is None:
        raise RequestFailed("the stream ended before the answer did")
    return answer


async def model_name(http: httpx.AsyncClient) -> str:
    """The name of the served model. Raises RequestFailed when the gateway cannot be reached."""
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise RequestFailed(f"{http.base_url}: {error or type(error).__name__}") from error
    if response.status_code != 200:
        raise RequestFailed(_refusal(response.status_code, response.content))
    return str(response.json()["data"][0]["id"])


def chat_body(messages: Sequence[dict[str, str]], options: Options) -> dict[str, Any]:
    """Body of a chat request."""
    return {"messages": list(messages), **options.body()}


def completion_body(prompt: str | Sequence[int], options: Options) -> dict[str, Any]:
    """Body of a completion request; `prompt` is text or token ids."""
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options.body()}


def _refusal(status: int, content: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(orjson.loads(content)['error'])}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"HTTP {status}: {content[:200].decode('utf-8', 'replace')}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
