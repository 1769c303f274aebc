"""The running scheduler: streams, the engine's thread, cancellation, slow readers, idleness."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from engine.plan import StepPlan
from scheduler import (
    Finished,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    QueueFullError,
    RequestHandle,
    Scheduler,
    SchedulerConfig,
    StepRecord,
    Tokens,
)
from scheduler.config import LoopKind
from tests.scheduler.bench import Multiples, make_request, tokens_alone
from tests.scheduler.fake_engine import FakeEngine, expected_tokens
from tests.scheduler.loops import LOOPS, drink, scheduler, settled, slow_engine, until

pytestmark = pytest.mark.anyio


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
async def test_streams_get_their_tokens(loop: LoopKind) -> None:
    """Both loops, many at once: what each request gets alone."""
    requests = [
        make_request(
            f"r{n}", prompt=1 + n * 37 % 300, max_tokens=1 + n * 7 % 60, seed=n, stop_ids=(n,)
        )
        for n in range(40)
    ]
    results: dict[str, tuple[list[int], Finished]] = {}

    async def one(request: GenerationRequest) -> None:
        results[request.request_id] = await drink(s.submit(request))

    async with scheduler(loop=loop) as s, anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(one, request)
    for request in requests:
        tokens, finished = results[request.request_id]
        assert tokens == expected_tokens(
            request.prompt_ids,
            seed=request.sampling.seed,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
        )
        assert finished.reason in ("stop", "length")


@pytest.mark.parametrize(("loop", "most"), [("plain", 1), ("pipelined", 2)])
async def test_steps_in_flight(loop: LoopKind, most: int) -> None:
    depths = []
    engine = FakeEngine(before_collect=lambda result: depths.append(1 + len(engine._results)))
    async with scheduler(engine, loop=loop) as s:
        await drink(s.submit(make_request(max_tokens=50)))
    assert max(depths) == most


async def test_the_engine_lives_on_one_thread() -> None:
    threads = set()

    class Watched(FakeEngine):
        def __getattribute__(self, name: str) -> Any:
            if name in ("submit", "collect", "close", "info", "max_in_flight"):
                threads.add(threading.current_thread().name)
            return super().__getattribute__(name)

    async with Scheduler(engine_factory=Watched) as s:
        await drink(s.submit(make_request()))
        assert s.info.model == "fake"
    assert threads == {"engine"}


async def test_a_stream_ends_once_and_stays_ended() -> None:
    async with scheduler() as s:
        handle = s.submit(make_request(max_tokens=3))
        events = [event async for event in handle]
        assert isinstance(events[-1], Finished)
        assert [event async for event in handle] == []
        assert not handle.cancel()
        assert not s.abort("r")


async def test_the_door() -> None:
    async with scheduler(slow_engine(max_rows=1), max_queue=1) as s:
        with pytest.raises(InvalidRequestError):
            s.submit(make_request(prompt=[]))
        first = s.submit(make_request("a", max_tokens=500))
        await until(lambda: s.statistics().running == 1)
        s.submit(make_request("b"))
        with pytest.raises(QueueFullError):
            s.submit(make_request("c"))
        first.cancel()
        await until(lambda: s.statistics().queued_requests == 0)
        assert (await drink(s.submit(make_request("c"))))[1].reason == "length"


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("when", ["queued", "prefill", "decode", "finished"])
async def test_cancel(loop: LoopKind, when: str) -> None:
    engine = slow_engine(max_rows=1)
    async with scheduler(engine, loop=loop, prefill_chunk=16) as s:
        if when == "queued":
            s.submit(make_request("other", max_tokens=2000))
            await until(lambda: s.statistics().running == 1)
        handle = s.submit(make_request(prompt=480 if when == "prefill" else 5, max_tokens=40))
        if when == "prefill":
            await until(lambda: s.statistics().prompt_tokens > 16)
            assert s.statistics().prefilling == 1
        elif when == "decode":
            await until(lambda: s.statistics().generated_tokens > 3)
        elif when == "finished":
            await until(lambda: handle.finished is not None)
        assert handle.cancel() is (when != "finished")
        finished = (await drink(handle))[1]
        assert finished.reason == ("length" if when == "finished" else "cancelled")
        s.abort("other")
        await settled(s)


async def test_a_reader_that_is_cancelled_cancels_its_request() -> None:
    """While it waits for tokens, and while it does something else inside the block."""

    async def reader(handle: RequestHandle) -> None:
        async for _ in handle:
            pass

    async def writer(handle: RequestHandle) -> None:
        async with handle:
            async for _ in handle:
                await anyio.sleep_forever()

    async with scheduler(slow_engine()) as s:
        for number, task in enumerate((reader, writer)):
            handle = s.submit(make_request(f"r{number}", max_tokens=2000))
            with anyio.move_on_after(0.05):
                await task(handle)
            assert handle.finished is not None
            assert handle.finished.reason == "cancelled"
        await settled(s)


async def test_the_service_may_have_enough() -> None:
    async with scheduler(slow_engine()) as s:
        handle = s.submit(make_request(max_tokens=2000))
        async for event in handle:
            if isinstance(event, Tokens):
                handle.cancel(FinishReason.STOP_STRING)
        assert handle.finished is not None
        assert handle.finished.reason == "stop_string"
        await settled(s)


async def test_deadlines_fire_while_nothing_else_happens() -> None:
    """The only row is paused, so only the deadline can wake the loop."""
    async with scheduler(stream_buffer=5) as s:
        handle = s.submit(make_request(max_tokens=500, deadline=anyio.current_time() + 0.1))
        await until(lambda: handle.finished is not None)
        assert handle.finished is not None
        assert handle.finished.reason == "deadline"
        await settled(s)


# --- slow readers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_slow_reader_pauses_only_itself(loop: LoopKind) -> None:
    async with scheduler(loop=loop, stream_buffer=8, depth=4) as s:
        slow = s.submit(make_request("slow", max_tokens=300))
        tokens, _ = await drink(s.submit(make_request("fast", max_tokens=300)))
        assert len(tokens) == 300
        buffered = sum(len(e.ids) for e in slow._events if isinstance(e, Tokens))
        assert 8 <= buffered <= 8 + 2 * 5
        assert s.statistics().paused == 1
        request = make_request("slow", max_tokens=300)
        tokens, finished = await drink(slow)
        assert tokens == expected_tokens(request.prompt_ids, seed=0, max_tokens=300)
        assert finished.reason == "length"
        await settled(s)


async def test_a_reader_that_never_reads_is_ended() -> None:
    async with scheduler(stream_buffer=8, slow_reader_timeout_s=0.1) as s:
        handle = s.submit(make_request(max_tokens=300))
        await until(lambda: handle.finished is not None)
        tokens, finished = await drink(handle)
        assert finished.reason == "slow_reader"
        assert len(tokens) == finished.usage.completion_tokens, "what was buffered is readable"
        await settled(s)


# --- idleness and records -------------------------------------------------------------------------


class Counted(Scheduler):
    """Counts its plans."""

    plans = 0

    def _plan(self) -> StepPlan:
        self.plans += 1
        return super()._plan()


async def check_idle(loop: LoopKind) -> None:
    config = SchedulerConfig(loop=loop, stream_buffer=5)
    async with Counted(engine_factory=FakeEngine, config=config) as s:
        await anyio.sleep(0.1)
        assert s.plans <= 1
        handle = s.submit(make_request(max_tokens=300))
        await until(lambda: s.statistics().paused == 1)
        await anyio.sleep(0.05)
        before = s.plans
        await anyio.sleep(0.2)
        assert s.plans == before
        await drink(handle)
        await settled(s)
        await anyio.sleep(0.05)
        before = s.plans
        await anyio.sleep(0.2)
        assert s.plans == before


@pytest.mark.parametrize("loop", LOOPS)
async def test_idle_is_idle(loop: LoopKind) -> None:
    """No plan without news: with nothing to do, and with only a paused row."""
    await check_idle(loop)


@pytest.mark.parametrize("loop", LOOPS)
async def test_every_step_is_recorded(loop: LoopKind) -> None:
    records: list[StepRecord] = []
    async with scheduler(on_step=records.append, loop=loop) as s:
        for number in range(3):
            await drink(s.submit(make_request(f"r{number}", prompt=300, max_tokens=20)))
        await settled(s)
        statistics = s.statistics()
    assert [record.step for record in records] == list(range(len(records)))
    assert sum(record.prompt_tokens for record in records) == 900
    assert sum(record.tokens for record in records) == statistics.generated_tokens == 60
    assert sum(record.accepted for record in records) == statistics.accepted
    assert all(0 <= record.host_s < 1 for record in records)


@pytest.mark.parametrize("loop", LOOPS)
async def test_guided_and_free_rows_stream_side_by_side(loop: LoopKind) -> None:
    """Each gets what it gets alone, and guided rows alone do not make the loop spin."""
    records: list[StepRecord] = []
    engine = FakeEngine(step_s=0.001)
    requests = [
        make_request(
            f"r{n}", max_tokens=30, seed=n, constraint=None if n % 2 else Multiples(2 + n, 1000)
        )
        for n in range(6)
    ]
    tokens: dict[str, list[int]] = {}

    async def one(request: GenerationRequest) -> None:
        tokens[request.request_id] = (await drink(s.submit(request)))[0]

    config = SchedulerConfig(loop=loop)
    async with Counted(engine_factory=lambda: engine, config=config, on_step=records.append) as s:
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
        await settled(s)
        plans, steps = s.plans, s.statistics().steps
        alone = make_request("alone", max_tokens=40, constraint=Multiples(2, 1000))
        await one(alone)
        await settled(s)
        spun = (s.plans - plans) - 2 * (s.statistics().steps - steps)
    assert tokens == {r.request_id: tokens_alone(r, 1000) for r in [*requests, alone]}
    assert sum(record.guided_rows for record in records) == s.statistics().guided_row_cycles
    assert any(record.guided_rows and record.rows for record in records)
    assert any(record.guided_depth for record in records)
    assert spun <= 3
    gaps = {record.gap_s for record in records}
    assert gaps == ({None} if loop == "plain" else {None, 0.0})
