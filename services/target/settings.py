"""Settings of the target process: flags, or variables SLIPSTREAM_TARGET_*."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.settings import ProcessSettings


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
    device: Literal["auto", "cpu"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="element type of the weights; auto: bfloat16 where it is computed"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="most tokens of prompt and answer; default: the model's window"
    )
    slots: int = Field(16, ge=1, le=1024, description="requests that run at once")
    pages: int | None = Field(
        None, ge=1, description="KV pages; default: all slots full, within a quarter of the memory"
    )
    page_size: int = Field(16, ge=1, le=256, description="positions of one page")
    max_prefill_rows: int = Field(512, ge=1, description="most rows of a prefill step")
    watchdog_ms: int | None = Field(
        None, ge=1, description="longest wait for a proposal; default: learnt from those measured"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores there are")
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get at SIGTERM")
    warmup: bool = Field(True, description="measure decode steps before saying ready")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
