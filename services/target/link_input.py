"""What a step exchanges with the session's draft on devices, as the engine says it.

The engine names the plan's entries; everything that depends on lengths happens in kernels
(`slipstream.kernels.handoff`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.target.runner import Link
from slipstream.handoff.layout import RING, ring_entry
from slipstream.kernels.handoff import (
    COUNT,
    EPOCH,
    FIRST_JOB,
    FIRST_NODE,
    JOB,
    LAST,
    LINK_COLUMNS,
    LINK_HEAD,
    LIVE,
    MOST,
    SLOT,
    STEP,
    Rings,
    StepLink,
)
from slipstream.kernels.handoff import RING as RING_WORD
from slipstream.layers.staging import Upload

EPOCHS = 2**63 - 1
"""Epochs above are those of entries that nobody computes: what is said of them says nothing."""


class Shared(Protocol):
    """Memory that a draft may map; `slipstream.handoff.cuda_ipc.Export` is some.

    Attributes:
        tables: (slots, pages of a slot) int32, a copy for the draft: the target never reads it.
        records, heads, nodes: see `slipstream.handoff.layout`.
    """

    tables: Tensor
    records: Tensor
    heads: Tensor
    nodes: Tensor


def rings_of(
    shared: Shared | None, slots: int, pages: int, device: torch.device
) -> tuple[Tensor | None, Rings]:
    """The block tables for the draft, if there may be one, and the rings."""
    if shared is None:
        return None, Rings.none(slots, device)
    if shared.tables.shape != (slots, pages):
        raise ValueError(f"tables must be {(slots, pages)}, not {tuple(shared.tables.shape)}")
    return shared.tables, Rings(shared.records, shared.heads, shared.nodes)


class LinkInput:
    """The packed buffer of plans of up to `entries` entries; more than that are not said."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self._entries = entries
        size = LINK_HEAD + LINK_COLUMNS * entries
        self._upload = Upload((size,), torch.int64, device, RING)
        buffer = self._upload.device
        self.link = StepLink(buffer[:LINK_HEAD], buffer[LINK_HEAD:].view(entries, LINK_COLUMNS))
        host = self._upload.host()
        host[RING_WORD.value] = -1
        self._upload.send()
        self._silent = True

    def send(self, link: Link | None, first_job: int = 0, last: bool = True) -> None:
        """Copies the part of a step that begins with job `first_job`; None: nobody takes part."""
        if link is None and self._silent and first_job == 0:
            return  # the device knows
        host = self._upload.host()
        head = host[:LINK_HEAD]
        head[FIRST_JOB.value], head[LAST.value] = first_job, last
        self._silent = link is None and first_job == 0
        if link is None:
            head[RING_WORD.value] = -1
            self._upload.send(LINK_HEAD)
            return
        entries = link.entries[: self._entries]
        head[RING_WORD.value] = ring_entry(link.end.which, link.step)
        head[STEP.value], head[COUNT.value] = link.step, len(entries)
        table = host[LINK_HEAD:].reshape(-1, LINK_COLUMNS)
        for column, values in (
            (SLOT, [e.slot for e in entries]),
            (EPOCH, [e.epoch & EPOCHS for e in entries]),
            (MOST, [e.most for e in entries]),
            (FIRST_NODE, [e.first_node for e in entries]),
            (JOB, [e.job for e in entries]),
            (LIVE, [e.live for e in entries]),
        ):
            table[: len(entries), column.value] = np.array(values, np.int64)
        self._upload.send(LINK_HEAD + LINK_COLUMNS * len(entries))
