"""A call from its first header to its message: bounded in number and in time, and counted.

gRPC's own handlers of one message begin when it has come. What happens before, nobody hears of: a
message that never comes holds its call for ever, and one that is too large, a client that leaves
first or a bound on calls that is exceeded ends it without a trace. Here every method that takes one
message is served as a stream of one, so a call is seen from its headers on and ends with a reason
that is counted and logged like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from service.config import ServerConfig
from service.endings import Context, abort, gone
from service.errors import Reason, ServiceError, Violation, invalid
from service.logs import Logger
from service.metrics import Metrics

Handler = Callable[[Any, Context], Awaitable[Any]]

_GENERATE: Final = "/Generate"
"""End of the names of methods whose refusals are counted: both protocols'."""

_LOG_INTERVAL_S: Final = 1.0
"""Calls of one kind within this time of each other share a line."""

_CANCELLATION_S: Final = 0.1
"""Within which gRPC tells that a call was cancelled, once it has given up reading it."""


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands in for a message that is no valid protobuf."""

    why: str


class IntakeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of every method that takes one message. Before those
    that look at handlers: they see them as they are, and what they refuse is not counted here."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        free_services: Collection[str],
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """At most `config.max_concurrent_rpcs` calls run at once. Those of `free_services` do not
        count: once they have their message they are bounded elsewhere, or hold nothing; before, at
        most `config.max_open_calls` of them wait for it."""
        self._config = config
        self._free = frozenset(free_services)
        self._metrics = metrics
        self._logger = logger
        self._calls = 0
        self._unread: dict[asyncio.Timeout, None] = {}
        """Of the calls that do not count, those that wait for their message, oldest first."""
        self._more: dict[tuple[Reason, str], int] = {}
        """Calls since the last line about their kind, where that is not long ago."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, wrapped; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None or handler.request_streaming:
            return handler
        asks = "stream" if handler.response_streaming else "unary"
        make = getattr(grpc, f"stream_{asks}_rpc_method_handler")
        return make(
            self._guard(getattr(handler, f"unary_{asks}"), handler_call_details.method),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guard(self, inner: Handler, method: str) -> Handler:
        counted = method.rpartition("/")[0].lstrip("/") not in self._free

        async def answer(_: object, context: Context) -> Any:
            if counted and self._calls >= self._config.max_concurrent_rpcs:
                return await self._refuse(self._too_many(), method, context)
            self._calls += counted
            try:
                try:
                    request = await self._read(context, gives_way=not counted)
                except ServiceError as refusal:
                    return await self._refuse(refusal, method, context)
                except asyncio.CancelledError:
                    self._note(self._cut_off(context), method, context)
                    raise
                return await inner(request, context)
            finally:
                self._calls -= counted

        return answer

    async def _read(self, context: Context, *, gives_way: bool) -> Any:
        """The call's message. Raises ServiceError."""
        limit = self._config.message_timeout_s
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                if gives_way:
                    self._make_way(timer)
                request = await context.read()
        except TimeoutError:
            waits = not gives_way or timer in self._unread
            when = f"within {limit:g} s" if waits else "before another call wanted its place"
            message = f"the message did not arrive {when}"
            raise ServiceError(Reason.SLOW_SENDER, message) from None
        finally:
            self._unread.pop(timer, None)
        if request is grpc.aio.EOF:  # type: ignore[attr-defined]
            # A call that its client has reset, or gRPC for the size of its message, looks like one
            # that is over without any, until its cancellation arrives.
            await asyncio.sleep(_CANCELLATION_S)
            raise invalid([Violation("(message)", "none was sent")])
        if isinstance(request, _Undecodable):
            raise invalid([Violation("(message)", request.why)])
        return request

    def _make_way(self, timer: asyncio.Timeout) -> None:
        """A call that does not count waits for its message. Of too many the oldest is given up:
        who means it sends headers and message together, and strangers may call these services."""
        self._unread[timer] = None
        if len(self._unread) > self._config.max_open_calls:
            oldest = next(iter(self._unread))
            del self._unread[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())

    def _cut_off(self, context: Context) -> ServiceError:
        error = gone(context)
        if error.reason is not Reason.CANCELLED:
            return error
        limit = self._config.max_message_bytes
        text = f"the client left, or its message is larger than {limit} bytes"
        return ServiceError(Reason.CANCELLED, text)

    def _too_many(self) -> ServiceError:
        return ServiceError(
            Reason.TOO_MANY_CALLS,
            f"{self._config.max_concurrent_rpcs} calls run already",
            retry_after_s=self._config.retry_after_s,
        )

    async def _refuse(self, error: ServiceError, method: str, context: Context) -> NoReturn:
        self._note(error, method, context)
        await abort(context, error)

    def _note(self, error: ServiceError, method: str, context: Context) -> None:
        """Counts and logs a call that ended before its handler had it. Of a flood the log has the
        first and, for each second, how many followed."""
        reason, generates = error.reason, method.endswith(_GENERATE)
        if generates:
            self._metrics.refused(reason)
        kind = (reason, "generate" if generates else "other")
        if kind in self._more:
            self._more[kind] += 1
            return
        self._logger.warning(
            "call not taken",
            reason=reason.value,
            detail=error.message,
            method=method[:128],
            peer=context.peer(),
        )
        self._more[kind] = 0
        asyncio.get_running_loop().call_later(_LOG_INTERVAL_S, self._count_rest, kind)

    def _count_rest(self, kind: tuple[Reason, str]) -> None:
        reason, methods = kind
        if more := self._more.pop(kind):
            self._logger.warning(
                "calls not taken", reason=reason.value, methods=methods, calls=more
            )
            self._more[kind] = 0
            asyncio.get_running_loop().call_later(_LOG_INTERVAL_S, self._count_rest, kind)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return read
