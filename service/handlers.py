"""Something around every call of a method, whatever kind of handler it has."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from service.endings import Context


def around(handler: Any, enter: Callable[[Context], AbstractAsyncContextManager[None]]) -> Any:
    """The same handler, each of whose calls runs inside of `enter(context)`, in one task."""
    asked = "stream" if handler.request_streaming else "unary"
    kind = f"{asked}_{'stream' if handler.response_streaming else 'unary'}"
    inner = getattr(handler, kind)

    async def call(request: Any, context: Context) -> Any:
        async with enter(context):
            return await inner(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with enter(context):
            async for response in inner(request, context):
                yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        stream if inspect.isasyncgenfunction(inner) else call,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
