"""The messages of one call on their way to its client, none of which may take for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from service.endings import Context
from service.errors import Reason, ServiceError


class Writer:
    """Writes one message at a time, whichever of the call's tasks it comes from.

    A timer per message would cost as much as making the message. Here one stands for the whole
    call: when it goes off it looks whether the write of that moment is late, and else is set anew.
    """

    def __init__(self, context: Context, *, limit_s: float) -> None:
        """`limit_s`: most seconds a message may wait for its client."""
        self._context = context
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._late: asyncio.Task[Any] | None = None
        self._due = 0.0
        """When the write of `_writing` is late."""

    async def write(self, message: Any) -> None:
        """Returns when gRPC has taken the message. Raises ServiceError (SLOW_READER) when the
        client does not take it in time."""
        async with self._lock:
            await self._write(message)

    def close(self) -> None:
        """Nothing more will be written."""
        if self._timer is not None:
            self._timer.cancel()

    async def _write(self, message: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        self._due = self._loop.time() + self._limit_s
        self._writing = task
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            # If it was cancelled for another reason as well, that one has the last word.
            if self._late is task and task.uncancel() <= cancels:
                raise ServiceError(
                    Reason.SLOW_READER, "the stream was left unread for too long"
                ) from None
            raise
        finally:
            self._writing = None

    def _look(self) -> None:
        self._timer = None
        if self._writing is None:
            return  # the next write sets it
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        self._late = self._writing
        self._writing.cancel()
