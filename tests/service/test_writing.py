"""One message at a time, and none for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from service.endings import Context
from service.errors import Reason, ServiceError
from service.writing import Writer

pytestmark = pytest.mark.anyio

LIMIT_S = 0.05


class Line:
    """A call's context whose client takes messages when `take` returns."""

    def __init__(self, take: Callable[[Any], Awaitable[None]]) -> None:
        self._take = take
        self.taken: list[Any] = []
        self.writing = 0

    async def write(self, message: Any) -> None:
        self.writing += 1
        assert self.writing == 1, "two writes at once"
        try:
            await self._take(message)
        finally:
            self.writing -= 1
        self.taken.append(message)


def writer(line: Line, limit_s: float = LIMIT_S) -> Writer:
    return Writer(cast(Context, line), limit_s=limit_s)


async def never(message: Any) -> None:
    await asyncio.Event().wait()


async def soon(message: Any) -> None:
    await asyncio.sleep(0)


async def test_a_message_that_is_not_taken_ends_the_call() -> None:
    one = writer(Line(never))
    with pytest.raises(ServiceError) as caught:
        await asyncio.wait_for(one.write("x"), 5)
    assert caught.value.reason is Reason.SLOW_READER
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()  # its task can go on, to send the status
    one.close()


async def test_what_is_late_is_a_message_not_a_call() -> None:
    """Each message has the whole limit, whenever the timer was set."""

    async def slowly(message: Any) -> None:
        await asyncio.sleep(0.6 * LIMIT_S)

    line = Line(slowly)
    one = writer(line)
    for number in range(8):
        await one.write(number)
    await asyncio.sleep(2 * LIMIT_S)  # nothing is written, nothing is late
    await one.write(8)
    assert line.taken == list(range(9))
    one.close()


async def test_a_late_one_after_many_in_time() -> None:
    async def take(message: Any) -> None:
        await (never(message) if message == "late" else soon(message))

    line = Line(take)
    one = writer(line)
    for number in range(1000):
        await one.write(number)
    with pytest.raises(ServiceError):
        await asyncio.wait_for(one.write("late"), 5)
    assert line.taken == list(range(1000))
    one.close()


async def test_a_cancelled_write_stays_cancelled() -> None:
    """The client left: no slow reader."""
    one = writer(Line(never), limit_s=60)
    task = asyncio.create_task(one.write("x"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    one.close()


async def test_cancelled_and_late_is_cancelled() -> None:
    one = writer(Line(never), limit_s=60)
    task = asyncio.create_task(one.write("x"))
    await asyncio.sleep(0)
    task.cancel()
    one._due = 0.0
    one._look()
    with pytest.raises(asyncio.CancelledError):
        await task
    one.close()


async def test_several_tasks_take_turns() -> None:
    line = Line(soon)
    one = writer(line)
    await asyncio.gather(*(one.write(number) for number in range(20)))
    assert line.taken == list(range(20))
    one.close()


async def test_the_timer_ends_with_the_call() -> None:
    one = writer(Line(soon))
    await one.write("x")
    assert one._timer is not None
    one.close()
    assert one._timer.cancelled()
