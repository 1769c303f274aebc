"""Errands: work for the scheduler's loop to do between steps, with nothing in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import anyio

from engine.plan import ForeignFileError
from scheduler.sessions import NoRoomError, UnknownSessionError

T = TypeVar("T")

CALLERS_ERRORS = (UnknownSessionError, NoRoomError, ForeignFileError, OSError)
"""What an errand may raise without harm to anybody but who asked for it."""


class Errand(Generic[T]):
    """One piece of work: `run` in the scheduler's loop, `wait` in the task that asked for it.

    What the work raises comes out of `wait`. A cancelled wait drops the outcome; the work itself
    still runs.
    """

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._done = anyio.Event()
        self._value: T
        self._error: Exception | None = None

    async def run(self) -> Exception | None:
        """Do the work; returns what it raised."""
        try:
            self._value = await self._work()
        except Exception as error:
            self._error = error
        self._done.set()
        return self._error

    def refuse(self, error: Exception) -> None:
        """It will not be done."""
        self._error = error
        self._done.set()

    async def wait(self) -> T:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Errands:
    """Those that wait for the loop, in order."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[Errand[Any]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def do(self, work: Callable[[], Awaitable[T]]) -> T:
        """Have the loop do `work`; returns or raises what it does."""
        errand = Errand(work)
        self._waiting.append(errand)
        self._wake()
        return await errand.wait()

    async def run(self, settle: Callable[[], Awaitable[None]]) -> None:
        """In the loop: do what was asked for, one by one, each after `settle`. Raises what is not
        the caller's alone."""
        while self._waiting:
            await settle()
            error = await self._waiting.popleft().run()
            if error is not None and not isinstance(error, CALLERS_ERRORS):
                raise error

    def refuse(self, error: Exception) -> None:
        """None of them will be done."""
        while self._waiting:
            self._waiting.popleft().refuse(error)
