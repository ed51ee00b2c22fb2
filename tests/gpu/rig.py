"""A target on the GPU beside the plain runner on the CPU, driven by the same calls."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.target.device_loading import device_runner
from services.target.device_runner import DeviceRunner
from services.target.device_step import DeviceStep
from services.target.kv_cache import KVCache
from services.target.model_runner import ModelRunner
from services.target.runner import (
    DecodeEntry,
    EntryResult,
    FeatureSpan,
    PrefillEntry,
    SlotAdmit,
    TargetRunner,
    TargetSpec,
)
from slipstream.models import CausalLM, ContextProjector
from slipstream.params import SamplingParams
from tests.tiny import Pair

PAGE_SIZE = 8
PAGES_PER_SLOT = 96
MAX_LEN = 640


def spec_of(vocab_size: int, width: int, slots: int, rows: int) -> TargetSpec:
    return TargetSpec(
        model="tiny", vocab_size=vocab_size, max_model_len=MAX_LEN, slots=slots,
        pages=slots * PAGES_PER_SLOT, page_size=PAGE_SIZE, max_nodes=256, max_prefill_rows=rows,
        feature_width=width,
    )  # fmt: skip


def make(
    pair: Pair, device: torch.device, slots: int, rows: int, dtype: torch.dtype = torch.float32,
    prefill_attention: str = "triton", attention: str = "triton",
) -> TargetRunner:  # fmt: skip
    """A runner of the pair: the plain one on a CPU, the device's elsewhere."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = CausalLM.load(pair.target, dtype, device)
    projector = ContextProjector.load(pair.draft, dtype, device)
    config, width = model.config, projector.config.hidden_size
    spec = spec_of(config.vocab_size, width, slots, rows)
    cache = KVCache(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        pages=spec.pages, page_size=PAGE_SIZE, dtype=dtype, feature_width=width,
        feature_dtype=dtype, device=device,
    )  # fmt: skip
    if device.type == "cpu" and attention == "plain":
        taps = projector.config.target_layer_ids
        return ModelRunner(model, projector, taps, spec, cache)
    return device_runner(
        model, projector, spec, cache, device=device, decode_rows=256, attention=attention,
        prefill_attention=prefill_attention,
    )  # fmt: skip


@dataclass
class Both:
    """The same requests on both runners; every call's results must be equal."""

    device: DeviceRunner
    plain: TargetRunner
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def admit(self, slot: int, prompt: int, sampling: SamplingParams) -> None:
        ids = [self.rng.randrange(10, 300) for _ in range(prompt)]
        request = SlotAdmit(ids, (), MAX_LEN, 0, frozenset(), sampling, None, True)
        self.both("admit", slot, request)
        entry = PrefillEntry(slot, 0, prompt, True, self.pages(slot))
        self.tokens[slot] = ids + list(self.both("prefill", [entry])[0].tokens)

    def decode(self, slots: Sequence[int], nodes: Sequence[int], tree: bool) -> None:
        """One step with random proposals, half of whose first drafts are what will be drawn."""
        entries = [self.entry(slot, n, tree) for slot, n in zip(slots, nodes, strict=True)]
        for slot, result in zip(slots, self.both("decode", entries), strict=True):
            self.tokens[slot] += result.tokens

    def entry(self, slot: int, nodes: int, tree: bool) -> DecodeEntry:
        known, rng = self.tokens[slot], self.rng
        tokens = [known[-1], *(rng.choice((42, 44, 45, 53)) for _ in range(nodes - 1))]
        parents = [-1, *(rng.randrange(node) if tree else node - 1 for node in range(1, nodes))]
        proposed = (tokens, parents) if nodes > 1 else None
        return DecodeEntry(slot, len(known) - 1, known[-1], nodes, proposed, self.pages(slot))

    def both(self, call: str, *args: object) -> list[EntryResult]:
        got = getattr(self.device, call)(*args)
        want = getattr(self.plain, call)(*args)
        for one, other in zip(got or (), want or (), strict=True):
            same = (one.tokens, one.finish, one.accepted) == (
                other.tokens, other.finish, other.accepted
            )  # fmt: skip
            assert same, f"{call}: {one} on the device, {other} plainly"
        return list(want or ())

    def check_features(self) -> None:
        """What is kept of every committed token."""
        for slot, tokens in self.tokens.items():
            span = [FeatureSpan(slot, 0, len(tokens) - 1)]
            got, want = (floats(bytes(r.features(span))) for r in (self.device, self.plain))
            assert self.device.lengths(slot) == self.plain.lengths(slot)
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)

    def release(self) -> None:
        for slot in self.tokens:
            self.both("release", slot)
        self.tokens.clear()

    def pages(self, slot: int) -> range:
        return range(slot * PAGES_PER_SLOT, (slot + 1) * PAGES_PER_SLOT)


def floats(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)


def poison(step: DeviceStep) -> None:
    """Spoils everything that a step writes before it may read it."""
    with step.graphs.on_stream():
        for tensor in _buffers(step):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -7)


def _buffers(step: DeviceStep) -> Iterator[Tensor]:
    rows = step.rows
    yield from (rows.starts, rows.entries, rows.positions, rows.bits)
    for group in (step.trees, step.draws, step.walks, step._scratch):
        yield from _tensors(group)
    decoder = step._decoder
    yield from (
        decoder._normed, decoder._added, decoder._qkv, decoder._q, decoder._gate_up, decoder._gated,
        step._embedded, step.hidden, step.mixed, step._tapped, step._projected, step._picked,
        step._logits,
    )  # fmt: skip
    for attention in step._attention.values():
        yield from _tensors(attention.scratch)


def _tensors(group: object) -> list[Tensor]:
    names = getattr(group, "__slots__", None) or vars(group)
    values = [getattr(group, name) for name in names]
    return [value for value in values if isinstance(value, Tensor)]
