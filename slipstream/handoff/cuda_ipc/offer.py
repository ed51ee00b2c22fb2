"""The offer of device memory in the handoff's greeting, and what a draft checks of it."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.handoff.base import PeerSpec
from slipstream.handoff.layout import SETS, Layout
from slipstream.v1 import handoff_pb2

MOST_BYTES = 1 << 42
"""Of one export: more than a GPU has, less than sums overflow at."""


class Refused(Exception):
    """Why a session goes over gRPC; the message is the reason."""


def boot_id() -> str:
    """Identifies the running node, also from within a container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def offer_of(
    layout: Layout, export_id: int, gpu: str, handle: bytes, segment: str, which: int, probe: int
) -> handoff_pb2.DeviceOffer:
    return handoff_pb2.DeviceOffer(
        export_id=export_id,
        boot_id=boot_id(),
        pid=os.getpid(),
        gpu_uuid=gpu,
        memory_handle=handle,
        segment=segment,
        set=which,
        probe=probe,
        slots=layout.slots,
        pages=layout.pages,
        page_size=layout.page_size,
        table_pages=layout.table_pages,
    )


def layout_of(offer: handoff_pb2.DeviceOffer, spec: PeerSpec) -> Layout:
    """The layout that `offer` describes for a session of `spec`. Raises Refused."""
    if not offer.boot_id or offer.boot_id != boot_id():
        raise Refused("target and draft run on two nodes")
    sizes = (offer.slots, offer.pages, offer.page_size, offer.table_pages)
    if min(sizes) < 1 or offer.set >= SETS or not 0 < offer.probe < 1 << 62:
        raise Refused("the offer is not usable")
    if offer.slots > spec.slots:
        raise Refused(f"the offer has {offer.slots} slots, the draft {spec.slots}")
    layout = Layout(
        slots=offer.slots,
        pages=offer.pages,
        page_size=offer.page_size,
        table_pages=offer.table_pages,
        width=spec.feature_width,
        dtype=spec.feature_dtype,
    )
    if layout.bytes > MOST_BYTES:
        raise Refused(f"the offer is of {layout.bytes} bytes")
    return layout
