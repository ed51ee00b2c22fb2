"""Settings of the target process: flags, or variables SLIPSTREAM_TARGET_*."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.settings import Device, ProcessSettings
from slipstream.wire import MAX_NODES


class TargetSettings(ProcessSettings):
    """Serves the real model: verifies trees, samples, commits."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TARGET_")

    model: str = Field(description="checkpoint folder, hub id or embedded name")
    draft: str = Field(
        "none", description="the draft head whose context features are published, or none"
    )
    served_name: str | None = Field(
        None, description="name of the model; default: as given, a folder's own name"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0: any free one")
    device: Device = Field(
        "auto", description="auto, cpu, cuda or cuda:N; auto: a GPU where one can be used"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="element type of the weights; auto: bfloat16 where it is computed"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="most tokens of prompt and answer; default: the model's window"
    )
    slots: int = Field(16, ge=1, le=1024, description="requests that run at once")
    pages: int | None = Field(
        None,
        ge=1,
        description="KV pages; default: all slots full, within a quarter of the memory, on a GPU "
        "within what the weights leave of its share",
    )
    page_size: int = Field(16, ge=1, le=256, description="positions of one page")
    max_prefill_rows: int | None = Field(
        None, ge=1, description="most rows of a prefill step; default: 512, on a GPU 2048"
    )
    max_decode_rows: int | None = Field(
        None,
        ge=MAX_NODES,
        description="GPU: most rows of one decode graph; default: all trees full, at most 2048",
    )
    attention_backend: Literal["auto", "torch", "triton"] = Field(
        "auto", description="attention of decode and verify steps; auto: triton on a GPU"
    )
    prefill_attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = Field(
        "auto",
        description="attention of prefill steps; auto: that of decode steps",
    )
    cuda_graphs: bool = Field(True, description="GPU: whether decode steps are CUDA graphs")
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
    handoff: Literal["auto", "grpc", "cuda_ipc"] = Field(
        "auto",
        description="how features and trees go between target and draft; auto: cuda_ipc where "
        "both are on GPUs of one machine that allow it, else grpc",
    )
    watchdog_ms: int | None = Field(
        None, ge=1, description="longest wait for a proposal; default: learnt from those measured"
    )
    step_limit_s: float = Field(
        300.0,
        ge=0,
        description="a step that takes longer ends this process, to be started again; 0: no limit",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores there are")
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get at SIGTERM")
    warmup: bool = Field(True, description="measure decode steps before saying ready")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
