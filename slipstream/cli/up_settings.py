"""Options of `slipstream up`, and the checks that need no model."""

from __future__ import annotations

import json
import random
import re
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.errors import ConfigError
from slipstream.hardware import cores
from slipstream.settings import Device, Names, ProcessSettings
from slipstream.tree.spec import read_speculative_config

EMBEDDED_TARGET = "smollm2-135m-instruct"
BUNDLED_HEADS = ("jetspec", "dflash")
LOOPBACK = "127.0.0.1"
LOW_PORTS = range(10_000, 32_768)
HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class UpSettings(ProcessSettings):
    """Starts target, draft and gateway, shows one log, and stops all three on Ctrl-C.

    Every option is also a variable SLIPSTREAM_UP_<NAME>. Options that only one process has reach it
    through its own variables: SLIPSTREAM_TARGET_*, SLIPSTREAM_DRAFT_*, SLIPSTREAM_GATEWAY_*.
    """

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_UP_", cli_prog_name="slipstream up", cli_hide_none_type=True
    )

    target: str = Field(EMBEDDED_TARGET, description="folder, hub id or embedded name of the model")
    draft: str | None = Field(
        None,
        description="jetspec, dflash (heads of the embedded model), a folder, a hub id, or none; "
        "default: jetspec for the embedded model, else none",
    )
    tree: Literal["chain", "top2gap", "accum_logp", "best_first"] | None = Field(
        None, description="how drafts grow; this, --width and --budget pin the nodes of every step"
    )
    width: int | None = Field(None, ge=1, le=255, description="children per node; 1 is the chain")
    budget: int | None = Field(
        None, ge=1, le=256, description="nodes of a request's tree, root included"
    )
    speculative_config: str | None = Field(
        None, description="the tree as a JSON object, in place of --tree, --width and --budget"
    )
    pipeline_depth: int | None = Field(
        None, ge=0, le=1, description="plans that run ahead; 0 is lock-step"
    )
    ping_pong: Literal["auto", "on", "off"] | None = Field(
        None, description="draft one half of the requests while the other half is verified"
    )
    handoff: Literal["auto", "grpc", "cuda_ipc"] = Field(
        "auto",
        description="how features and trees go between target and draft; auto: cuda_ipc where "
        "both are on GPUs of this machine that allow it, else grpc",
    )
    mps: Literal["auto", "off"] = Field(
        "auto",
        description="a private MPS daemon; auto: where target and draft share a GPU and the "
        "handoff may be cuda_ipc",
    )
    restart: bool = Field(
        True, description="whether a target or draft that died is started again; else the cell ends"
    )
    step_limit_s: float | None = Field(
        None,
        ge=0,
        description="a step of target or draft that takes longer ends it, as if it had died; "
        "0: no limit; default: 300",
    )
    host: str = Field(LOOPBACK, description="address of the API")
    port: int = Field(8000, ge=0, le=65535, description="REST port; 0: any free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port; 0: any free one")
    served_model_name: Names = Field(
        default_factory=list,
        description="model names that clients use, the usual one first; default: the target's",
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "json"] | None = Field(
        None, description="how tool calls are written; auto: as the chat template shows"
    )
    reasoning_parser: Literal["auto", "none", "think"] | None = Field(
        None, description="the thinking part to split off; auto: as the chat template shows"
    )
    chat_template_kwargs: str | None = Field(
        None, description="JSON object of variables for the chat template; a request's own win"
    )
    generation_config: Literal["model", "off"] | None = Field(
        None, description="sampling that requests leave open: generation_config.json's, or none"
    )
    max_output_tokens: int | None = Field(
        None, ge=0, description="most tokens of an answer, whatever is asked for; 0: no such cap"
    )
    device: Device = Field(
        "auto",
        description="auto, cpu, cuda or cuda:N, for both; auto and cuda: a GPU each, or one for "
        "both; auto without a GPU: cpu",
    )
    target_device: Device | None = Field(None, description="of the target only")
    draft_device: Device | None = Field(None, description="of the draft only")
    memory_share: float | None = Field(
        None,
        gt=0,
        le=0.98,
        description="part of a GPU's memory that its servers take; default: 0.92. On one GPU the "
        "draft gets what it needs, the target the rest",
    )
    target_memory_share: float | None = Field(None, gt=0, le=0.98, description="of the target only")
    draft_memory_share: float | None = Field(None, gt=0, le=0.98, description="of the draft only")
    attention_backend: Literal["auto", "torch", "triton"] | None = Field(
        None, description="attention of both but in prefill; auto: triton on a GPU"
    )
    prefill_attention_backend: Literal["auto", "torch", "triton", "flashinfer"] | None = Field(
        None, description="attention of prefill; auto: that of the other steps"
    )
    cuda_graphs: bool = Field(True, description="GPU: whether steps are CUDA graphs")
    random_weights: bool = Field(
        False, description="make weights up: the model folders need no more than config.json"
    )
    tokenizer: str | None = Field(
        None, description="folder or hub id of the tokenizer; default: the target's"
    )
    dtype: Literal["auto", "bfloat16", "float32"] | None = Field(
        None, description="auto: bfloat16 where the device computes it"
    )
    max_model_len: int | None = Field(None, ge=2, description="most tokens of prompt and answer")
    slots: int | None = Field(None, ge=1, description="requests that run at once")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of target and of draft; default: all cores for both"
    )
    drain_s: float = Field(
        5.0, ge=0, description="seconds that running requests get to finish at the end"
    )
    start_timeout_s: float = Field(600.0, gt=0, description="seconds that a start may take")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")

    @property
    def pins_nodes(self) -> bool:
        """Whether the tree was given by hand, so that every step verifies all of it."""
        given = (self.tree, self.width, self.budget, self.speculative_config)
        return any(value is not None for value in given)


def check(settings: UpSettings) -> UpSettings:
    """`settings` with the draft named and the threads counted.

    Raises ConfigError naming the flag and its value, for what can be seen before a process starts.
    """
    _check_tree(settings)
    _check_handoff(settings)
    _check_shares(settings)
    _check_chat(settings)
    check_name("--target", settings.target, (EMBEDDED_TARGET,))
    embedded = settings.target == EMBEDDED_TARGET
    draft = settings.draft or (BUNDLED_HEADS[0] if embedded else "none")
    if draft == "none" and settings.handoff == "cuda_ipc":
        raise ConfigError("--handoff: cuda_ipc is between target and draft, --draft is none")
    if draft != "none":
        check_name("--draft", draft, BUNDLED_HEADS)
    elif settings.pins_nodes:
        raise ConfigError(
            "--draft: none draws no tree; drop --tree, --width, --budget and --speculative-config"
        )
    check_port("--port", settings.host, settings.port)
    check_port("--grpc-port", settings.host, settings.grpc_port)
    if settings.port and settings.port == settings.grpc_port:
        raise ConfigError(f"--grpc-port: {settings.grpc_port} is the --port already")
    return settings.model_copy(update={"draft": draft, "threads": settings.threads or cores()})


def check_name(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is in `known`, a model folder, or looks like a hub id."""
    if value in known:
        return
    path = Path(value).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{flag}: {value!r} holds no config.json")
        return
    if path.exists():
        raise ConfigError(f"{flag}: {value!r} is a file, not a model folder")
    if not _HUB_ID.fullmatch(value) or value.startswith("."):
        raise ConfigError(
            f"{flag}: {value!r} is no folder, no hub id (owner/name) and none of {', '.join(known)}"
        )


def check_port(flag: str, host: str, port: int) -> None:
    """Raises ConfigError when `port` cannot be listened on; 0 is always fine."""
    if port == 0:
        return
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host: {host!r} cannot be resolved: {error.strerror}") from error
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"{flag}: cannot listen on {host}:{port}: {error.strerror}"
            ) from error


def free_port(*others: int) -> int:
    """A TCP port of the loopback interface that nobody has now, none of `others`.

    Below those that the kernel hands out, where there is room: else another program's connection
    could have it before its server binds it, or while that server is away to be restarted.
    """
    low = random.sample(LOW_PORTS, 32) if _first_handed_out() >= LOW_PORTS.stop else []
    for wanted in (*low, *[0] * 32):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, wanted))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if port not in others:
            return port
    raise ConfigError(f"no free TCP port on {LOOPBACK}")


def _first_handed_out() -> int:
    """The first port that connections and port 0 get; 0 where nobody says."""
    try:
        return int(HANDED_OUT.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _check_tree(settings: UpSettings) -> None:
    text = settings.speculative_config
    if text is None:
        if settings.tree == "chain" and settings.width not in (None, 1):
            raise ConfigError(f"--width: {settings.width}: a --tree chain has width 1")
        return
    for flag in ("tree", "width", "budget"):
        if getattr(settings, flag) is not None:
            raise ConfigError(f"--{flag}: say it in --speculative-config, or leave that out")
    try:
        read_speculative_config(text)
    except ConfigError as error:
        raise ConfigError(f"--speculative-config: {error}") from error


def _check_chat(settings: UpSettings) -> None:
    text = settings.chat_template_kwargs
    try:
        if text is None or isinstance(json.loads(text), dict):
            return
    except ValueError:
        pass
    raise ConfigError(f"--chat-template-kwargs: {text!r} is not a JSON object")


def _check_shares(settings: UpSettings) -> None:
    """A CPU's memory is not shared out."""
    on_cpu = [
        (device or settings.device) == "cpu"
        for device in (settings.target_device, settings.draft_device)
    ]
    for flag, refused in (
        ("memory_share", all(on_cpu)),
        ("target_memory_share", on_cpu[0]),
        ("draft_memory_share", on_cpu[1]),
    ):
        value = getattr(settings, flag)
        if refused and value is not None:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name}: {value:g} needs a GPU, the device is cpu")


def _check_handoff(settings: UpSettings) -> None:
    if settings.handoff != "cuda_ipc":
        return
    check_on_gpus(
        settings.target_device or settings.device, settings.draft_device or settings.device
    )


def check_on_gpus(target: str, draft: str) -> None:
    """Raises ConfigError where cuda_ipc was asked for and one of these devices is a CPU."""
    if "cpu" in (target, draft):
        raise ConfigError(
            f"--handoff: cuda_ipc needs target and draft on NVIDIA GPUs of this machine, "
            f"got --target-device {target}, --draft-device {draft}"
        )
