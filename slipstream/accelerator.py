"""Where a server computes: what it needs of an NVIDIA GPU, and whether the machine has it.

`look` is the only function that asks the machine; the others decide on what it found.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.models.budget import CONTEXT, USABLE, gib
from slipstream.models.dtype import parse_dtype

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Asynchronous copies and bf16 in the matrix units; older cards have neither."""

LEAST_TRITON = (3, 6)
LEAST_FLASHINFER = (0, 6)

PATIENCE_S = 10.0
"""How long memory is waited for: the driver takes back a dead process's a moment later."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU; memory in bytes."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    bf16: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process sees of GPUs and of the software for them.

    Attributes:
        cuda: the CUDA version that torch was built for; None for a build without.
        count: GPUs that this process may use.
        card: the one that was asked for; None when it is not there.
        driver, triton, flashinfer: versions; None when missing.
        compiler: the C compiler that Triton builds its launchers with.
    """

    cuda: str | None = None
    count: int = 0
    card: Card | None = None
    driver: str | None = None
    triton: str | None = None
    flashinfer: str | None = None
    compiler: str | None = None


Look = Callable[[int], Facts]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server computes, and in what.

    Attributes:
        device: "cpu" or "cuda:N".
        total: bytes of the GPU's memory; 0 on a CPU.
        share: part of it that this process may hold in all; 0 on a CPU.
    """

    device: str
    dtype: torch.dtype
    total: int = 0
    share: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def where(place: Place) -> str:
    """The place for a log."""
    if place.on_gpu:
        return f"{place.device}, {place.share:.1%} of {gib(place.total)}"
    return f"{torch.get_num_threads()} threads"


def look(index: int) -> Facts:
    """Asks this process's machine about GPU `index`; opens the device when it is there."""
    count = torch.cuda.device_count() if torch.version.cuda else 0
    card = None
    if index < count:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        capability = (properties.major, properties.minor)
        card = Card(properties.name, capability, total, free, bf16)
    return Facts(
        torch.version.cuda,
        count,
        card,
        _driver(),
        _version("triton"),
        _version("flashinfer-python"),
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
    )


def find_place(
    device: str,
    dtype: str = "auto",
    share: float | None = None,
    *,
    flashinfer: bool = False,
    look: Look = look,
) -> Place:
    """Resolves --device, --dtype and --memory-share.

    `auto` is the first GPU when it has what is needed, else the CPU: said in the log where there is
    a GPU that could not be used.

    Args:
        device: auto, cpu, cuda or cuda:N.
        share: part of the GPU's memory; None: `USABLE` of what is free.
        flashinfer: whether it was asked for.

    Raises ConfigError naming flag and value, and what is missing.
    """
    index = int(device.partition(":")[2] or 0)
    facts = Facts() if device == "cpu" else look(index)
    if device == "cpu" or (device == "auto" and not _usable(facts)):
        if share is not None:
            raise ConfigError(f"--memory-share: {share:g} needs a GPU, --device {device} is a CPU")
        return Place("cpu", parse_dtype(dtype, "cpu"))
    check_device(facts, device, dtype, flashinfer=flashinfer)
    card = _with_memory(facts, device, share, look)
    return Place(
        f"cuda:{index}",
        parse_dtype(dtype, "cuda"),
        card.total,
        share or USABLE * card.free / card.total,
    )


def check_device(facts: Facts, device: str, dtype: str = "auto", *, flashinfer: bool) -> Card:
    """The card, when it and the software have what the servers need.

    Raises ConfigError naming --device (or the backend's flag) and what is missing.
    """
    flag = f"--device: {device}"
    if facts.cuda is None:
        raise ConfigError(f"{flag}: this torch ({torch.__version__}) was built without CUDA")
    if facts.count == 0:
        driver = f"driver {facts.driver}" if facts.driver else "no NVIDIA driver"
        raise ConfigError(f"{flag}: no GPU can be used ({driver}, torch for CUDA {facts.cuda})")
    card = facts.card
    if card is None:
        raise ConfigError(f"{flag}: there are {facts.count} GPUs, from cuda:0 on")
    if card.capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, c)) for c in (card.capability, LEAST_CAPABILITY))
        raise ConfigError(f"{flag}: {card.name} has compute capability {has}, {needs} is needed")
    if dtype != "float32" and not card.bf16:
        raise ConfigError(f"{flag}: {card.name} does not compute bfloat16; use --dtype float32")
    if not _at_least(facts.triton, LEAST_TRITON):
        found = f"triton {facts.triton} is too old" if facts.triton else "triton is not installed"
        raise ConfigError(f"{flag}: {found}, {_dotted(LEAST_TRITON)} or newer is needed")
    if facts.compiler is None:
        raise ConfigError(f"{flag}: triton needs a C compiler: install gcc, or name one in CC")
    if flashinfer and not _at_least(facts.flashinfer, LEAST_FLASHINFER):
        version = facts.flashinfer
        found = f"version {version} is too old" if version else "it is not installed"
        raise ConfigError(
            f"--prefill-attention-backend: flashinfer: {found}, flashinfer-python "
            f"{_dotted(LEAST_FLASHINFER)} or newer is needed"
        )
    return card


def check_share(card: Card, device: str, share: float) -> None:
    """Raises ConfigError when less memory is free than the share; a context may be open already."""
    wanted = int(share * card.total)
    if card.free + CONTEXT < wanted:
        raise ConfigError(
            f"--memory-share: {share:g} of {card.name} ({device}) is {gib(wanted)}, "
            f"{gib(card.free)} of {gib(card.total)} are free"
        )


def attention_backend(place: Place, wanted: str) -> str:
    """`torch` or `triton` for --attention-backend. Raises ConfigError for triton on a CPU."""
    if wanted == "triton" and not place.on_gpu:
        raise ConfigError("--attention-backend: triton needs a GPU, --device is cpu")
    if wanted == "auto":
        return "triton" if place.on_gpu else "torch"
    return wanted


def prefill_backend(place: Place, wanted: str, decode: str) -> str:
    """`torch`, `triton` or `flashinfer` for --prefill-attention-backend, beside that of `decode`.

    `auto` is never FlashInfer: it is a little faster in itself, but launches outside of graphs,
    after which all kernels may be slower (`slipstream.layers.kernel_gaps`).

    Raises ConfigError for a backend that the device, the type or the other one does not go with.
    """
    flag = "--prefill-attention-backend"
    if wanted in ("triton", "flashinfer") and not place.on_gpu:
        raise ConfigError(f"{flag}: {wanted} needs a GPU, --device is cpu")
    if wanted == "flashinfer" and place.dtype == torch.float32:
        raise ConfigError(f"{flag}: flashinfer has no float32; use triton or torch, or bfloat16")
    if wanted == "triton" and decode == "torch":
        raise ConfigError(f"{flag}: triton goes with --attention-backend triton, not torch")
    return decode if wanted == "auto" else wanted


def prepare(place: Place, outside: int = 0) -> None:
    """Makes the GPU this process's current one, exact in fp32, and holds its memory to the share.

    TF32 would round what fp32 promises to keep. What does not go through torch's allocator is
    within `CONTEXT`, but for `outside` bytes.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(place.device)
    limit = place.share - (CONTEXT + outside) / place.total
    torch.cuda.set_per_process_memory_fraction(min(max(limit, 0.0), 1.0), place.device)


@contextmanager
def memory_errors(place: Place) -> Iterator[None]:
    """Turns running out of the share into a ConfigError that says so."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--memory-share: {place.share:.3g} of {gib(place.total)} on {place.device} is not "
            f"enough: {str(error).splitlines()[0]}"
        ) from error


def used(place: Place) -> int:
    """Bytes that torch holds on the GPU, after what is cached and free was given back."""
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(place.device))


def describe_gpu(index: int = 0, look: Look = look) -> dict[str, Any] | None:
    """The GPU and its software, ready for JSON; None where there is none."""
    facts = look(index)
    if facts.card is None:
        return None
    versions = {"cuda": facts.cuda, "triton": facts.triton, "flashinfer": facts.flashinfer}
    return {
        "name": facts.card.name,
        "capability": _dotted(facts.card.capability),
        "memory_bytes": facts.card.total,
        "count": facts.count,
        "driver": facts.driver,
        "versions": {name: version for name, version in versions.items() if version},
    }


def _usable(facts: Facts) -> bool:
    """Whether `auto` takes the GPU."""
    if facts.count == 0:
        return False
    try:
        check_device(facts, "auto", flashinfer=False)
    except ConfigError as error:
        log.warning("computing on the CPU: %s", error)
        return False
    return True


def _with_memory(facts: Facts, device: str, share: float | None, look: Look) -> Card:
    """The card once it has the share free. Raises ConfigError when it does not come free."""
    assert facts.card is not None
    card, until = facts.card, time.monotonic() + PATIENCE_S
    while share is not None:
        try:
            check_share(card, device, share)
            break
        except ConfigError:
            if time.monotonic() > until:
                raise
        time.sleep(0.2)
        card = look(int(device.partition(":")[2] or 0)).card or card
    return card


def _at_least(version: str | None, least: tuple[int, ...]) -> bool:
    found = re.match(r"\d+(\.\d+)*", version or "")
    return found is not None and tuple(map(int, found[0].split("."))) >= least


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None
