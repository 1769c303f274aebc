"""The running scheduler: streams, the engine's thread, drain, death, idleness."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from engine.plan import StepPlan, StepResult
from scheduler import (
    Finished,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    NotRunningError,
    QueueFullError,
    RequestHandle,
    Scheduler,
    SchedulerConfig,
    StepRecord,
    Tokens,
)
from scheduler.config import LoopKind
from scheduler.pages import IntegrityError
from tests.scheduler.bench import Multiples, make_request, tokens_alone
from tests.scheduler.fake_engine import FakeEngine, expected_tokens

pytestmark = pytest.mark.anyio
LOOPS: list[LoopKind] = ["plain", "pipelined"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def scheduler(engine: FakeEngine | None = None, *, on_step: Any = None, **config: Any) -> Scheduler:
    made = engine or FakeEngine()
    return Scheduler(engine_factory=lambda: made, config=SchedulerConfig(**config), on_step=on_step)


async def drink(handle: RequestHandle) -> tuple[list[int], Finished]:
    """All tokens and the end."""
    tokens: list[int] = []
    async with handle:
        async for event in handle:
            if isinstance(event, Tokens):
                tokens += event.ids
    assert handle.finished is not None
    return tokens, handle.finished


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.002)


async def settled(s: Scheduler) -> None:
    """Rows and pages are free; nothing is in flight."""
    await until(lambda: s.statistics().rows_held == 0 and s.statistics().in_flight == 0)
    assert s.statistics().pages_used == 0
    assert s.failure is None


def slow_engine(**options: Any) -> FakeEngine:
    return FakeEngine(step_s=0.003, **options)


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


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_dead_engine_ends_every_stream(loop: LoopKind) -> None:
    engine = slow_engine(max_rows=2, dies_at=12)
    async with scheduler(engine, loop=loop) as s:
        handles = [s.submit(make_request(f"r{n}", max_tokens=500)) for n in range(5)]
        with anyio.fail_after(5):
            await s.failed.wait()
        for handle in handles:
            with anyio.fail_after(1):
                _, finished = await drink(handle)
            assert finished.reason == "engine_failed"
            assert "scripted death" in finished.detail
        with pytest.raises(NotRunningError, match="scripted death"):
            s.submit(make_request())
        assert s.failure is not None
        assert s.statistics().pages_used == 0
        await s.drain(1)
    assert engine.closed


async def test_any_exception_of_the_engine_is_its_death() -> None:
    def explode(result: StepResult) -> None:
        raise MemoryError("no memory")

    async with scheduler(FakeEngine(before_collect=explode)) as s:
        _, finished = await drink(s.submit(make_request()))
        assert (finished.reason, finished.detail) == ("engine_failed", "MemoryError: no memory")
        assert s.failed.is_set()


async def test_books_that_do_not_balance_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler() as s:
        await drink(s.submit(make_request("a")))
        await settled(s)
        s._core._pool._free.pop()
        await drink(s.submit(make_request("b")))
        with anyio.fail_after(5):
            await s.failed.wait()
        assert isinstance(s.failure, IntegrityError)


async def test_a_fault_ends_its_row_only() -> None:
    async with scheduler(FakeEngine(faults={(1, 2, 3): 0})) as s:
        bad = s.submit(make_request("bad", prompt=3))
        good = s.submit(make_request("good", prompt=4))
        assert (await drink(bad))[1].reason == "fault"
        assert (await drink(good))[1].reason == "length"
        await settled(s)


async def test_an_engine_that_does_not_load() -> None:
    def factory() -> FakeEngine:
        raise ValueError("no such checkpoint")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no such checkpoint"):
        async with Scheduler(engine_factory=factory):
            pass
    await until(lambda: threading.active_count() <= before)


async def test_leaving_while_the_engine_loads() -> None:
    engine = FakeEngine()
    loading = threading.Event()

    def factory() -> FakeEngine:
        loading.wait(5)
        return engine

    with anyio.move_on_after(0.05):
        async with Scheduler(engine_factory=factory):
            pass
    loading.set()
    await until(lambda: engine.closed)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
async def test_drain_finishes_what_runs(loop: LoopKind) -> None:
    async with scheduler(slow_engine(max_rows=2), loop=loop) as s:
        handles = [s.submit(make_request(f"r{n}", max_tokens=20)) for n in range(5)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(s.drain, 10)
            await anyio.sleep(0.01)
            with pytest.raises(NotRunningError, match="draining"):
                s.submit(make_request("late"))
        assert [h.finished and h.finished.reason for h in handles] == ["length"] * 5
        await s.drain(10)


async def test_drain_has_a_limit() -> None:
    async with scheduler(slow_engine()) as s:
        handle = s.submit(make_request(max_tokens=3000))
        await until(lambda: s.statistics().generated_tokens > 0)
        start = time.monotonic()
        await s.drain(0.05)
        assert time.monotonic() - start < 1
        _, finished = await drink(handle)
        assert finished.reason == "shutdown"
        await settled(s)


async def test_an_idle_scheduler_drains_at_once() -> None:
    async with scheduler() as s:
        with anyio.fail_after(1):
            await s.drain(60)


@pytest.mark.parametrize("loop", LOOPS)
async def test_close_ends_requests_and_the_engine(loop: LoopKind) -> None:
    engine = slow_engine()
    async with scheduler(engine, loop=loop) as s:
        handle = s.submit(make_request(max_tokens=3000))
        await until(lambda: s.statistics().generated_tokens > 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(s.aclose)
            tasks.start_soon(s.aclose)
        assert engine.closed
        assert engine.rows == 0, "the last plan released the row"
        assert handle.finished is not None
        assert handle.finished.reason == "shutdown"
        await s.aclose()
        with pytest.raises(NotRunningError):
            s.submit(make_request())


async def test_close_survives_cancellation() -> None:
    engine = slow_engine()
    with anyio.move_on_after(0.05):
        async with scheduler(engine) as s:
            s.submit(make_request(max_tokens=3000))
            await anyio.sleep_forever()
    assert engine.closed


async def test_an_error_inside_the_block_comes_out() -> None:
    engine = FakeEngine()
    with pytest.raises(KeyError, match="mine"):
        async with scheduler(engine):
            raise KeyError("mine")
    assert engine.closed


async def test_a_wedged_engine_does_not_hold_the_process() -> None:
    wedge = threading.Event()

    def wait(result: StepResult) -> None:
        wedge.wait(10)

    engine = FakeEngine(before_collect=wait)
    start = time.monotonic()
    async with scheduler(engine, close_timeout_s=0.2) as s:
        handle = s.submit(make_request())
        await anyio.sleep(0.05)
    assert time.monotonic() - start < 2
    assert handle.finished is not None
    assert handle.finished.reason == "shutdown"
    wedge.set()
    await until(lambda: engine.closed)


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
