"""Who calls, and whether they may: one interceptor before every method of every service.

Deny by default: a method is open only when its service is listed as such; whatever else is
registered on the server, now or later, needs a token, and the Admin service (with what else shows
all tenants at once) one of an admin. A call is refused before its message is read. What is wrong
with a token is not told: missing, malformed, unknown and expired are one answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from selfdraft.v1 import admin_pb2

from service.auth import EVERYBODY, Identity, set_caller
from service.endings import Context, abort
from service.errors import Reason, ServiceError
from service.handlers import around
from service.logs import Logger
from service.metrics import Metrics
from service.tokens import Tokens

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

ADMIN_METHODS: Final = frozenset({"/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"})
"""Methods of other services that show what all tenants have sent: events of kept prefixes carry
their token ids."""

_LOG_INTERVAL_S: Final = 1.0
"""Refusals are logged at most this often; the line counts those in between."""


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls through or refuses them, before their message is read.

    gRPC runs interceptors in the task that then runs the handler, so the caller set here is what
    the handler reads; were it otherwise, `identity_of` would raise and every call fail.
    """

    def __init__(
        self,
        *,
        tokens: Tokens | None,
        open_services: Iterable[str],
        max_open_calls: int,
        retry_after_s: float,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
    ) -> None:
        """Of the open services, and of reflection in any case, at most `max_open_calls` calls run
        at once; others are told to come again after `retry_after_s`. `clock` gives seconds."""
        self._tokens = tokens
        self._open = frozenset(open_services)
        self._max_open_calls = max_open_calls
        self._retry_after_s = retry_after_s
        self._open_calls = 0
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._logged_at = -_LOG_INTERVAL_S
        self._unlogged = 0

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, or one that refuses."""
        method = handler_call_details.method
        service = method.rpartition("/")[0].lstrip("/")
        if service in self._open:
            return self._bounded(await continuation(handler_call_details))
        identity = self._identify(handler_call_details.invocation_metadata or ())
        if identity is None:
            return self._refuse(Reason.UNAUTHENTICATED, "a valid bearer token is required", service)
        if (service == ADMIN or method in ADMIN_METHODS) and not identity.admin:
            return self._refuse(Reason.PERMISSION_DENIED, "the token is not an admin's", service)
        set_caller(identity)
        handler = await continuation(handler_call_details)
        return self._bounded(handler) if service == REFLECTION else handler

    def _identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Identity | None:
        if self._tokens is None:
            return EVERYBODY
        given = [value for key, value in metadata if key.lower() == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return None
        scheme, _, token = given[0].partition(" ")
        return self._tokens.identify(token.strip()) if scheme.lower() == "bearer" else None

    def _bounded(self, handler: Any) -> Any:
        """The same handler; one of streams runs only as long as not too many do. What answers once
        holds nothing, so probes are always answered. None stays None."""
        if handler is None or not (handler.request_streaming or handler.response_streaming):
            return handler
        return around(handler, self._one_more)

    @asynccontextmanager
    async def _one_more(self, context: Context) -> AsyncIterator[None]:
        if self._open_calls >= self._max_open_calls:
            message = f"{self._max_open_calls} health watches and reflections run already"
            reason, delay = Reason.TOO_MANY_CALLS, self._retry_after_s
            await abort(context, ServiceError(reason, message, retry_after_s=delay))
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1

    def _refuse(self, reason: Reason, message: str, service: str) -> Any:
        async def refuse(requests: object, context: Context) -> NoReturn:
            self._metrics.refused(reason)
            self._log(reason, service, context.peer())
            await abort(context, ServiceError(reason, message))

        # A handler of streams is called before any message is read, whatever the method's kind.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log(self, reason: Reason, service: str, peer: str) -> None:
        now = self._clock()
        if now - self._logged_at < _LOG_INTERVAL_S:
            self._unlogged += 1
            self._metrics.line_dropped()
            return
        self._logger.warning(
            "call refused",
            reason=reason.value,
            service=service[:128],
            peer=peer,
            before=self._unlogged,
        )
        self._logged_at, self._unlogged = now, 0
