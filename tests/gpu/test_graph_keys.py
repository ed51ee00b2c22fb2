"""Every recorded piece of a step, replayed after its neighbours, over spoilt buffers."""

from __future__ import annotations

import random

import pytest
import torch

from services.target.device_runner import DeviceRunner
from slipstream.params import SamplingParams
from tests.gpu.rig import Both, make, poison
from tests.tiny import make_pair

pytestmark = pytest.mark.gpu

SLOTS = 8
KINDS = {
    "greedy": SamplingParams(),
    "full": SamplingParams(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    pair = make_pair(tmp_path_factory.mktemp("pair"), "qwen3")
    device = make(pair, torch.device("cuda"), SLOTS, 256)
    plain = make(pair, torch.device("cpu"), SLOTS, 256, attention="plain")
    assert isinstance(device, DeviceRunner)
    return Both(device, plain)


@pytest.mark.parametrize("kind", list(KINDS))
def test_decode_keys(both: Both, kind: str) -> None:
    """All buckets, chains and trees, in an order in which each follows each other one's like."""
    step = both.device._step
    keys = [(size, tree) for size in step.decode_buckets for tree in (False, True)]
    order = keys + keys[::-1] + random.Random(1).sample(keys, len(keys))
    recorded = {key for key in step._work if key[0] == "finish" and key[3] == kind}
    assert recorded == {("finish", *key, kind) for key in keys}
    for round_ in range(0, len(order), 12):  # a slot has no room for more steps
        for slot in range(SLOTS):
            both.admit(slot, 5 + slot, KINDS[kind])
        for size, tree in order[round_ : round_ + 12]:
            poison(step)
            slots, nodes = shares(size)
            both.decode(slots, nodes, tree)
        both.check_features()
        both.release()


def shares(size: int) -> tuple[list[int], list[int]]:
    """Slots and their nodes that fill a bucket of `size` rows, no more than 64 each."""
    slots = min(SLOTS, max(1, size // 4))
    nodes = [size // slots] * slots
    nodes[0] += size - sum(nodes)
    return list(range(slots)), nodes


@pytest.mark.parametrize("kind", list(KINDS))
def test_prefill_keys(both: Both, kind: str) -> None:
    """All prefill buckets and all numbers of first tokens."""
    step = both.device._step
    sizes = [*step.prefill_buckets, *step.prefill_buckets[::-1]]
    for size in sizes:
        poison(step)
        both.admit(0, size, KINDS[kind])
        both.decode([0], [4], True)
        both.check_features()
        both.release()


def test_a_large_tree_among_chains(both: Both) -> None:
    """Rows are the sum of the nodes."""
    for slot in range(SLOTS):
        both.admit(slot, 9 + slot, KINDS["greedy"])
    nodes = [128, *[16] * (SLOTS - 1)]
    both.decode(list(range(SLOTS)), nodes, True)
    assert int(both.device._step.rows.counts[1]) == sum(nodes)
    both.check_features()
    both.release()
