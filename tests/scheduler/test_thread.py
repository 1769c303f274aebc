"""The engine's thread hands results over and goes on; it never waits for the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from scheduler.thread import OwnerThread

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_outcomes_come_back() -> None:
    thread = OwnerThread("test")
    assert await thread.call(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 / 0)
    thread.stop()
    await thread.join()


async def test_it_does_not_wait_for_the_event_loop() -> None:
    """A busy loop takes a result when it gets there; the next job begins at once."""
    thread, next_job = OwnerThread("test"), threading.Event()
    first = asyncio.create_task(thread.call(lambda: 1))
    await asyncio.sleep(0)
    thread.post(next_job.set)
    assert next_job.wait(10), "the thread waited for a loop that is busy"  # as it is here
    assert await first == 1
    thread.stop()
    await thread.join()


async def test_nobody_waits_any_more() -> None:
    thread, go = OwnerThread("test"), threading.Event()
    waiting = asyncio.create_task(thread.call(go.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    go.set()
    assert await thread.call(lambda: 2) == 2
    thread.stop()
    await thread.join()
