"""DraftService and the handoff over real channels, with a draft that has no model."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.draft.server import DraftServer
from services.draft.settings import DraftSettings
from slipstream import channels
from slipstream.errors import ConfigError, PairError, SlipstreamError
from slipstream.handoff.base import ContextMessage, ContextRecord, PeerSpec, TargetEnd
from slipstream.handoff.grpc import GrpcConnector
from slipstream.settings import parse
from slipstream.tree import resolve_spec
from slipstream.v1 import common_pb2 as pb
from slipstream.v1 import draft_pb2, draft_pb2_grpc
from slipstream.wire import PROTOCOL
from tests.fakes.draft import FakeDraftRunner, serve
from tests.fakes.encoding import encode_rows, next_token
from tests.tiny import make_pair

pytestmark = pytest.mark.anyio

WAIT_S = 5.0
CHAIN = resolve_spec("chain", block_size=16)


class Gateway:
    """The gateway's end of a Run stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = draft_pb2_grpc.DraftServiceStub(channel).Run()
        self._number = 0

    async def send(self, **command: Any) -> int:
        self._number += 1
        await self._call.write(draft_pb2.DraftCommand(number=self._number, **command))
        return self._number

    async def event(self) -> Any:
        """The next event's content."""
        event = await asyncio.wait_for(self._call.read(), WAIT_S)
        assert event is not grpc.aio.EOF, await self._call.details()
        return getattr(event, event.WhichOneof("event"))

    async def hello(self, protocol: int = PROTOCOL) -> Any:
        await self.send(hello=pb.Hello(protocol=protocol, gateway="test"))
        return await self.event()

    async def leave(self) -> None:
        await self._call.done_writing()

    async def code(self) -> grpc.StatusCode:
        """The status with which the stream ends; what is still to be read is skipped."""
        try:
            while await asyncio.wait_for(self._call.read(), WAIT_S) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self._call.code()

    async def details(self) -> str:
        return await self._call.details()


@asynccontextmanager
async def gateway_of(draft: DraftServer) -> AsyncIterator[Gateway]:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{draft.port}", options=channels.client_options()
    ) as channel:
        yield Gateway(channel)


async def connect(
    draft: DraftServer, session: int, first_step: int, spec: PeerSpec
) -> TargetEnd | SlipstreamError:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    connector = GrpcConnector(loop, 2000)
    connector.connect(session, first_step, f"127.0.0.1:{draft.port}", spec, done.set_result)
    return await asyncio.wait_for(done, WAIT_S)


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def attach(gateway: Gateway, draft: DraftServer, spec: PeerSpec) -> TargetEnd:
    await gateway.send(attach=pb.Attach(session=7, first_step=1))
    end = await connect(draft, 7, 1, spec)
    assert not isinstance(end, SlipstreamError)
    assert await gateway.event() == pb.Attached(session=7, transport="grpc")
    return end


async def test_a_step_through_real_channels() -> None:
    runner = FakeDraftRunner(accept=1.0)
    async with serve(runner) as draft, gateway_of(draft) as gateway:
        ready = await gateway.hello()
        assert (ready.protocol, ready.block_size, ready.causal) == (PROTOCOL, 16, True)
        assert (ready.slots, ready.pages, ready.page_size) == (64, 4096, 16)
        assert ready.tree == resolve_spec(block_size=16).to_proto()
        assert [c.slots for c in ready.draft_costs] == [1, 64]
        end = await attach(gateway, draft, runner.spec.peer)
        await gateway.send(
            admit=draft_pb2.DraftAdmit(session=7, slot=2, epoch=5, tree=CHAIN.to_proto())
        )
        await gateway.send(ping=pb.Ping())
        entry = draft_pb2.DraftPlanEntry(slot=2, epoch=5)
        await gateway.send(
            plan=draft_pb2.DraftPlan(
                step=1, session=7, kind=pb.STEP_KIND_PREFILL, entries=[entry], after=0
            )
        )
        entry.nodes = 16
        await gateway.send(
            plan=draft_pb2.DraftPlan(
                step=2, session=7, kind=pb.STEP_KIND_DECODE, entries=[entry], after=1
            )
        )
        tokens = [4, 5, 6]
        anchor = next_token(6, 3, 1000)
        end.publish_context(
            ContextMessage(1, (ContextRecord(2, 5, 0, 3, anchor, True),), encode_rows(0, tokens))
        )
        proposal = await asyncio.to_thread(end.await_proposal, 2, (1, 16))
        assert proposal is not None and len(proposal.trees) == 1
        tree = proposal.trees[0]
        assert (tree.slot, tree.epoch, len(tree.tokens)) == (2, 5, 16)
        assert tree.tokens[:2] == [anchor, next_token(anchor, 4, 1000)]
        live = await gateway.event()
        assert live == draft_pb2.Live(session=7, slot=2, epoch=5, rows=3)
        await gateway.send(detach=pb.Detach(session=7, reason="enough"))
        assert await gateway.event() == pb.Detached(session=7, reason="enough")
        await gateway.leave()
        assert await gateway.code() is grpc.StatusCode.OK
        assert runner.contexts == []


async def test_one_gateway_at_a_time() -> None:
    async with serve() as draft, gateway_of(draft) as first:
        await first.hello()
        async with gateway_of(draft) as second:
            await second.send(hello=pb.Hello(protocol=PROTOCOL))
            assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.leave()
        assert await first.code() is grpc.StatusCode.OK
        async with gateway_of(draft) as third:
            assert (await third.hello()).model == "fake"


async def test_two_gateways_where_allowed() -> None:
    runner = FakeDraftRunner()
    async with (
        serve(runner, max_sessions=2) as draft,
        gateway_of(draft) as first,
        gateway_of(draft) as second,
    ):
        await first.hello()
        await second.hello()
        await attach(first, draft, runner.spec.peer)
        await second.send(attach=pb.Attach(session=8, first_step=3))
        end = await connect(draft, 8, 3, runner.spec.peer)
        assert not isinstance(end, SlipstreamError)
        assert (await second.event()).session == 8
        assert len(runner.contexts) == 2


@pytest.mark.parametrize(
    "commands",
    [
        [{"ping": pb.Ping()}],
        [{"hello": pb.Hello(protocol=PROTOCOL + 1)}],
        [{"hello": pb.Hello(protocol=PROTOCOL)}, {"hello": pb.Hello(protocol=PROTOCOL)}],
        [{"hello": pb.Hello(protocol=PROTOCOL)}, {}],
        [{"hello": pb.Hello(protocol=PROTOCOL)}, {"ping": pb.Ping(), "skip": 1}],
    ],
)
async def test_what_the_protocol_does_not_allow(commands: list[dict[str, Any]]) -> None:
    async with serve() as draft, gateway_of(draft) as gateway:
        for command in commands:
            command = dict(command)
            gateway._number += command.pop("skip", 0)
            await gateway.send(**command)
        assert await gateway.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await gateway.details()


async def test_a_malformed_request_is_rejected() -> None:
    async with serve() as draft, gateway_of(draft) as gateway:
        await gateway.hello()
        tree = CHAIN.to_proto()
        tree.budget = 3
        number = await gateway.send(
            admit=draft_pb2.DraftAdmit(session=7, slot=2, epoch=5, tree=tree)
        )
        refused = await gateway.event()
        assert (refused.command, refused.slot, refused.epoch) == (number, 2, 5)
        assert refused.code == pb.REJECT_CODE_BAD_VALUE and "budget" in refused.reason
        await gateway.send(admit=draft_pb2.DraftAdmit(session=7, temperature=-1.0))
        assert "temperature" in (await gateway.event()).reason


async def test_a_target_that_does_not_fit() -> None:
    runner = FakeDraftRunner()
    async with serve(runner) as draft, gateway_of(draft) as gateway:
        await gateway.hello()
        number = await gateway.send(attach=pb.Attach(session=7, first_step=1))
        other = PeerSpec(2, "float32", 1234, 8, dict(runner.spec.fingerprints))
        answer = await connect(draft, 7, 1, other)
        assert isinstance(answer, PairError)
        refused = await gateway.event()
        assert (refused.command, refused.session) == (number, 7)
        assert refused.code == pb.REJECT_CODE_PEER
        assert "1234" in refused.reason and "1000" in refused.reason


async def test_a_silent_gateway_loses_its_lease() -> None:
    async with serve(lease_s=0.3) as draft, gateway_of(draft) as gateway:
        await gateway.hello()
        for _ in range(4):
            await asyncio.sleep(0.15)
            await gateway.send(ping=pb.Ping())
        assert await gateway.code() is grpc.StatusCode.UNAVAILABLE
        assert "silent" in await gateway.details()
        async with gateway_of(draft) as second:
            await second.hello()


async def test_a_gateway_that_vanishes_frees_its_session() -> None:
    runner = FakeDraftRunner()
    async with serve(runner) as draft:
        async with gateway_of(draft) as gateway:
            await gateway.hello()
            end = await attach(gateway, draft, runner.spec.peer)
            plan = draft_pb2.DraftPlan(step=1, session=7, kind=pb.STEP_KIND_DECODE)
            await gateway.send(plan=plan)
        assert await asyncio.to_thread(end.await_proposal, 1, (1, 1)) is not None
        await eventually(lambda: not end.alive and not runner.contexts)
        async with gateway_of(draft) as second:
            await second.hello()


async def test_a_parked_wait_does_not_outlive_its_gateway() -> None:
    runner = FakeDraftRunner()
    async with serve(runner) as draft:
        async with gateway_of(draft) as gateway:
            await gateway.hello()
            await attach(gateway, draft, runner.spec.peer)
            for step in (1, 2):  # the context of step 1 never comes
                plan = draft_pb2.DraftPlan(
                    step=step, session=7, kind=pb.STEP_KIND_DECODE, after=step - 1
                )
                await gateway.send(plan=plan)
            await gateway.send(ping=pb.Ping())
        await eventually(lambda: not runner.contexts)


async def test_drain_ends_streams_and_health() -> None:
    async with serve() as draft, gateway_of(draft) as gateway:
        await gateway.hello()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{draft.port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "slipstream.v1.DraftService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(draft.stop("the draft shuts down"))
        assert await gateway.code() is grpc.StatusCode.UNAVAILABLE
        assert await gateway.details() == "the draft shuts down"
        await stopping


async def test_a_failed_engine_fails_the_server() -> None:
    runner = FakeDraftRunner()
    async with serve(runner) as draft, gateway_of(draft) as gateway:
        await gateway.hello()
        end = await attach(gateway, draft, runner.spec.peer)
        await gateway.send(admit=draft_pb2.DraftAdmit(session=7, slot=0, epoch=1))
        await gateway.send(plan=draft_pb2.DraftPlan(step=1, session=7))
        await gateway.send(plan=draft_pb2.DraftPlan(step=2, session=7, after=1))
        record = ContextRecord(0, 1, 0, 2, 9, True)
        end.publish_context(ContextMessage(1, (record,), encode_rows(5, [1, 2])))
        assert await gateway.code() is grpc.StatusCode.INTERNAL
        assert isinstance(await asyncio.wait_for(draft.failure, WAIT_S), AssertionError)


async def test_as_a_process() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.draft", "--vocab", "500", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert line.startswith("READY ")
    address = json.loads(line.removeprefix("READY "))
    assert address["http"] is None
    async with grpc.aio.insecure_channel(address["grpc"]) as channel:
        gateway = Gateway(channel)
        assert (await gateway.hello()).vocab_size == 500
        process.send_signal(signal.SIGTERM)
        assert await gateway.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def run_real(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.draft", "--port", "0", "--threads", "1", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_real_draft_as_a_process(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, head="jetspec")
    process = await run_real("--model", str(pair.target), "--draft", str(pair.draft))
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    address = json.loads(line.removeprefix("READY "))["grpc"]
    async with grpc.aio.insecure_channel(address) as channel:
        gateway = Gateway(channel)
        ready = await gateway.hello()
        assert (ready.model, ready.block_size, ready.causal) == ("draft", 8, True)
        assert len(ready.fingerprints.lm_head) == 64
        assert {(c.slots, c.rows) for c in ready.draft_costs} >= {(1, 4), (1, 8), (8, 64)}
        process.send_signal(signal.SIGTERM)
        assert await gateway.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--draft", "nowhere/at/all"], "nowhere"),  # after binding and loading began
        (["--width", "none"], "--width"),
    ],
)
async def test_an_operators_mistake_is_said_and_ends_the_process(
    tmp_path: Path, flags: list[str], word: str
) -> None:
    pair = make_pair(tmp_path)
    process = await run_real("--model", str(pair.target), "--draft", str(pair.draft), *flags)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert said.decode().splitlines()[-1].startswith("error: ") and word in said.decode()


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--budget", "3"], "at least 16"), (["--speculative-config", '{"colour": 1}'], "colour")],
)
async def test_a_tree_that_does_not_fit_the_head(flags: list[str], word: str) -> None:
    settings = parse(DraftSettings, ["--model", "m", "--draft", "d", *flags])
    draft = DraftServer(FakeDraftRunner, tree=settings.tree_spec)
    with pytest.raises(ConfigError, match=word):
        await draft.load()


async def test_a_port_in_use(tmp_path: Path) -> None:
    async with serve() as draft:
        process = await run_real(
            "--model", str(tmp_path), "--draft", str(tmp_path), "--port", str(draft.port)
        )
        _, said = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2 and str(draft.port) in said.decode()
