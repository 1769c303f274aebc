"""The running scheduler's ends: a dead engine, drain, close."""

from __future__ import annotations

import threading
import time

import anyio
import pytest

from engine.plan import StepResult
from scheduler import NotRunningError, Scheduler
from scheduler.config import LoopKind
from scheduler.pages import IntegrityError
from tests.scheduler.bench import make_request
from tests.scheduler.fake_engine import FakeEngine
from tests.scheduler.loops import LOOPS, drink, scheduler, settled, slow_engine, until

pytestmark = pytest.mark.anyio


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
