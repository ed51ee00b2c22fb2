"""`slipstream chat`: talks to a running gateway in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.cli.client import (
    CHAT,
    Answer,
    Options,
    RequestFailed,
    ask,
    chat_body,
    client,
    model_name,
)
from slipstream.cli.console import BOLD, DIM, RESET, use_colour
from slipstream.errors import ConfigError
from slipstream.settings import ProcessSettings, parse

HELP = "/reset forgets the talk, /stats measures the last answer, /exit (or Ctrl-D) leaves"


class ChatSettings(ProcessSettings):
    """Talks to a running gateway. Ctrl-C stops an answer; /reset, /stats, /exit, /help."""

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_CHAT_", cli_prog_name="slipstream chat", cli_hide_none_type=True
    )

    url: str = Field("http://127.0.0.1:8000", description="the gateway")
    model: str | None = Field(None, description="default: the served one")
    system: str | None = Field(None, description="system message")
    max_tokens: int = Field(1024, ge=1, description="tokens of an answer at most")
    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass")
    seed: int | None = Field(None, description="default: random")
    draft: bool = Field(True, description="--no-draft asks for plain decoding")


class Chat:
    """A conversation.

    Attributes:
        messages: what was said, the system message first if there is one.
        last: the last answer, for its figures; after Ctrl-C None, since its end never came.
    """

    def __init__(self, settings: ChatSettings, model: str) -> None:
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None
        self._settings = settings
        self._options = Options(
            model=model,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            draft=settings.draft,
        )
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        system = self._settings.system
        self.messages = [{"role": "system", "content": system}] if system else []
        self.last = None

    def say(self, text: str) -> None:
        """Sends `text` and prints the answer as it comes; Ctrl-C keeps what came so far.

        Raises RequestFailed, and forgets `text` then.
        """
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        self.last = None
        try:
            self.last = asyncio.run(self._ask(said))
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except RequestFailed:
            self.messages.pop()
            raise
        finally:
            print()
        self.messages.append({"role": "assistant", "content": "".join(said)})

    async def _ask(self, said: list[str]) -> Answer:
        def show(text: str) -> None:
            said.append(text)
            print(text, end="", flush=True)

        async with client(self._settings.url) as http:
            return await ask(http, CHAT, chat_body(self.messages, self._options), show)


def figures(answer: Answer | None) -> str:
    """The last answer's figures in one line."""
    if answer is None:
        return "no answer to measure"
    parts = [f"{answer.prompt_tokens} + {answer.tokens} tokens"]
    if answer.ttft is not None:
        parts.append(f"first after {answer.ttft * 1e3:.0f} ms")
    if answer.time_per_token:
        parts.append(f"{1 / answer.time_per_token:.1f} tok/s")
    if answer.tau is not None:
        parts.append(f"tau {answer.tau:.2f} over {answer.steps} steps")
    return ", ".join(parts)


def main(argv: Sequence[str]) -> int:
    """Runs the chat; the exit status is 1 when the gateway cannot be reached, 2 for bad options."""
    # A shell starts what it runs in the background with the signal ignored, and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        settings = parse(ChatSettings, argv)
        chat = Chat(settings, settings.model or asyncio.run(_model(settings.url)))
    except (ConfigError, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and line editing
    colour = use_colour(sys.stdout)
    prompt = f"{BOLD}>{RESET} " if colour else "> "
    print(HELP)
    while True:
        try:
            line = input(prompt).strip()
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        except EOFError:
            print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line:
            _answer(chat, line, colour)


def _answer(chat: Chat, line: str, colour: bool) -> None:
    """One turn, or one command."""
    match line:
        case "/reset":
            chat.reset()
            print("(forgotten)")
        case "/stats":
            text = figures(chat.last)
            print(f"{DIM}{text}{RESET}" if colour else text)
        case _ if line.startswith("/"):
            print(HELP)
        case _:
            try:
                chat.say(line)
            except RequestFailed as error:
                print(f"error: {error}")


async def _model(url: str) -> str:
    async with client(url) as http:
        return await model_name(http)
