"""`slipstream up`: from options to three running processes, and back to none."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.cli.console import Console
from slipstream.cli.launcher import SERVERS, CellCommands, Launcher, LaunchFailed
from slipstream.cli.mps import PrivateMps, client_environment
from slipstream.cli.process import Child, describe_status
from slipstream.cli.recovery import RestartPolicy
from slipstream.cli.up_devices import (
    Devices,
    place,
    torch_has_cuda,
    visible_gpus,
    with_mps,
    with_shares,
)
from slipstream.cli.up_settings import (
    BUNDLED_HEADS,
    EMBEDDED_TARGET,
    LOOPBACK,
    UpSettings,
    check,
    free_port,
)
from slipstream.errors import ConfigError
from slipstream.settings import parse


@dataclass(frozen=True, slots=True)
class Programs:
    """How each process is started, without its flags; tests put other programs in their place."""

    target: tuple[str, ...]
    draft: tuple[str, ...]
    gateway: tuple[str, ...]
    prepare: tuple[str, ...]


def _module(name: str) -> tuple[str, ...]:
    # -P: a folder called `gateway` where the command is run must not be taken for ours.
    return (sys.executable, "-P", "-m", name)


PROGRAMS = Programs(
    target=_module("services.target"),
    draft=_module("services.draft"),
    gateway=_module("gateway"),
    prepare=_module("slipstream.models.prepare"),
)

Flag = tuple[str, object]
T = TypeVar("T")


def main(argv: Sequence[str], programs: Programs = PROGRAMS) -> int:
    """Runs a cell until a signal or a failure; returns the exit status.

    0: stopped by a signal; 1: a process failed; 2: bad options.
    """
    console = Console()
    try:
        settings = check(parse(UpSettings, argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_run(settings, programs, console))


async def launcher_for(
    settings: UpSettings,
    programs: Programs,
    console: Console,
    restarts: RestartPolicy | None = None,
) -> Launcher:
    """A launcher for checked `settings`, with the models prepared. Raises LaunchFailed."""
    if settings.draft == "none" and settings.target != EMBEDDED_TARGET:
        console.say(f"no draft: name one that was made for {settings.target} with --draft")
    target = await _prepared(settings.target, programs, console)
    draft = settings.draft or "none"
    if draft != "none" and draft not in BUNDLED_HEADS:
        draft = await _prepared(draft, programs, console)
    gpus = visible_gpus()
    try:
        devices = place(settings, gpus, torch_has_cuda=torch_has_cuda())
        devices = with_shares(settings, devices, gpus, target, draft)
        if gpus:
            console.say(str(devices))
        devices = with_mps(settings, devices, gpus)
    except ConfigError as error:
        raise LaunchFailed(str(error)) from error
    return Launcher(
        commands(settings, programs, target, draft, devices),
        console,
        restarts=restarts,
        restarted=SERVERS if settings.restart else (),
        mps=PrivateMps(devices.gpu) if devices.mps else None,
        needs_mps=settings.handoff == "cuda_ipc",
        in_turn=devices.in_turn,
        grace_s=settings.drain_s + 5.0,
        start_timeout_s=settings.start_timeout_s,
    )


def commands(
    settings: UpSettings, programs: Programs, target: str, draft: str, devices: Devices
) -> CellCommands:
    """Command lines for checked `settings`; `draft` is a folder, a bundled head or none.

    The ports of target and draft are picked here, once: a server comes back where the gateway looks
    for it.
    """
    drafts = draft != "none"
    target_port = free_port(settings.port, settings.grpc_port)
    draft_port = free_port(settings.port, settings.grpc_port, target_port)
    names = served_names(settings)
    shared: list[Flag] = [
        ("model", target),
        ("draft", draft),
        ("host", LOOPBACK),
        ("dtype", settings.dtype),
        ("slots", settings.slots),
        ("attention-backend", settings.attention_backend),
        ("no-cuda-graphs", None if settings.cuda_graphs else True),
        ("random-weights", settings.random_weights or None),
        ("threads", settings.threads),
        ("step-limit-s", settings.step_limit_s),
        ("log-level", settings.log_level),
    ]
    for_target: list[Flag] = [
        *shared,
        ("port", target_port),
        ("device", devices.target),
        ("memory-share", devices.target_share),
        ("prefill-attention-backend", settings.prefill_attention_backend),
        ("handoff", settings.handoff),
        ("max-model-len", settings.max_model_len),
        ("served-name", names[0]),
        ("drain-s", settings.drain_s),
    ]
    for_draft: list[Flag] = [
        *shared,
        ("port", draft_port),
        ("device", devices.draft),
        ("handoff", "grpc" if settings.handoff == "grpc" else None),
        ("memory-share", devices.draft_share),
        ("tree", settings.tree),
        ("width", settings.width),
        ("budget", settings.budget),
        ("speculative-config", settings.speculative_config),
    ]
    for_gateway: list[Flag] = [
        ("target", f"{LOOPBACK}:{target_port}"),
        ("draft", f"{LOOPBACK}:{draft_port}" if drafts else "none"),
        ("tokenizer", settings.tokenizer or target),
        ("host", settings.host),
        ("port", settings.port),
        ("grpc-port", settings.grpc_port),
        ("served-model-name", ",".join(names)),
        ("tool-parser", settings.tool_parser),
        ("reasoning-parser", settings.reasoning_parser),
        ("chat-template-kwargs", settings.chat_template_kwargs),
        ("generation-config", settings.generation_config),
        ("max-output-tokens", settings.max_output_tokens),
        ("pipeline-depth", settings.pipeline_depth),
        ("ping-pong", settings.ping_pong),
        ("pin-nodes", True if settings.pins_nodes else None),
        ("drain-s", settings.drain_s),
        ("log-level", settings.log_level),
    ]
    return CellCommands(
        target=(*programs.target, *_flags(for_target)),
        draft=(*programs.draft, *_flags(for_draft)) if drafts else None,
        gateway=(*programs.gateway, *_flags(for_gateway)),
        server_environment=client_environment(devices.gpu),
    )


def served_names(settings: UpSettings) -> list[str]:
    """The API's names of the model: by default a folder's own, otherwise as it was written."""
    folder = _folder(settings.target)
    return settings.served_model_name or [Path(folder).name if folder else settings.target]


def _folder(name: str) -> str | None:
    """The absolute path of `name` when it is a folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else None


def _flags(flags: Sequence[Flag]) -> list[str]:
    """Those that have a value; the others keep the default of their process."""
    words = []
    for name, value in flags:
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


async def _prepared(name: str, programs: Programs, console: Console) -> str:
    """The folder of `name`, downloaded or converted by another process when it is not one yet."""
    folder = _folder(name)
    if folder is not None:
        return folder
    argv = (*programs.prepare, name)
    child = await Child.start("prepare", argv, lambda line: console.line("prepare", line))
    try:
        status = await child.wait()
    except asyncio.CancelledError:
        child.signal(signal.SIGKILL)
        await child.wait()
        raise
    if status != 0 or not child.stdout_lines:
        why = child.last_line or describe_status(status)
        raise LaunchFailed(f"{name} cannot be prepared: {why}")
    return child.stdout_lines[-1]


async def _run(settings: UpSettings, programs: Programs, console: Console) -> int:
    stop = _stop_on_signals()
    launcher: Launcher | None = None
    try:
        launcher = await _or_stop(launcher_for(settings, programs, console), stop.first)
        if launcher is None:
            return 0
        stop.then(launcher.kill)
        ready = await _or_stop(launcher.start(), stop.first)
        if ready is not None:
            announce(settings, ready)
            reason = await _or_stop(launcher.failure(), stop.first)
            if reason is not None:
                raise LaunchFailed(reason)
        console.say("stopping; once more to kill")
        await launcher.stop()
        return 0
    except LaunchFailed as failed:
        if launcher is not None:
            await launcher.stop(orderly=False)
        print(f"error: {failed}", file=sys.stderr)
        return 1
    finally:  # of an error that nobody expected, too, no daemon may be left
        if launcher is not None:
            await launcher.stop(orderly=False)


def base_url(ready: dict[str, str]) -> str:
    """Where a client on this machine reaches the gateway that said `ready`."""
    return f"http://{ready['http'].replace('0.0.0.0', LOOPBACK)}"


def announce(settings: UpSettings, ready: dict[str, str]) -> None:
    """Prints where the cell listens and a call to try."""
    url = base_url(ready)
    model = served_names(settings)[0]
    body = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 96, "messages": '
        f'[{{"role": "user", "content": "What is 12 times 7?"}}]}}'
    )
    print(f"\nReady: {url}/v1 (REST), {ready['grpc']} (gRPC). Ctrl-C stops. Try:\n")
    print(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\")
    print(f"    -d {shlex.quote(body)}")
    print(f"  slipstream chat --url {url}\n", flush=True)


@dataclass(slots=True)
class _Stop:
    """`first` is set by the first signal; the second calls what `then` was given."""

    first: asyncio.Event
    second: Callable[[], None] | None = None

    def then(self, second: Callable[[], None]) -> None:
        self.second = second

    def signal(self) -> None:
        if self.first.is_set() and self.second is not None:
            self.second()
        self.first.set()


def _stop_on_signals() -> _Stop:
    stop = _Stop(asyncio.Event())
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is under nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, stop.signal)
    return stop


async def _or_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`, or None when `stop` came first; `work` is cancelled then."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        working.cancel()
        stopped.cancel()
        await asyncio.wait((working, stopped))
