"""Segments, peers, limits and what is checked of an offer."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.handoff.cuda_ipc import Export, Mapper
from slipstream.handoff.cuda_ipc.driver import CudaError
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.memory import _over, views
from slipstream.handoff.cuda_ipc.offer import Refused, layout_of
from slipstream.handoff.cuda_ipc.peer import Peer
from slipstream.handoff.cuda_ipc.pool import Pool
from slipstream.handoff.cuda_ipc.segment import FOLDER, Segment, sweep
from slipstream.handoff.cuda_ipc.signals import HostSignals
from slipstream.handoff.cuda_ipc.times import Times, Waits
from slipstream.handoff.layout import RELEASED, RING, SETS, Flag, Layout
from tests.fakes.device_steps import LAYOUT, SPEC
from tests.waiting import until

CPU = torch.device("cpu")
NAME = "slipstream-00000000deadbeef-flags"
OWNER = f"""
from slipstream.handoff.cuda_ipc.segment import Segment
segment = Segment.create({NAME!r}, 100)
print("ready", flush=True)
input()
"""


def owner() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_a_segment_is_shared_and_goes_with_its_owner() -> None:
    mine = Segment.create(NAME, 5000)
    theirs = Segment.open(NAME, 5000)
    assert mine.size == theirs.size == 8192 and mine.address % 4096 == 0
    mine.words[7] = 1 << 62
    assert int(theirs.words[7]) == 1 << 62 and os.stat(FOLDER / NAME).st_mode & 0o777 == 0o600
    theirs.close()
    mine.close()
    assert not (FOLDER / NAME).exists()


def test_a_segment_of_a_dead_process_is_removed_and_a_living_one_is_not() -> None:
    process = owner()
    try:
        sweep()
        assert (FOLDER / NAME).exists()
        mapped = Segment.open(NAME, 100)
    finally:
        end(process)
    assert (FOLDER / NAME).exists()
    sweep()
    assert not (FOLDER / NAME).exists()
    mapped.words[0] = 3  # still mapped here
    mapped.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "slipstream-1-flags", NAME + "x", ""])
def test_only_names_of_segments_are_opened(name: str) -> None:
    with pytest.raises(ConfigError, match="not the name"):
        Segment.open(name, 8)


def test_a_segment_too_small_or_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Segment.open(NAME, 8)
    mine = Segment.create(NAME, 100)
    with pytest.raises(ConfigError, match="4096 bytes"):
        Segment.open(NAME, 5000)
    mine.close()


def test_a_peer_is_gone_a_while_after_its_process() -> None:
    process = owner()
    peer, stranger = Peer(process.pid, NAME, 0.1), Peer(process.pid, "another")
    assert not peer.gone()
    end(process)
    assert not peer.gone()
    time.sleep(0.15)
    assert peer.gone() and not stranger.gone() and not Peer(process.pid, NAME).gone()
    peer.close()
    sweep()


def test_a_set_comes_back_only_when_nobody_can_touch_it() -> None:
    segment = Segment.create(NAME, 8 * LAYOUT.flag_words)
    lanes = [Lane(segment, HostSignals(segment), which) for which in range(SETS)]
    pool = Pool(lanes, NAME, Times(settle=0.0, untouched=0.1))
    taken = [pool.take() for _ in range(SETS)]
    assert [lane.which for lane in taken if lane] == list(range(SETS)) and pool.take() is None
    refused, silent, began, released = lanes
    pool.give_up(refused, refused=True)
    assert pool.free == 1
    process = owner_of_set(began)
    for lane in (silent, began, released):
        pool.give_up(lane)
    assert pool.free == 1
    released.store(Flag.DRAFT_BEAT, RELEASED)
    assert pool.free == 2
    time.sleep(0.15)
    assert pool.free == 3  # the draft never began and will not now
    end(process)
    assert pool.free == 4 and pool.close("over", 1.0)
    segment.close()


@pytest.mark.parametrize("beat", [-(1 << 31) - 1, -(1 << 40), -(1 << 63), (1 << 63) - 1])
def test_rubbish_in_a_set_costs_no_more_than_the_set(beat: int) -> None:
    segment = Segment.create(NAME, 8 * LAYOUT.flag_words)
    lanes = [Lane(segment, HostSignals(segment), which) for which in range(SETS)]
    pool = Pool(lanes, NAME, Times(settle=0.0, untouched=0.0))
    first = pool.take()
    assert first is not None
    first.store(Flag.DRAFT_BEAT, beat)
    pool.give_up(first)
    assert pool.free == SETS - 1 and pool.take() is not None
    pool.met(first, (1 << 32) - 1)  # what a greeting can carry
    assert pool.free == SETS - 2 and pool.close("over", 1.0)
    segment.close()


def owner_of_set(lane: Lane) -> subprocess.Popen[str]:
    """A process that mapped the segment and said so in the set."""
    code = OWNER.replace("create", "open")
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    lane.store(Flag.DRAFT_BEAT, -process.pid)
    return process


def test_limits_follow_the_median() -> None:
    waits = Waits(Times())
    assert waits.limit == 1.0
    waits.observe(0.001)
    assert waits.limit == 0.15
    for _ in range(9):
        waits.observe(0.1)
    assert waits.limit == pytest.approx(0.3)
    fixed = Waits(Times(), 40)
    fixed.observe(1.0)
    assert fixed.limit == 0.04


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_lie_where_the_layout_says(dtype: str) -> None:
    layout = Layout(slots=3, pages=5, page_size=4, table_pages=2, width=6, dtype=dtype)
    raw = torch.zeros(layout.bytes, dtype=torch.uint8)
    features, tables, records, heads, nodes = views(raw, layout)
    assert features.shape == (20, 6) and features.dtype == getattr(torch, dtype)
    assert tables.shape == (3, 2) and records.shape == (SETS * RING, 4, 8)
    assert heads.shape == (SETS * RING, 4, 4) and nodes.shape == (SETS * RING, 768, 2)
    for tensor, at in zip(
        (features, tables, records, heads, nodes),
        (0, layout.tables_at, layout.records_at, layout.heads_at, layout.nodes_at),
        strict=True,
    ):
        assert tensor.data_ptr() == raw.data_ptr() + at
        tensor.fill_(1)
    last = [tensor.view(-1)[-1].item() for tensor in (features, tables, records, heads, nodes)]
    assert last == [1] * 5


def test_memory_that_torch_did_not_allocate() -> None:
    owned = torch.arange(64, dtype=torch.uint8)
    over = _over(owned.data_ptr(), 64, CPU)
    assert over.data_ptr() == owned.data_ptr() and over.shape == (64,)
    over[3] = 99
    assert owned[3] == 99


def test_an_export_closes_without_a_trace() -> None:
    export = Export.create(LAYOUT, CPU)
    assert export.free == SETS and not export.features.any()
    names = [path.name for path in FOLDER.glob(f"slipstream-{export._id:016x}-*")]
    assert len(names) == 2
    export.close()
    assert not list(FOLDER.glob(f"slipstream-{export._id:016x}-*"))


def test_without_a_driver_there_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    before = set(FOLDER.glob("slipstream-*"))
    with pytest.raises(ConfigError, match=r"no device memory to share: cuda\.bindings"):
        Export.create(LAYOUT, torch.device("cuda", 99))
    assert set(FOLDER.glob("slipstream-*")) == before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"boot_id": "elsewhere"}, "two nodes"),
        ({"boot_id": ""}, "two nodes"),
        ({"pages": 0}, "not usable"),
        ({"set": SETS}, "not usable"),
        ({"probe": 0}, "not usable"),
        ({"pages": 1 << 31, "page_size": 1 << 20}, "bytes"),
        ({"slots": 3}, "3 slots, the draft 2"),
    ],
)
def test_an_offer_that_cannot_be(changed: dict, words: str) -> None:
    export = Export.create(LAYOUT, CPU)
    lane = export.pool.take()
    assert lane is not None
    offer = export.offer(lane, 17)
    assert layout_of(offer, SPEC) == LAYOUT
    for key, value in changed.items():
        setattr(offer, key, value)
    with pytest.raises(Refused, match=words):
        layout_of(offer, SPEC)
    export.close()


def test_what_is_mapped_under_a_number_stays_what_it_is() -> None:
    export, mapper = Export.create(LAYOUT, CPU), Mapper(CPU)
    lane = export.pool.take()
    assert lane is not None
    offer = export.offer(lane, 17)
    seat = mapper.accept(offer, SPEC)
    offer.pages += 1
    with pytest.raises(Refused, match="not what is mapped"):
        mapper.accept(offer, SPEC)
    offer.export_id += 1
    with pytest.raises(Refused, match="bytes of user"):
        mapper.accept(offer, replace(SPEC, feature_width=1 << 14))
    offer.gpu_uuid = "x"
    with pytest.raises(Refused, match="the target runs on a GPU, the draft on a CPU"):
        mapper.accept(offer, SPEC)
    seat.abandon(1.0)
    mapper.close()
    export.close()


def test_memory_of_a_target_that_ended_in_order_is_unmapped() -> None:
    """Also where its process cannot be seen from here."""
    mapper = Mapper(CPU)
    for ended in range(3):
        export = Export.create(LAYOUT, CPU)
        lane = export.pool.take()
        assert lane is not None
        offer = export.offer(lane, 17)
        offer.pid = 0
        seat = mapper.accept(offer, SPEC)
        assert mapper.mapped == 1, ended
        assert export.probe(lane, 17) == ""
        seat.leave(broken=False, may_close=True)
        assert mapper.mapped == 1  # it lives: mapped once for all its sessions
        export.pool.give_up(lane)
        export.close()
    mapper.close()


def test_without_a_session_memory_stays_only_while_its_target_lives() -> None:
    """Whoever left when the target still lived: its next life may need the memory."""
    mapper = Mapper(CPU, Times(vacant=0.02))
    exports = [Export.create(LAYOUT, CPU) for _ in range(3)]
    seats = []
    for export in exports:
        lane = export.pool.take()
        assert lane is not None
        seats.append(mapper.accept(export.offer(lane, 17), SPEC))
        assert export.probe(lane, 17) == ""
        export.pool.give_up(lane)
    seats[0].leave(broken=False, may_close=True)
    seats[1].abandon(1.0)
    exports[0].close()
    time.sleep(0.1)
    assert mapper.mapped == 3  # another session may have a wait on its way
    seats[2].leave(broken=False, may_close=False)
    until(lambda: mapper.mapped == 2)
    lane = exports[2].pool.take()
    assert lane is not None
    again = mapper.accept(exports[2].offer(lane, 18), SPEC)
    exports[1].close()
    time.sleep(0.1)
    assert mapper.mapped == 2
    assert exports[2].probe(lane, 18) == ""
    exports[2].pool.give_up(lane)
    again.leave(broken=False, may_close=False)
    until(lambda: mapper.mapped == 1)
    exports[2].close()
    until(lambda: mapper.mapped == 0)
    mapper.close()


def test_a_peer_is_seen_whatever_its_descriptor_is() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2_000, limits[1]), limits[1]))
    process = owner()
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_100)]
    try:
        peer = Peer(process.pid, NAME)
        assert peer._fd is not None and peer._fd > 1_023 and not peer.gone()
        end(process)
        until(peer.gone)
        peer.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        sweep()


def test_a_process_may_map_a_path_of_any_encoding(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"lib\xff.so")
    with open(path, "wb+") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            mine = Segment.create(NAME, 100)
            before = len(os.listdir("/proc/self/fd"))
            peer, stranger = Peer(os.getpid(), NAME), Peer(os.getpid(), "another")
            assert peer._fd is not None and stranger._fd is None
            peer.close()
            assert len(os.listdir("/proc/self/fd")) == before
            mine.close()


def test_what_cannot_be_unmapped_leaves_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Mapper(CPU)
    exports = [Export.create(LAYOUT, CPU) for _ in range(2)]
    for export in exports:
        lane = export.pool.take()
        assert lane is not None
        mapper.accept(export.offer(lane, 17), SPEC).abandon(1.0)
    mappings = list(mapper._mappings.values())

    def fail() -> None:
        raise CudaError("cuMemHostUnregister: no")

    for mapping in mappings:
        monkeypatch.setattr(mapping.signals, "close", fail)
    with pytest.raises(CudaError, match="cuMemHostUnregister"):
        mapper.close()
    assert mapper.mapped == 0
    assert not any(hasattr(mapping.segment, "buffer") for mapping in mappings)
    assert all(mapping._peer._fd is None for mapping in mappings)
    for export in exports:
        export.close()


def test_an_offer_that_is_over_is_left_alone() -> None:
    export, mapper = Export.create(LAYOUT, CPU), Mapper(CPU)
    lane = export.pool.take()
    assert lane is not None
    late = export.offer(lane, 17)
    export.offer(lane, 18)
    with pytest.raises(Refused, match="over"):
        mapper.accept(late, SPEC)
    assert lane.load(Flag.DRAFT_BEAT) == 0
    mapper.close()
    export.close()
