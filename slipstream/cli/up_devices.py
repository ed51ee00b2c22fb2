"""Which GPU each server of a cell gets, and which part of its memory.

Known before a process starts, without torch: a draft that comes back is given the same share again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from slipstream.cli.up_settings import UpSettings, check_on_gpus
from slipstream.errors import ConfigError
from slipstream.models.budget import (
    DRAFT_SLOTS,
    TARGET_SLOTS,
    USABLE,
    Load,
    Shares,
    plan_shares,
)
from slipstream.models.bundled import bundled_head
from slipstream.models.config import load_config
from slipstream.models.draft_config import load_draft_config

LEAST_CAPABILITY = (8, 0)
"""What `auto` takes; a server says what an older card lacks."""

WHOLE = 0.98
"""Most of a GPU that two servers may be given together."""

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,compute_cap")
_FORMAT = "--format=csv,noheader,nounits"
_QUERY_S = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, in the order in which CUDA numbers them; memory in bytes."""

    memory: int
    capability: tuple[int, int]
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Devices:
    """What --device and --memory-share each server is started with; a share is None on a CPU.

    Attributes:
        draft: "" in a cell without a draft.
        mps: whether the two are to be clients of one MPS daemon.
        gpu: UUID of the only GPU that the servers see; "": they see all.
        tokens: for which target and draft both have pages, where they share a GPU.
    """

    target: str
    draft: str
    target_share: float | None = None
    draft_share: float | None = None
    tokens: int | None = None
    mps: bool = False
    gpu: str = ""

    @property
    def shared(self) -> bool:
        """Whether both are on one GPU."""
        return self.target == self.draft and self.target.startswith("cuda")

    @property
    def in_turn(self) -> bool:
        """Whether both compute on the same device, so that their starts would disturb each other.

        `auto` is left where no GPU was found.
        """
        on_cpu = [device in ("cpu", "auto") for device in (self.target, self.draft)]
        return all(on_cpu) or self.shared

    def __str__(self) -> str:
        def one(name: str, device: str, share: float | None) -> str:
            return f"{name} on {device}" + (f" ({share:.1%} of it)" if share else "")

        said = [one("target", self.target, self.target_share)]
        if self.draft:
            said.append(one("draft", self.draft, self.draft_share))
        if self.tokens is not None:
            said.append(f"pages for {self.tokens} tokens")
        return ", ".join(said)


def visible_gpus(
    query: Callable[[], str] | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this cell; none where they cannot be told.

    `query` gives lines of index, uuid, memory in MiB, compute capability; default: nvidia-smi's.
    """
    known: dict[str, Gpu] = {}
    for line in (query or _nvidia_smi)().splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 4 or not words[2].isdecimal():
            continue
        major, _, minor = words[3].partition(".")
        capability = (int(major), int(minor)) if major.isdecimal() else LEAST_CAPABILITY
        known[words[0]] = known[words[1]] = Gpu(int(words[2]) << 20, capability, words[1])
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpu for name, gpu in known.items() if name.isdecimal())
    found: list[Gpu] = []
    for name in (word.strip() for word in wanted.split(",")):
        fits = [uuid for uuid in known if uuid == name or (len(name) > 4 and uuid.startswith(name))]
        if len(fits) != 1:  # CUDA, too, stops at the first that it does not know
            break
        found.append(known[fits[0]])
    return tuple(found)


def place(settings: UpSettings, gpus: Sequence[Gpu], *, torch_has_cuda: bool = True) -> Devices:
    """Devices for checked `settings`, without shares.

    A server that may choose (`auto`, `cuda`) gets a GPU that the other has not, if there are two.
    """
    target = settings.target_device or settings.device
    draft = (settings.draft_device or settings.device) if settings.draft != "none" else ""
    if torch_has_cuda:
        target = _chosen(target, gpus, other=draft)
        draft = _chosen(draft, gpus, other=target)
    return Devices(target, draft)


def with_shares(
    settings: UpSettings, devices: Devices, gpus: Sequence[Gpu], target: str, draft: str
) -> Devices:
    """`devices` with the shares of their GPUs' memory, for the models in the folders given.

    Args:
        draft: a folder or a bundled head's name; none.

    Raises ConfigError when there is no GPU to share, when both are on one whose size cannot be
    told, or that is too small, and when shares that were given are more than it has.
    """
    if settings.memory_share and not (devices.target + devices.draft).count("cuda"):
        raise ConfigError(f"--memory-share: {settings.memory_share:g} needs a GPU, none was found")
    for name, device, part in (
        ("target", devices.target, settings.target_memory_share),
        ("draft", devices.draft, settings.draft_memory_share),
    ):
        if part and not device.startswith("cuda"):
            where = f"is on {device}" if device else "is not started"
            raise ConfigError(f"--{name}-memory-share: {part:g} needs a GPU, the {name} {where}")
    usable = settings.memory_share or USABLE
    shares = {
        name: (given or usable) if device.startswith("cuda") else given
        for name, device, given in (
            ("target", devices.target, settings.target_memory_share),
            ("draft", devices.draft, settings.draft_memory_share),
        )
    }
    given = replace(devices, target_share=shares["target"], draft_share=shares["draft"])
    if not devices.shared:
        return given
    if settings.target_memory_share and settings.draft_memory_share:
        return _within(given, WHOLE)
    index = int(devices.target.partition(":")[2] or 0)
    if index >= len(gpus):
        raise ConfigError(f"--device: {devices.target} is for target and draft, but {_there(gpus)}")
    plan = _plan(settings, gpus[index].memory, usable, target, draft)
    of_draft = settings.draft_memory_share or plan.draft
    if settings.target_memory_share:
        return _within(replace(given, draft_share=of_draft), settings.memory_share or WHOLE)
    of_target = round(usable - of_draft, 4)
    if of_target <= 0:
        raise ConfigError(f"--draft-memory-share: {of_draft:g} leaves nothing of {usable:g}")
    tokens = None if settings.draft_memory_share else plan.tokens
    return replace(given, target_share=of_target, draft_share=of_draft, tokens=tokens)


def with_mps(settings: UpSettings, devices: Devices, gpus: Sequence[Gpu]) -> Devices:
    """`devices` as they are under MPS, if that is to be: one GPU, the first of what servers see.

    Raises ConfigError where cuda_ipc was asked for and there are no GPUs for it.
    """
    if settings.handoff == "cuda_ipc":
        seen = (devices.target.replace("auto", "cpu"), devices.draft.replace("auto", "cpu"))
        check_on_gpus(*seen)
    if not devices.shared or settings.mps == "off" or settings.handoff == "grpc":
        return devices
    index = int(devices.target.partition(":")[2] or 0)
    uuid = gpus[index].uuid if index < len(gpus) else ""
    if not uuid:
        return replace(devices, mps=True)
    return replace(devices, target="cuda:0", draft="cuda:0", mps=True, gpu=uuid)


def _within(devices: Devices, whole: float) -> Devices:
    """`devices` whose shares of one GPU are at most `whole` together. Raises ConfigError."""
    target, draft = devices.target_share or 0.0, devices.draft_share or 0.0
    if target + draft > whole:
        raise ConfigError(
            f"--target-memory-share: {target:g} and the draft's {draft:g} of one GPU are more than"
            f" {whole:g} of it"
        )
    return devices


def _there(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return (
            "nvidia-smi names no GPU; where one is all the same, divide it by"
            " --target-memory-share and --draft-memory-share"
        )
    return f"{len(gpus)} GPU{'s are' if len(gpus) > 1 else ' is'} there, numbered from 0"


def torch_has_cuda() -> bool:
    """Whether the installed torch can be built for CUDA: its CPU wheels say so in the version."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _chosen(device: str, gpus: Sequence[Gpu], other: str) -> str:
    """`device` with its number, as far as GPUs are known."""
    fit = [
        f"cuda:{number}"
        for number, gpu in enumerate(gpus)
        if device == "cuda" or gpu.capability >= LEAST_CAPABILITY
    ]
    if device not in ("auto", "cuda") or not fit:
        return device
    return next((name for name in fit if name != other), fit[0])


def _plan(settings: UpSettings, total: int, usable: float, target: str, draft: str) -> Shares:
    config = load_config(Path(target))
    head = load_draft_config(bundled_head(draft) or Path(draft))
    load = Load(
        item=4 if settings.dtype == "float32" else 2,
        max_len=settings.max_model_len or config.max_position_embeddings,
        slots=settings.slots or TARGET_SLOTS,
        draft_slots=settings.slots or DRAFT_SLOTS,
    )
    return plan_shares(total, config, head, load, usable)


def _nvidia_smi() -> str:
    """What it prints; nothing where there is none."""
    try:
        done = subprocess.run(
            [*_QUERY, _FORMAT], capture_output=True, text=True, timeout=_QUERY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
