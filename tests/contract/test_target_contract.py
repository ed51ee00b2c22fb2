"""TargetService through a real channel: Hello, the lease, one gateway at a time, every message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.target.server import SERVICE, TargetServer
from slipstream import channels, wire
from slipstream.grammar import Grammar, GrammarKind
from slipstream.v1 import common_pb2 as pb
from slipstream.v1 import target_pb2 as tpb
from slipstream.v1 import target_pb2_grpc
from tests.fakes.target import FakeTargetRunner, expected_output, serve_fake

pytestmark = pytest.mark.anyio
WAIT_S = 5.0


class Gateway:
    """A minimal gateway on one stream."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=channels.client_options()
        )
        self.call: Any = target_pb2_grpc.TargetServiceStub(self._channel).Run()
        self.number = 0
        self.step = 0

    async def send(self, **command: Any) -> int:
        self.number += 1
        await self.call.write(tpb.TargetCommand(number=self.number, **command))
        return self.number

    async def read(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            event = await self.call.read()
        return event if event is grpc.aio.EOF else getattr(event, event.WhichOneof("event"))

    async def hello(self) -> Any:
        await self.send(hello=pb.Hello(protocol=wire.PROTOCOL, gateway="test"))
        ready = await self.read()
        self.step = ready.last_step
        return ready

    async def plan(self, kind: int, *entries: tpb.TargetPlanEntry, session: int = 0) -> None:
        self.step += 1
        await self.send(
            plan=tpb.TargetPlan(step=self.step, session=session, kind=kind, entries=entries)  # type: ignore[arg-type]
        )

    async def prefill(self, slot: int, prompt: list[int], limit: int, **admit: Any) -> Any:
        await self.send(
            admit=tpb.TargetAdmit(slot=slot, epoch=1, prompt_ids=prompt, limit=limit, **admit)
        )
        count = len(prompt)
        entry = tpb.TargetPlanEntry(
            slot=slot, epoch=1, reserve=count, count=count, last=True, **{"from": 0}
        )
        await self.plan(pb.STEP_KIND_PREFILL, entry)
        return await self.read()

    async def status(self) -> tuple[grpc.StatusCode, str]:
        async with asyncio.timeout(WAIT_S):
            return await self.call.code(), await self.call.details()

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


@asynccontextmanager
async def gateway(server: TargetServer) -> AsyncIterator[Gateway]:
    made = Gateway(server.port)
    try:
        yield made
    finally:
        await made.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def decode(slot: int, reserve: int, nodes: int = 1) -> tpb.TargetPlanEntry:
    return tpb.TargetPlanEntry(slot=slot, epoch=1, reserve=reserve, nodes=nodes)


async def test_a_request_from_hello_to_release() -> None:
    runner = FakeTargetRunner(eos_ids=(2, 3))
    async with serve_fake(runner) as server, gateway(server) as gw:
        ready = await gw.hello()
        assert (ready.protocol, ready.last_step, ready.model) == (wire.PROTOCOL, 0, "fake")
        assert (ready.slots, ready.pages, ready.page_size) == (8, 256, 16)
        assert (ready.max_nodes, list(ready.eos_ids)) == (256, [2, 3])
        assert ready.feature_width == 2 and ready.feature_dtype == pb.DTYPE_F32
        assert ready.fingerprints.fc == "fake" and ready.dtype == "float32"
        assert {(c.slots, c.rows) for c in ready.decode_costs} >= {(1, 1), (8, 512)}

        prompt = [5, 6, 7]
        want = expected_output(prompt, 8, 1000)
        done = await gw.prefill(0, prompt, 8, logprobs=1)
        assert (done.step, done.kind) == (1, pb.STEP_KIND_PREFILL)
        (entry,) = done.entries
        assert entry.outcome == tpb.StepEntry.OUTCOME_DONE
        assert list(entry.logprobs[0].top_ids) == list(entry.tokens)
        got = list(entry.tokens)
        await gw.send(ping=pb.Ping())
        while entry.finish in (pb.FINISH_UNSPECIFIED, pb.FINISH_NONE):
            await gw.plan(pb.STEP_KIND_DECODE, decode(0, 9))
            done = await gw.read()
            (entry,) = done.entries
            got += entry.tokens
        assert got == want
        assert entry.finish == pb.FINISH_LIMIT and entry.nodes == 1
        assert done.times.computed > 0 and done.times.queued > 0
        await gw.send(release=pb.Release(slot=0, epoch=1))
        await gw.plan(pb.STEP_KIND_DECODE)
        assert (await gw.read()).free_pages == 256


async def test_prompts_are_scored_and_grammars_arrive() -> None:
    runner = FakeTargetRunner(grammars=True)
    grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="a+")
    banned = pb.Sampling(banned_ids=[expected_output([5, 6, 7], 4, 1000)[0]])
    async with serve_fake(runner) as server, gateway(server) as gw:
        assert (await gw.hello()).grammars
        done = await gw.prefill(0, [5, 6, 7], 3, prompt_logprobs=1)
        (entry,) = done.entries
        assert (list(entry.tokens), entry.finish) == ([], pb.FINISH_LIMIT)
        assert [row.logprob for row in entry.prompt_logprobs] == [-6.0, -7.0]
        assert [list(row.top_ids) for row in entry.prompt_logprobs] == [[6], [7]]
        done = await gw.prefill(1, [5, 6, 7], 9, grammar=grammar, sampling=banned)
        (entry,) = done.entries
        assert not entry.prompt_logprobs and list(entry.tokens) != list(banned.banned_ids)
        assert runner._slots[1].admit.grammar == Grammar(GrammarKind.REGEX, "a+")


async def test_rejections_name_command_step_and_session() -> None:
    async with serve_fake() as server, gateway(server) as gw:
        await gw.hello()
        number = await gw.send(admit=tpb.TargetAdmit(slot=99, epoch=4, prompt_ids=[1], limit=9))
        no = await gw.read()
        assert (no.command, no.slot, no.epoch) == (number, 99, 4)
        assert no.code == pb.REJECT_CODE_SLOT_RANGE and "99" in no.reason
        await gw.plan(pb.STEP_KIND_DECODE, decode(3, 9))
        no = await gw.read()
        assert (no.step, no.slot, no.code) == (1, 3, pb.REJECT_CODE_SLOT_EMPTY)
        assert (await gw.read()).entries[0].outcome == tpb.StepEntry.OUTCOME_DROPPED
        number = await gw.send(rewind=tpb.Rewind(slot=1, epoch=1, rows=0))
        assert (await gw.read()).command == number
        # nobody listens there: refused, and the stream goes on
        await gw.send(attach=pb.Attach(session=5, first_step=2, draft_address="127.0.0.1:1"))
        no = await gw.read()
        assert (no.session, no.code) == (5, pb.REJECT_CODE_PEER)
        await gw.send(detach=pb.Detach(session=6))
        assert (await gw.read()).code == pb.REJECT_CODE_SESSION


async def test_hello_comes_first_and_speaks_our_protocol() -> None:
    async with serve_fake() as server:
        for first, text in (
            ({"ping": pb.Ping()}, "Hello"),
            ({"hello": pb.Hello(protocol=99)}, "protocol 99"),
        ):
            async with gateway(server) as gw:
                await gw.send(**first)
                code, details = await gw.status()
                assert code is grpc.StatusCode.INVALID_ARGUMENT and text in details
        async with gateway(server) as gw:
            await gw.hello()
            await gw.send(hello=pb.Hello(protocol=wire.PROTOCOL))
            assert (await gw.status())[0] is grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: server._servicer._stream is None)
        async with gateway(server) as gw:
            await gw.hello()
            gw.number += 1
            await gw.send(ping=pb.Ping())
            code, details = await gw.status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "2 was due" in details


async def test_one_gateway_at_a_time_and_the_next_goes_on() -> None:
    async with serve_fake() as server:
        async with gateway(server) as first:
            await first.hello()
            await first.prefill(0, [1, 2, 3], 64)
            async with gateway(server) as second:
                code, _ = await second.status()
                assert code is grpc.StatusCode.ALREADY_EXISTS
        await eventually(lambda: server._servicer._stream is None)
        async with gateway(server) as third:
            ready = await third.hello()
            assert ready.last_step == 1
            done = await third.prefill(0, [1, 2, 3], 64)
            assert (done.step, done.free_pages) == (2, 255)


async def test_a_silent_gateway_loses_its_lease() -> None:
    async with serve_fake(lease_s=0.3) as server:
        async with gateway(server) as gw:
            await gw.hello()
            await gw.prefill(0, [1, 2, 3], 64)
            for _ in range(3):
                await asyncio.sleep(0.2)
                await gw.send(ping=pb.Ping())
            code, details = await gw.status()
            assert code is grpc.StatusCode.UNAVAILABLE and "silent" in details
        async with gateway(server) as gw:
            assert (await gw.hello()).last_step == 1


async def test_half_closed_stream_still_answers_what_was_given() -> None:
    async with serve_fake(FakeTargetRunner(step_ms=20)) as server, gateway(server) as gw:
        await gw.hello()
        await gw.prefill(0, [1, 2, 3], 64)
        for i in range(4):
            await gw.plan(pb.STEP_KIND_DECODE, decode(0, 20 + i))
        await gw.call.done_writing()
        assert [(await gw.read()).step for _ in range(4)] == [2, 3, 4, 5]
        assert await gw.read() is grpc.aio.EOF
        assert (await gw.status())[0] is grpc.StatusCode.OK


async def test_a_cancelled_stream_finishes_its_steps_and_frees_everything() -> None:
    runner = FakeTargetRunner(step_ms=20)
    async with serve_fake(runner) as server:
        async with gateway(server) as gw:
            await gw.hello()
            await gw.prefill(0, [1, 2, 3], 64)
            for i in range(4):
                await gw.plan(pb.STEP_KIND_DECODE, decode(0, 20 + i))
            await gw.read()
        await eventually(lambda: server._servicer._stream is None)
        assert len(runner.calls) == 5
        server.engine.check()
        async with gateway(server) as gw:
            assert (await gw.hello()).last_step == 5


async def test_health_and_drain() -> None:
    async with serve_fake() as server:
        target = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(target) as channel, gateway(server) as gw:
            health = health_pb2_grpc.HealthStub(channel)

            async def state() -> Any:
                return (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status

            assert await state() == health_pb2.HealthCheckResponse.SERVING
            await gw.hello()
            await gw.prefill(0, [1, 2, 3], 64)
            draining = asyncio.create_task(server.drain(5.0))
            await eventually(lambda: server._servicer._draining)
            assert await state() == health_pb2.HealthCheckResponse.NOT_SERVING
            await gw.plan(pb.STEP_KIND_DECODE, decode(0, 20))
            assert (await gw.read()).entries[0].outcome == tpb.StepEntry.OUTCOME_DONE
            await gw.send(admit=tpb.TargetAdmit(slot=1, epoch=1, prompt_ids=[1], limit=9))
            assert (await gw.read()).code == pb.REJECT_CODE_DRAINING
            assert not draining.done()
            await gw.send(release=pb.Release(slot=0, epoch=1))
            assert await draining
            async with gateway(server) as other:
                assert (await other.status())[0] is grpc.StatusCode.UNAVAILABLE


async def test_drain_gives_up_after_its_time() -> None:
    async with serve_fake() as server, gateway(server) as gw:
        await gw.hello()
        await gw.prefill(0, [1, 2, 3], 64)
        assert not await server.drain(0.05)
        stopping = asyncio.create_task(server.stop())
        code, details = await gw.status()
        assert code is grpc.StatusCode.UNAVAILABLE and "shuts down" in details
        await stopping


async def test_a_failed_step_is_reported_to_the_process() -> None:
    runner = FakeTargetRunner()
    async with serve_fake(runner) as server, gateway(server) as gw:
        await gw.hello()
        runner.fail_next = True
        await gw.send(admit=tpb.TargetAdmit(slot=0, epoch=1, prompt_ids=[1], limit=9))
        entry = tpb.TargetPlanEntry(slot=0, epoch=1, reserve=1, count=1, last=True)
        await gw.plan(pb.STEP_KIND_PREFILL, entry)
        async with asyncio.timeout(WAIT_S):
            error = await server.failure
        assert "told to fail" in str(error)


async def test_round_trip_is_short() -> None:
    async with serve_fake(FakeTargetRunner(paranoid=False)) as server, gateway(server) as gw:
        await gw.hello()
        for slot in range(8):
            await gw.prefill(slot, [1, 2, 3], 500)
        times = []
        for i in range(50):
            began = time.perf_counter()
            await gw.plan(pb.STEP_KIND_DECODE, *(decode(slot, 30 + i) for slot in range(8)))
            await gw.read()
            times.append(time.perf_counter() - began)
        times.sort()
        print(f"plan to StepDone, 8 slots: median {1e6 * times[25]:.0f} us")
        assert times[25] < 20e-3, "far above what it should be, even on a busy machine"
