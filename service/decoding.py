"""Answers for messages that are no valid protobuf.

gRPC itself ends such a call with UNKNOWN and a traceback in the log, although nothing is wrong but
the client's bytes (usually a string that is not UTF-8). Here it is INVALID_ARGUMENT like any other
bad request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from service.endings import Context, abort
from service.errors import Violation, invalid
from service.logs import Logger

Handler = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands in for a message that could not be read."""

    why: str


class DecodeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of every method that takes one message."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, made tolerant; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None or handler.request_streaming:
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        inner: Handler = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return make(
            self._guard(inner, handler_call_details.method),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guard(self, inner: Handler, method: str) -> Handler:
        async def answer(request: Any, context: Context) -> Any:
            if isinstance(request, _Undecodable):
                self._logger.warning(
                    "undecodable message", method=method, peer=context.peer(), why=request.why
                )
                await abort(context, invalid([Violation("(message)", request.why)]))
            return await inner(request, context)

        return answer


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return read
