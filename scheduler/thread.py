"""One thread that owns the engine: everything that touches it is called here, in order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio

T = TypeVar("T")


class _Call(Generic[T]):
    """A call on its way to the thread and its outcome on the way back."""

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        # Not an anyio.Event set through `from_thread.run_sync`: that makes the thread wait until
        # the event loop has seen it, and the thread has the next step to begin.
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._value: T
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """On the owner thread."""
        try:
            self._value = self._function(*self._args)
        except BaseException as error:
            self._error = error
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and the waiter with it
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._done.done():  # nobody waits for it any more
            self._done.set_result(None)

    async def result(self) -> T:
        """What the function returned, once it has; raises what it raised."""
        await self._done
        if self._error is not None:
            raise self._error
        return self._value


class OwnerThread:
    """A daemon thread with a queue of calls. Daemon: a wedged device must not keep the process."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` on the thread; returns or raises what it does.

        A cancelled wait drops the outcome; the call itself still runs.
        """
        call = _Call(function, args)
        self._jobs.put(call)
        return await call.result()

    def post(self, function: Callable[[], None]) -> None:
        """Run `function`, which must not raise, when the thread gets there; does not wait."""
        self._jobs.put(function)

    def stop(self) -> None:
        """End the thread after the calls already queued; idempotent, does not wait."""
        self._jobs.put(None)

    async def join(self) -> None:
        """Wait until the thread has ended, and its thread-local device state with it."""
        while self._thread.is_alive():
            await anyio.sleep(0.001)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
