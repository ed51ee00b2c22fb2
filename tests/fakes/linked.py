"""A cell of a tiny pair whose handoff stays on devices; the draft is a process of its own.

The interpreter of kernels serves one thread of a process, so the two servers cannot share one.

`python -m tests.fakes.linked FOLDER` is the draft of the pair in FOLDER.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from services.draft.device_runner import DeviceRunner as DraftDevice
from services.draft.device_step import StepSizes
from services.draft.runner import DraftSpec
from services.draft.server import DraftServer
from services.target.device_loading import device_runner, share
from services.target.device_runner import DeviceRunner as TargetDevice
from services.target.kv_cache import KVCache
from services.target.runner import TargetSpec
from slipstream.handoff.cuda_ipc import Mapper
from slipstream.layers.graphs import Graphs
from slipstream.models import CausalLM, ContextProjector, DraftHead, fingerprints
from slipstream.tree import resolve_spec
from tests.tiny import Pair

SLOTS, PAGES, PAGE_SIZE, BLOCK, WINDOW = 3, 60, 8, 4, 96
CPU = torch.device("cpu")


def target_of(pair: Pair) -> TargetDevice:
    """With a draft head, its features in memory that a draft may map."""
    model = CausalLM.load(pair.target, torch.float32, CPU)
    projector = ContextProjector.load(pair.draft, torch.float32, CPU)
    config, head = model.config, projector.config
    spec = TargetSpec(
        model="tiny", vocab_size=config.vocab_size, max_model_len=WINDOW, slots=SLOTS, pages=PAGES,
        page_size=PAGE_SIZE, max_nodes=32, max_prefill_rows=16, feature_width=head.hidden_size,
        fingerprints=fingerprints(pair.target, pair.draft), most_commits=head.block_size,
    )  # fmt: skip
    shared = share(spec, CPU)
    cache = KVCache(
        layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        pages=PAGES, page_size=PAGE_SIZE, dtype=torch.float32, feature_width=head.hidden_size,
        feature_dtype=torch.float32, device=CPU, features=shared.features,
    )  # fmt: skip
    return device_runner(
        model, projector, spec, cache, device=CPU, decode_rows=32, attention="torch",
        prefill_attention="torch", shared=shared,
    )  # fmt: skip


def draft_of(pair: Pair, mapper: Mapper) -> DraftDevice:
    head = DraftHead.load(pair.draft, pair.target, torch.float32, CPU)
    config = head.config
    spec = DraftSpec(
        model="tiny", block_size=config.block_size, mask_token_id=config.mask_token_id,
        causal=config.all_causal, vocab_size=config.vocab_size, feature_width=config.hidden_size,
        feature_dtype="float32", slots=SLOTS, pages=PAGES, page_size=PAGE_SIZE,
        fingerprints=fingerprints(pair.target, pair.draft),
    )  # fmt: skip
    return DraftDevice(
        head, spec, max_len=WINDOW, graphs=Graphs(CPU), attention="torch",
        sizes=StepSizes.of(spec, rows=2 * BLOCK, write_rows=16), mapper=mapper,
    )  # fmt: skip


async def main(folder: Path) -> None:
    pair = Pair(folder / "target", folder / "draft")
    mapper = Mapper(CPU)
    server = DraftServer(
        lambda: draft_of(pair, mapper),
        tree=lambda size: resolve_spec("chain", block_size=size),
        warm=False,
    )
    await server.start("127.0.0.1", 0)
    await server.load()
    print(server.port, flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)  # until the parent closes it, or dies
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
