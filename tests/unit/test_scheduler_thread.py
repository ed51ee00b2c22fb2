"""The scheduler's thread and its doors: what is refused, how it fails, what it tells."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gateway.cell import Command, Lost, Peer, Post, Received
from gateway.request import Chunk, GenerateParams, ModelInfo
from gateway.scheduler import Scheduler
from gateway.settings import GatewaySettings, SchedulerSettings
from slipstream.errors import (
    ConfigError,
    ContextTooLong,
    Draining,
    EngineFailed,
    InvalidRequest,
    PeerLost,
    QueueFull,
    SlipstreamError,
)
from slipstream.settings import parse
from slipstream.v1 import common_pb2, target_pb2
from slipstream.wire import PROTOCOL


class SilentCell:
    """A target that says it is ready and then never answers."""

    def __init__(self, post: Post, protocol: int = PROTOCOL) -> None:
        self.post = post
        self.protocol = protocol
        self.life = 0
        self.sent: list[str] = []
        self.plans: list[target_pb2.TargetPlan] = []

    def open(self, peer: Peer, life: int) -> None:
        self.life = life

    def send(self, peer: Peer, command: Command) -> None:
        kind = str(command.WhichOneof("command"))
        self.sent.append(kind)
        if kind == "hello":
            ready = target_pb2.TargetReady(
                protocol=self.protocol, model="m", vocab_size=100, max_model_len=64, slots=2,
                pages=12, page_size=4, max_nodes=64, max_prefill_rows=64, eos_ids=[7],
            )  # fmt: skip
            self.event(target_pb2.TargetEvent(ready=ready))
        elif isinstance(command, target_pb2.TargetCommand) and kind == "plan":
            self.plans.append(command.plan)

    def close(self, peer: Peer) -> None:
        pass

    def event(self, event: target_pb2.TargetEvent) -> None:
        self.post(Received(Peer.TARGET, self.life, event, time.monotonic()))


class Rig:
    """A scheduler on a silent cell."""

    def __init__(self, protocol: int = PROTOCOL, **settings: Any) -> None:
        self.chunks: dict[int, list[Chunk]] = {}
        self.fatal: list[BaseException] = []
        self.died = threading.Event()
        self.cell: SilentCell

        def make(post: Post) -> SilentCell:
            self.cell = SilentCell(post, protocol)
            return self.cell

        self.scheduler = Scheduler(
            SchedulerSettings("t:1", **settings), self.deliver, on_fatal=self._fatal, make_cell=make
        )

    def deliver(self, batch: Sequence[tuple[int, Chunk]]) -> None:
        for number, chunk in batch:
            self.chunks.setdefault(number, []).append(chunk)

    def _fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        self.died.set()

    def wait(self, number: int) -> Chunk:
        deadline = time.monotonic() + 5
        while number not in self.chunks:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.chunks[number][-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(max_queue=3)
    made.scheduler.start()
    made.scheduler.wait_ready(5)
    yield made
    made.scheduler.stop()


def params(prompt: Sequence[int] = (1, 2, 3), **more: Any) -> GenerateParams:
    return GenerateParams(tuple(prompt), **more)


def test_info_and_snapshot(rig: Rig) -> None:
    assert rig.scheduler.info.eos_ids == (7,) and rig.scheduler.info.block_size == 1
    rig.scheduler.submit(params())
    now = rig.scheduler.snapshot()
    assert now.ready and not now.draft_attached and now.slots == 2 and now.pages == 12
    assert {"steps", "tokens", "preemptions", "sessions"} <= now.totals.keys()


def test_the_queue_is_full_and_says_when_to_come_back(rig: Rig) -> None:
    numbers = [rig.scheduler.submit(params()) for _ in range(2 + 3)]
    with pytest.raises(QueueFull) as full:
        rig.scheduler.submit(params())
    assert 1 <= full.value.retry_after <= 60
    rig.scheduler.cancel(numbers[0])
    assert rig.wait(numbers[0]).finish == "cancelled"
    rig.scheduler.submit(params())


def test_what_cannot_fit_alone_is_refused(rig: Rig) -> None:
    rig.scheduler.submit(params(max_tokens=44))
    with pytest.raises(ContextTooLong, match="need 13 KV pages of 4 tokens, the target has 12"):
        rig.scheduler.submit(params(max_tokens=46))
    with pytest.raises(ContextTooLong, match="maximum context length is 64 tokens"):
        rig.scheduler.submit(params([1] * 64))


INFO = ModelInfo("m", 100, 64, (7,), "float32", 2, 99, 4)


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("prompt_ids", (), "prompt"),
        ("prompt_ids", (1, 100), "prompt"),
        ("prompt_ids", (-1,), "prompt"),
        ("max_tokens", -1, "max_tokens"),
        ("min_tokens", 17, "min_tokens"),
        ("stop_ids", frozenset({100}), "stop_token_ids"),
        ("temperature", -0.1, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -1, "top_k"),
        ("min_p", 2.0, "min_p"),
        ("presence_penalty", math.inf, "presence_penalty"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("logit_bias", {100: 1.0}, "logit_bias"),
        ("logit_bias", {1: math.nan}, "logit_bias"),
        ("seed", 1 << 64, "seed"),
        ("logprobs", 21, "logprobs"),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any, names: str) -> None:
    asked = {"prompt_ids": (1, 2), field: value}
    with pytest.raises(InvalidRequest, match=names) as bad:
        GenerateParams(**asked).validate(INFO)
    assert bad.value.param == names


def test_unseeded_requests_get_seeds_of_their_own(rig: Rig) -> None:
    for _ in range(2):
        rig.scheduler.submit(params())
    deadline = time.monotonic() + 5
    while rig.cell.sent.count("admit") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    requests = list(rig.scheduler._core.requests.values())
    assert len({request.seed for request in requests}) == 2


def test_before_the_target_was_reached() -> None:
    made = Rig()
    with pytest.raises(PeerLost):
        made.scheduler.submit(params())
    assert not made.scheduler.ready
    made.scheduler.start()
    made.scheduler.wait_ready(5)
    made.scheduler.stop()
    with pytest.raises(Draining):
        made.scheduler.submit(params())


def test_another_protocol_is_refused_at_start() -> None:
    made = Rig(protocol=9)
    made.scheduler.start()
    wrong = f"protocol: the gateway speaks {PROTOCOL}, the target 9"
    with pytest.raises(ConfigError, match=wrong):
        made.scheduler.wait_ready(5)
    assert not made.fatal
    made.scheduler.stop()


def test_an_unexpected_error_answers_everybody_and_ends_the_process(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [rig.scheduler.submit(params()) for _ in range(4)]

    def broken(now: float) -> None:
        raise ZeroDivisionError("bad state")

    monkeypatch.setattr(rig.scheduler._core, "tick", broken)
    rig.scheduler.cancel(12345)
    assert rig.died.wait(5)
    assert isinstance(rig.fatal[0], ZeroDivisionError)
    for number in numbers:
        last = rig.wait(number)
        assert last.finish == "error" and isinstance(last.error, EngineFailed)
    with pytest.raises(SlipstreamError):
        rig.scheduler.submit(params())


def test_a_target_that_breaks_the_protocol_loses_its_stream(rig: Rig) -> None:
    number = rig.scheduler.submit(params(max_tokens=1))
    rig.cell.event(target_pb2.TargetEvent(step_done=target_pb2.StepDone(step=77)))
    deadline = time.monotonic() + 5
    while rig.cell.sent.count("hello") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    while not rig.scheduler.ready:
        time.sleep(0.001)
    assert number not in rig.chunks


def test_a_refused_admission_is_the_clients_error(rig: Rig) -> None:
    number = rig.scheduler.submit(params())
    deadline = time.monotonic() + 5
    while not rig.cell.plans:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    entry = rig.cell.plans[0].entries[0]
    refused = common_pb2.Rejected(
        slot=entry.slot, epoch=entry.epoch, code=common_pb2.REJECT_CODE_BAD_VALUE, reason="top_k: 3"
    )
    rig.cell.event(target_pb2.TargetEvent(rejected=refused))
    last = rig.wait(number)
    assert isinstance(last.error, InvalidRequest) and "top_k" in str(last.error)


def test_a_lost_target_makes_it_unready(rig: Rig) -> None:
    rig.cell.post(Lost(Peer.TARGET, rig.cell.life, PeerLost("gone")))
    rig.cell.post(Lost(Peer.TARGET, rig.cell.life - 1, PeerLost("an old stream")))
    deadline = time.monotonic() + 5
    while rig.cell.life < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pings_keep_the_lease(rig: Rig) -> None:
    deadline = time.monotonic() + 5
    while "ping" not in rig.cell.sent:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_settings_of_the_process() -> None:
    given = parse(GatewaySettings, ["--target", "h:1", "--draft", "none", "--budget", "16"])
    assert given.scheduler().pin_nodes and given.scheduler().draft is None
    free = parse(GatewaySettings, ["--target", "h:1", "--draft", "h:2", "--refill-wait-ms", "20"])
    assert not free.scheduler().pin_nodes and free.scheduler().refill_wait_s == 0.02
    assert parse(GatewaySettings, ["--target", "h:1", "--pin-nodes"]).scheduler().pin_nodes
    with pytest.raises(ConfigError, match="--target.*nowhere"):
        parse(GatewaySettings, ["--target", "nowhere"])
    with pytest.raises(ConfigError, match="--pipeline-depth.*2"):
        parse(GatewaySettings, ["--target", "h:1", "--pipeline-depth", "2"])
