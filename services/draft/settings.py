"""Settings of the draft process: flags, or variables SLIPSTREAM_DRAFT_*."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.errors import ConfigError
from slipstream.settings import Device, ProcessSettings
from slipstream.tree import TreeSpec, parse_speculative_config, resolve_spec


class DraftSettings(ProcessSettings):
    """Drafts token trees for a target."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_DRAFT_")

    model: str = Field(
        description="the target's checkpoint folder, hub id or embedded name: its embedding and "
        "LM head are the draft's too"
    )
    draft: str = Field(description="the draft head: folder, hub id, jetspec or dflash")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(50052, ge=0, le=65535, description="port to listen on; 0: any free one")
    handoff_address: str = Field(
        "", description="host:port where targets reach this server; default: where gateways do"
    )
    handoff: Literal["auto", "grpc"] = Field(
        "auto",
        description="how targets may hand over: auto: through GPU memory of the same node where "
        "both sides can; grpc: never",
    )
    device: Device = Field(
        "auto", description="auto, cpu, cuda or cuda:N; auto: a GPU where one can be used"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="element type of the weights; auto: bfloat16 where it is computed"
    )
    slots: int = Field(64, ge=1, le=1024, description="most slots of a target")
    max_sessions: int = Field(1, ge=1, le=64, description="targets served at once")
    pages: int | None = Field(
        None,
        ge=1,
        description="context pages of a session; default: all slots full, within an eighth of the "
        "memory for all sessions, on a GPU within what the weights leave of its share",
    )
    page_size: int = Field(16, ge=1, le=256, description="positions of one page")
    attention_backend: Literal["auto", "torch", "triton"] = Field(
        "auto", description="attention of the head; auto: triton on a GPU"
    )
    cuda_graphs: bool = Field(True, description="GPU: whether draft steps are CUDA graphs")
    memory_share: float | None = Field(
        None,
        gt=0,
        le=0.98,
        description="GPU: part of its memory that this process may hold in all; default: 0.92 of "
        "what is free",
    )
    random_weights: bool = Field(
        False, description="make weights up: the model folders need no more than config.json"
    )
    tree: Literal["chain", "top2gap", "accum_logp", "best_first"] | None = Field(
        None, description="how trees grow; default: chain at width 1, else top2gap"
    )
    width: int | None = Field(None, ge=1, le=255, description="children per node; 1 is the chain")
    budget: int | None = Field(None, ge=1, le=256, description="nodes of a tree, root included")
    beta: float = Field(1.0, ge=0, description="top2gap: steepness of the fan-out")
    gap0: float = Field(1.0, description="top2gap: centre of the fan-out")
    spine: bool = Field(True, description="whether the rank-0 path goes in first")
    shared_noise: bool = Field(
        True, description="whether candidates are ranked with the request's own noise"
    )
    speculative_config: str | None = Field(
        None, description="the tree as a JSON object, in place of the flags for it"
    )
    step_limit_s: float = Field(
        300.0,
        ge=0,
        description="a step that takes longer ends this process, to be started again; 0: no limit",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores there are")
    warmup: bool = Field(True, description="measure draft steps before saying ready")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")

    def tree_spec(self, block_size: int) -> TreeSpec:
        """The tree of requests that name none, for a head of `block_size`. Raises ConfigError."""
        if self.speculative_config is None:
            return resolve_spec(
                self.tree,
                self.width,
                self.budget,
                block_size=block_size,
                beta=self.beta,
                gap0=self.gap0,
                spine=self.spine,
                shared_noise=self.shared_noise,
            )
        for name in ("tree", "width", "budget", "beta", "gap0", "spine", "shared_noise"):
            if name in self.model_fields_set:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: say it in --speculative-config, or leave that out")
        return parse_speculative_config(self.speculative_config, block_size)
