"""Sessions over shared memory through a real channel, on a CPU: threads in place of streams."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.handoff.cuda_ipc import CudaDraftEnd, CudaTargetEnd
from slipstream.handoff.cuda_ipc.lane import Lane
from slipstream.handoff.cuda_ipc.times import TIMES, Times
from slipstream.handoff.layout import SETS, Flag, flag_word
from tests.fakes.device_steps import SPEC, Draft, draft_steps, finish, target_steps
from tests.fakes.handoff_pair import FIRST, QUICK, Pair, eventually, leave, segments, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("every", [1, 3])
async def test_a_thousand_steps(every: int) -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        assert isinstance(target, CudaTargetEnd) and isinstance(draft, CudaDraftEnd)
        assert target.transport == draft.transport == "cuda_ipc" and target.fallback == ""
        assert target.which == draft.which and pair.export.free == SETS - 1
        done = await asyncio.gather(
            asyncio.to_thread(target_steps, target, FIRST, 1000, every),
            asyncio.to_thread(draft_steps, draft, FIRST, 1000),
        )
        assert done == [1000, 1000] and target.alive and draft.alive
        await leave(target, draft)
        await eventually(lambda: pair.export.free == SETS)
        assert target.drained


@pytest.mark.slow
async def test_a_thousand_steps_of_two_processes() -> None:
    async with serving() as pair:
        other = Draft()
        try:
            target = await connected(pair, other, 1)
            assert await asyncio.to_thread(target_steps, target, FIRST, 1000) == 1000
            target.end("enough")
            assert "the target ended the session: enough" in await said(other)
            await eventually(lambda: pair.export.free == SETS)
        finally:
            other.close()


async def said(other: Draft) -> str:
    return await asyncio.wait_for(asyncio.to_thread(other.says), 30)


async def connected(pair: Pair, other: Draft, session: int) -> CudaTargetEnd:
    other.expect(session, FIRST)
    future = pair.loop.create_future()
    address = f"127.0.0.1:{other.port}"
    pair.connector.connect(session, FIRST, address, SPEC, future.set_result, pair.export)
    end = await asyncio.wait_for(future, 10)
    assert isinstance(end, CudaTargetEnd), getattr(end, "fallback", end)
    return end


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_draft_that_dies_or_stands_still_releases_the_target(number: int) -> None:
    async with serving() as pair:
        other = Draft()
        try:
            target = await connected(pair, other, 1)
            steps = asyncio.create_task(asyncio.to_thread(target_steps, target, FIRST, 1 << 40))
            await asyncio.sleep(0.1)
            os.kill(other.process.pid, number)
            killed = time.monotonic()
            done = await asyncio.wait_for(steps, 10)
            assert done > 0 and not target.alive and target.reason
            assert time.monotonic() - killed < 4.0
            assert not target.drained  # the engine has not said that it knows
            target.end("known")
            await eventually(lambda: target.drained)
            if number == signal.SIGSTOP:
                assert "heartbeat" in target.reason
                await asyncio.sleep(0.2)
                assert pair.export.free == SETS - 1  # it may still write there
                os.kill(other.process.pid, signal.SIGCONT)
                assert (await said(other)).startswith("closed")
            else:
                other.process.wait()
            await eventually(lambda: pair.export.free == SETS)
        finally:
            other.close()


async def test_a_release_outlives_what_the_peer_still_writes() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        flags = Lane(draft.memory.segment, draft.memory.signals, draft.which)
        writing = threading.Event()

        def write() -> None:
            while not writing.wait(0.0001):
                flags.store(Flag.PROPOSAL, FIRST - 1)
                flags.store(Flag.CONTEXT, FIRST - 1)

        thread = threading.Thread(target=write)
        thread.start()
        waits = asyncio.gather(
            asyncio.to_thread(target.await_proposal, FIRST),
            asyncio.to_thread(draft.await_context, FIRST),
        )
        await asyncio.sleep(0.05)
        target.end("over")
        await asyncio.wait_for(waits, 5)
        assert not target.drained and "over" in draft.reason
        writing.set()
        thread.join()
        target.passed(FIRST, 0)
        await eventually(lambda: target.drained)
        assert pair.export.free == SETS - 1
        draft.end("known")
        draft.planned(FIRST)
        draft.passed(FIRST)
        draft.close()
        assert pair.export.free == SETS


async def test_no_operation_goes_on_a_session_that_ended() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        draft.end("drained")
        await eventually(lambda: not target.alive)
        assert target.reason == "the draft ended the session: drained"
        target.await_proposal(FIRST)
        target.await_room(FIRST + 100)
        target.publish(FIRST)
        draft.await_context(FIRST)
        draft.publish(FIRST)
        target.end("known")
        await eventually(lambda: target.drained)
        draft.close()


async def test_the_watchdog_counts_from_what_the_draft_planned() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        waiting = asyncio.create_task(asyncio.to_thread(target.await_proposal, FIRST))
        await asyncio.sleep(0.8)
        assert target.alive  # twice the limit, but the draft was not asked yet
        draft.planned(FIRST)
        began = time.monotonic()
        await asyncio.wait_for(waiting, 5)
        assert time.monotonic() - began > 0.3
        assert target.reason == f"no proposal for step {FIRST} within 400 ms"
        target.passed(FIRST, 0)
        await leave(target, draft)


async def test_a_draft_that_plans_nothing_is_not_waited_for_without_an_end() -> None:
    """Its heart beats, but its engine stands still."""
    async with serving(replace(QUICK, unplanned=0.6)) as pair:
        target, draft = await pair.session()
        began = time.monotonic()
        await asyncio.wait_for(asyncio.to_thread(target.await_proposal, FIRST), 5)
        assert 0.5 < time.monotonic() - began < 3
        assert target.reason == f"the draft did not plan step {FIRST} within 0.6 s"
        target.passed(FIRST, 0)
        await leave(target, draft)


@pytest.mark.slow
async def test_a_step_does_not_wake_the_thread() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        began, beat = time.monotonic(), target._beat
        for step in range(FIRST, FIRST + 300):
            target.publish(step)
            target.passed(step, 0)
            await asyncio.sleep(0.001)
        assert target._beat - beat <= 2 + (time.monotonic() - began) / QUICK.tick
        await leave(target, draft)


@pytest.mark.slow
async def test_the_watchdog_does_not_count_the_step_itself() -> None:
    async with serving(watchdog_ms=50) as pair:
        target, draft = await pair.session()
        draft.publish(FIRST)
        draft.planned(FIRST)
        await asyncio.to_thread(target.await_proposal, FIRST)
        target.publish(FIRST)
        await asyncio.sleep(0.2)  # the step's forward pass takes its time
        assert target.alive
        target.passed(FIRST, 0)
        draft.passed(FIRST)
        await leave(target, draft)


@pytest.mark.slow
async def test_the_watchdog_waits_for_room_as_well() -> None:
    async with serving(watchdog_ms=100) as pair:
        target, draft = await pair.session()
        draft.planned(FIRST + 50)
        await asyncio.wait_for(asyncio.to_thread(target.await_room, FIRST + 50), 5)
        assert "no room" in target.reason
        target.passed(FIRST + 50, 0)
        await leave(target, draft)


async def test_a_session_begins_with_its_flags_below_its_first_step() -> None:
    async with serving() as pair:
        for number in range(1, 2 * SETS):
            target, draft = await pair.session(number)
            words = [
                int(draft.memory.segment.words[flag_word(draft.which, flag)])
                for flag in (Flag.CONTEXT, Flag.PROPOSAL, Flag.CONSUMED, Flag.PLANNED)
            ]
            assert words == [FIRST - 1] * 4
            await leave(target, draft)


async def test_a_broken_stream_releases_both_and_unmaps() -> None:
    async with serving() as pair:
        target, draft = await pair.session()
        waits = asyncio.gather(
            asyncio.to_thread(target.await_proposal, FIRST),
            asyncio.to_thread(draft.await_context, FIRST),
        )
        await asyncio.sleep(0.05)
        await pair.connector.close()
        await asyncio.wait_for(waits, 5)
        assert "stream" in target.reason and "stream" in draft.reason
        target.passed(FIRST, 0)
        assert pair.mapper.mapped == 1
        await leave(target, draft)
        assert pair.mapper.mapped == 0  # the target may be gone
        await eventually(lambda: pair.export.free == SETS)


@pytest.mark.slow
async def test_a_target_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Lane.store

    def silent(lane: Lane, flag: Flag, value: int) -> None:
        if flag is not Flag.TARGET_BEAT:
            store(lane, flag, value)

    monkeypatch.setattr(Lane, "store", silent)
    async with serving(Times(lease=0.3, first_beat=0.3)) as pair:
        target, draft = await pair.session()
        await eventually(lambda: not draft.alive)
        assert "the target's heartbeat is older than 0.3 s" in draft.reason
        await leave(target, draft)


def held(pair: Pair) -> tuple[int, int, int, int]:
    """Open files, mapped segments, files of segments, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("slipstream-")
    return len(os.listdir("/proc/self/fd")), maps, segments(pair), threading.active_count()


@pytest.mark.slow
async def test_three_hundred_attaches_leave_nothing() -> None:
    async with serving() as pair:
        before = (0, 0, 0, 0)
        for number in range(1, 301):
            target, draft = await pair.session(number)
            assert isinstance(target, CudaTargetEnd) and isinstance(draft, CudaDraftEnd)
            await leave(target, draft)
            if number == 40:
                await eventually(lambda: pair.export.free == SETS)
                before = held(pair)
        await eventually(lambda: pair.export.free == SETS)
        await eventually(lambda: held(pair)[0] <= before[0] + 2)
        after = held(pair)
        assert after[1:3] == before[1:3] and after[3] <= before[3] + 2
        assert pair.mapper.mapped == 1


async def test_closing_the_export_ends_what_is_left() -> None:
    async with serving(TIMES) as pair:
        target, draft = await pair.session()
        await asyncio.to_thread(pair.export.close)
        assert not target.alive and target.drained
        await eventually(lambda: not draft.alive)
        await asyncio.to_thread(finish, draft)
