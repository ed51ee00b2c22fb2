"""Settings of the gateway process, and the part of them that the scheduler reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from gateway.chat.formats import ReasoningParserName, ToolParserName
from gateway.dialogue import ChatOptions
from slipstream.settings import Names, ProcessSettings

PingPongMode = Literal["auto", "on", "off"]
TreeName = Literal["chain", "top2gap", "accum_logp", "best_first"]


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the scheduler must know before it is connected; see `GatewaySettings` for each."""

    target: str
    draft: str | None = None
    max_queue: int = 256
    pipeline_depth: int = 1
    ping_pong: PingPongMode = "auto"
    pin_nodes: bool = False
    tree: TreeName | None = None
    width: int | None = None
    budget: int | None = None
    min_free_slots: int = 0
    refill_wait_s: float = 0.05
    max_prefill_chunk: int | None = None
    recover_timeout_s: float = 60.0
    draft_wait_s: float = 10.0


class GatewaySettings(ProcessSettings):
    """Flags of `python -m gateway`; flag --max-queue and SLIPSTREAM_GATEWAY_MAX_QUEUE are one."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_GATEWAY_")

    target: str = Field(description="host:port of the target server")
    draft: str = Field(default="none", description="host:port of the draft server, or none")
    tokenizer: str | None = Field(
        default=None, description="folder with tokenizer.json, hub id or embedded model name"
    )
    host: str = Field(default="127.0.0.1", description="address of both client doors")
    port: int = Field(default=8000, ge=0, le=65535, description="REST port; 0 takes a free one")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    served_model_name: Names = Field(
        default_factory=list,
        description="model names that clients use, the usual one first; default: the target's",
    )
    generation_config: Literal["model", "off"] = Field(
        default="model",
        description="sampling that requests leave open: the model's generation_config.json's, or"
        " none",
    )
    tool_parser: ToolParserName = Field(
        default="auto", description="how tool calls are written; auto: as the chat template shows"
    )
    reasoning_parser: ReasoningParserName = Field(
        default="auto", description="the thinking part to split off; auto: as the template shows"
    )
    chat_template_kwargs: Annotated[dict[str, Any], NoDecode] = Field(
        default_factory=dict,
        description="JSON object of variables for the chat template; a request's own win",
    )
    max_output_tokens: int = Field(
        default=0,
        ge=0,
        description="most tokens of an answer, whatever is asked for; 0: no such cap",
    )
    max_queue: int = Field(
        default=256, ge=1, description="requests that may wait beyond those in slots"
    )
    pipeline_depth: int = Field(
        default=1, ge=0, le=1, description="plans ahead of the step that runs; 0: lock-step loop"
    )
    ping_pong: PingPongMode = Field(
        default="auto", description="draft one half of the requests while the other is verified"
    )
    pin_nodes: bool = Field(
        default=False,
        description="always verify the whole tree; --tree, --width and --budget imply it",
    )
    tree: TreeName | None = Field(
        default=None, description="tree mode of every request; default: the draft server's"
    )
    width: int | None = Field(default=None, ge=1, description="children per node; 1 is the chain")
    budget: int | None = Field(
        default=None, ge=1, le=256, description="nodes of a tree, root included"
    )
    min_free_slots: int = Field(
        default=0, ge=0, description="free slots that a refill waits for; 0: 2/3/4 by slots"
    )
    refill_wait_ms: float = Field(
        default=50.0, ge=0, description="longest that a refill waits for more free slots"
    )
    max_prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="prompt rows computed between two decode steps; default: all the target takes",
    )
    recover_timeout: float = Field(
        default=60.0, ge=0, description="seconds that requests wait for a lost target"
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="seconds that running requests get after SIGTERM"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info")

    @field_validator("target", "draft")
    @classmethod
    def _is_address(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if value == "none":
            return value
        if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError("must be host:port, the port from 1 to 65535")
        return value

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _is_object(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    def chat(self) -> ChatOptions:
        """What is said of chats."""
        return ChatOptions(self.tool_parser, self.reasoning_parser, self.chat_template_kwargs)

    def scheduler(self) -> SchedulerSettings:
        """The scheduler's part, with what is derived resolved."""
        shaped = not (self.tree is None and self.width is None and self.budget is None)
        return SchedulerSettings(
            target=self.target,
            draft=None if self.draft == "none" else self.draft,
            max_queue=self.max_queue,
            pipeline_depth=self.pipeline_depth,
            ping_pong=self.ping_pong,
            pin_nodes=self.pin_nodes or shaped,
            tree=self.tree,
            width=self.width,
            budget=self.budget,
            min_free_slots=self.min_free_slots,
            refill_wait_s=self.refill_wait_ms / 1e3,
            max_prefill_chunk=self.max_prefill_chunk,
            recover_timeout_s=self.recover_timeout,
        )
