"""Counts every call of every method: what is in flight, and how each one ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from service.endings import Context, ending_of_call, gone
from service.errors import CATALOGUE, Reason
from service.families import METHODS, UNKNOWN_METHOD
from service.handlers import around
from service.metrics import Metrics

_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """First of a server's interceptors, so that what others refuse is counted too.

    Calls beyond `ServerConfig.transport_calls` are refused by gRPC before any interceptor.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, counted; None for an unknown method, which gRPC refuses."""
        method = METHODS.get(handler_call_details.method, UNKNOWN_METHOD)
        handler = await continuation(handler_call_details)
        if handler is None:
            self._metrics.call_ended(method, grpc.StatusCode.UNIMPLEMENTED.name, None)
            return None
        return around(handler, partial(self._counted, method))

    @asynccontextmanager
    async def _counted(self, method: str, context: Context) -> AsyncIterator[None]:
        ending = ending_of_call()
        self._metrics.call_began(method)
        code = grpc.StatusCode.UNKNOWN.name  # what gRPC says of an exception
        try:
            yield
            code = _code(context)
        except (asyncio.CancelledError, GeneratorExit):
            # The call's end was cut off: by its deadline or the client, unless we had begun it.
            ending.reason = ending.reason or gone(context).reason
            code = CATALOGUE[ending.reason].code.name
            raise
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except Exception:
            ending.reason = ending.reason or Reason.INTERNAL
            raise
        finally:
            self._metrics.call_ended(method, code, ending.reason)
            self._metrics.call_left(method)


def _code(context: Context) -> str:
    """The status a call that has ended was given."""
    code: Any = context.code()
    if isinstance(code, int):
        code = _BY_NUMBER.get(code)
    return grpc.StatusCode.OK.name if code is None else str(code.name)
