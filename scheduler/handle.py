"""The reader's end of one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from scheduler.request import Event, Finished, FinishReason, Tokens


class RequestHandle:
    """The stream of one request, for one reader: any number of `Tokens`, then one `Finished`.

    Use it as `async with`: leaving the block cancels a request that has not finished, whatever
    the reason (the client left, an exception, cancellation of the task). Cancelling a task that
    waits for the next event does the same, so do not put a timeout around `__anext__` unless the
    request is to end with it.

    What is not read counts against `SchedulerConfig.stream_buffer`: at the limit the row pauses.
    """

    def __init__(
        self,
        *,
        request_id: str,
        cancel: Callable[[str, FinishReason], bool],
        acknowledge: Callable[[str, int], None],
    ) -> None:
        self.request_id = request_id
        self.finished: Finished | None = None
        """The last event, as soon as it is known, read or not."""
        self._cancel = cancel
        self._acknowledge = acknowledge
        self._events: deque[Event] = deque()
        # A bare future, made only when there is something to wait for: one per burst and stream.
        self._waiter: asyncio.Future[None] | None = None
        self._exhausted = False

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End the request; False when it had ended. Tokens already buffered stay readable, then
        `Finished` follows."""
        return self.finished is None and self._cancel(self.request_id, reason)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._exhausted:
            raise StopAsyncIteration
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        event = self._events.popleft()
        if isinstance(event, Tokens):
            if self.finished is None:
                self._acknowledge(self.request_id, len(event.ids))
        else:
            self._exhausted = True
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def push(self, event: Event) -> None:
        """The scheduler's side: what the reader finds next."""
        if isinstance(event, Finished):
            self.finished = event
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
