"""The target's forward pass against transformers, in fp32."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.layers.attention import paged_attention, write_kv
from slipstream.layers.rows import RowBatch
from slipstream.models import CausalLM, Checkpoint, load_config, write_random_model
from tests.tiny import Kind, make_target

PAGES, PAGE = 40, 16


class Cache:
    """Pages for one request, used as a model's `attend`."""

    def __init__(self, model: CausalLM) -> None:
        c = model.config
        shape = (c.num_layers, PAGES, PAGE, c.num_kv_heads, c.head_dim)
        self.model, self.k, self.v = model, torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def run(self, ids: list[int], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits of every row, and the taps."""
        config = self.model.config
        batch = RowBatch.build([len(ids)], [self.length], [list(range(PAGES))])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write_kv(self.k[layer], self.v[layer], k, v, batch)
            return paged_attention(
                q, self.k[layer], self.v[layer], batch, scale=config.scale,
                window=config.windows[layer],
            )  # fmt: skip

        out = self.model.forward(torch.tensor(ids), batch.positions, attend, taps)
        self.length += len(ids)
        return self.model.logits(out.hidden), out.taps


def reference(folder: Path) -> Any:
    """The same folder in transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


def check(folder: Path, length: int = 40, max_len: int | None = None) -> None:
    """Prefill and two decode steps of ours equal one pass of theirs."""
    model = CausalLM.load(folder, torch.float32, max_len=max_len)
    ids = torch.randint(3, model.config.vocab_size, (length,), generator=torch.manual_seed(3))
    with torch.no_grad():
        want = reference(folder)(ids[None]).logits[0]
    cache = Cache(model)
    rows = ids.tolist()
    got = torch.cat([cache.run(rows[:-2])[0], cache.run(rows[-2:-1])[0], cache.run(rows[-1:])[0]])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_equals_transformers(tmp_path: Path, kind: Kind, tied: bool) -> None:
    check(make_target(tmp_path, kind, config={"tie_word_embeddings": tied}))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
        ),
    ],
)
def test_switches_equal_transformers(tmp_path: Path, kind: Kind, config: dict[str, Any]) -> None:
    check(make_target(tmp_path, kind, config=config))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
}  # fmt: skip


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        YARN | {"beta_fast": 16, "attention_factor": 1.3},
        LLAMA3,
        LONGROPE,
    ],
    ids=lambda s: s["rope_type"],
)
def test_rope_types_equal_transformers(
    tmp_path: Path, scaling: dict[str, Any], nested: bool
) -> None:
    if nested:
        config = {"rope_parameters": scaling | {"rope_theta": 5000.0}, "rope_theta": None}
    else:
        config = {"rope_scaling": scaling, "rope_theta": 5000.0}
    folder = make_target(tmp_path, "llama", config=config)
    raw = json.loads((folder / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    check(folder, max_len=128)


def test_long_context_types_follow_the_served_length(tmp_path: Path) -> None:
    config = {"rope_scaling": LONGROPE, "max_position_embeddings": 512}
    check(make_target(tmp_path, "llama", config=config), length=200, max_len=512)


def test_theta_matters(tmp_path: Path) -> None:
    one = CausalLM.load(make_target(tmp_path / "a"), torch.float32)
    other = make_target(tmp_path / "b", config={"rope_theta": 500.0})
    two = CausalLM.load(other, torch.float32)
    ids = list(range(5, 25))
    assert not torch.allclose(Cache(one).run(ids)[0], Cache(two).run(ids)[0], atol=1e-3)


@pytest.mark.parametrize("taps", [(0,), (2, 0), (3,), (1, 3)])
def test_taps_are_layer_outputs(tmp_path: Path, taps: tuple[int, ...]) -> None:
    folder = make_target(tmp_path)
    theirs = reference(folder)
    outputs: dict[int, Tensor] = {}
    for index, layer in enumerate(theirs.model.layers):

        def keep(_module: Any, _args: Any, out: Any, index: int = index) -> None:
            outputs[index] = out[0] if isinstance(out, tuple) else out

        layer.register_forward_hook(keep)
    ids = list(range(10, 30))
    with torch.no_grad():
        hidden = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    _, got = Cache(CausalLM.load(folder, torch.float32)).run(ids, taps)
    assert got is not None
    want = torch.cat([outputs[i].view(len(ids), -1) for i in taps], -1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for column, layer_id in enumerate(taps):
        if layer_id < 3:  # the tuple's last entry is normed: the last layer's is not in it
            part = got[:, column * 48 : (column + 1) * 48]
            torch.testing.assert_close(part, hidden[layer_id + 1][0], rtol=1e-4, atol=1e-4)


def test_runs_are_identical(tmp_path: Path) -> None:
    model = CausalLM.load(make_target(tmp_path, "qwen3"), torch.float32)
    ids = list(range(20, 60))
    assert torch.equal(Cache(model).run(ids)[0], Cache(model).run(ids)[0])


def test_bf16_stays_close(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    ids = list(range(20, 40))
    exact = Cache(CausalLM.load(folder, torch.float32)).run(ids)[0]
    rough = Cache(CausalLM.load(folder, torch.bfloat16)).run(ids)[0]
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() / exact.norm() < 0.05


def test_padded_vocabulary_rows_are_cut_off(tmp_path: Path) -> None:
    folder = make_target(tmp_path, vocab=320)
    whole = Cache(CausalLM.load(folder, torch.float32)).run([5, 6])[0]
    raw = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(raw))
    cut = Cache(CausalLM.load(folder, torch.float32)).run([5, 6])[0]
    assert cut.shape == (2, 300)
    torch.testing.assert_close(cut, whole[:, :300])


def test_shards_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_target(tmp_path)
    whole = Cache(CausalLM.load(folder, torch.float32)).run([5, 6, 7])[0]
    prints = Checkpoint.open(folder).fingerprint("lm_head.weight")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({n: tensors[n] for n in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(Cache(CausalLM.load(folder, torch.float32)).run([5, 6, 7])[0], whole)
    assert Checkpoint.open(folder).fingerprint("lm_head.weight") == prints
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors"):
        Checkpoint.open(folder)


def test_random_weights_fit_their_config(tmp_path: Path) -> None:
    for kind in ("llama", "qwen2", "qwen3"):
        config = make_target(tmp_path / kind, kind) / "config.json"
        folder = write_random_model(config, tmp_path / f"{kind}-random", torch.float32)
        check(folder)


def test_eos_comes_from_the_generation_config(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_config(folder).eos_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_ids == (2,)
