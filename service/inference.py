"""The `Inference` servicer: each RPC from its message to its last byte."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from selfdraft.v1 import selfdraft_pb2 as pb

from service.auth import Scope, scope_of
from service.backend import Door
from service.config import ServiceConfig
from service.endings import Context, abort, gone
from service.errors import Reason, ServiceError
from service.ledger import Ledger
from service.loads import loads
from service.logs import Logger, RequestRecord, total
from service.metrics import Metrics
from service.modelinfo import model_info
from service.prompt import decode_ids, encode_input, prepare
from service.relay import Relay
from service.serverinfo import server_info
from service.sessions import list_sessions, release_session
from service.submission import Handles, Submissions
from service.tenant import tenant_of
from service.trace import trace_context
from service.tracing import Tracing
from service.validation import Violations, check_id, check_known

T = TypeVar("T")


class InferenceServicer:
    """Serves `selfdraft.v1.Inference`. `clock` is the scheduler's."""

    def __init__(
        self,
        *,
        door: Door,
        metrics: Metrics,
        config: ServiceConfig,
        logger: Logger,
        clock: Callable[[], float],
        ledger: Ledger | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._door = door
        self._metrics = metrics
        self._config = config
        self._logger = logger
        self._clock = clock
        self.ledger = ledger or Ledger()
        """What each tenant has asked for."""
        self._submissions = Submissions(retry_after_s=config.server.retry_after_s)
        self._started_at = clock()
        self.services: tuple[str, ...] = ()
        """Names of the services on the port, once all are known."""
        self.active = 0
        """`Generate` calls being answered."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def uptime_s(self) -> float:
        """Seconds since the server started."""
        return self._clock() - self._started_at

    async def wait_idle(self) -> None:
        """Returns when no `Generate` call is being answered."""
        await self._idle.wait()

    # --- Generate --------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams one generation."""
        await self.generate(request, context, Violations(), method="Inference/Generate")

    async def generate(
        self,
        request: pb.GenerateRequest,
        context: Context,
        complain: Violations,
        *,
        method: str,
    ) -> None:
        """Streams one generation; writes its log line whatever happens. `complain` holds what was
        wrong with it in the form it came in, `method` says by which RPC."""
        record = self._record(request, context, method)
        self._open(record)
        error: ServiceError | None = None
        try:
            await self._generate(request, context, record, complain)
        except ServiceError as refusal:
            error = refusal
        except asyncio.CancelledError:
            error = gone(context)
            raise
        except Exception as defect:
            error = self._defect(defect)
        finally:
            self._close(record, error)
        if error is not None:
            await abort(context, error)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        context: Context,
        record: RequestRecord,
        complain: Violations,
    ) -> None:
        scope = Scope(record.tenant)
        try:
            backend = self._door.enter()
            prepared = await prepare(
                request,
                backend,
                complain,
                limits=self._config.limits,
                request_id=record.request_id,
                tenant=tenant_of(context),
                deadline=self._deadline(context),
                scope=scope,
                cache_salt=self._config.security.cache_salt(scope.tenant),
            )
            record.prepared = prepared
            handles = self._submissions.submit(backend.scheduler, prepared)
        except ServiceError as refusal:
            self._metrics.refused(refusal.reason)
            raise
        except asyncio.CancelledError:
            self._metrics.refused(gone(context).reason)
            raise
        except Exception:
            self._metrics.refused(Reason.INTERNAL)
            raise
        record.admitted_at = self._clock()
        self._metrics.admitted(
            prepared.options.mode,
            prepared.options.form,
            n=prepared.options.n,
            max_tokens=prepared.requests[0].max_tokens,
        )
        relay = Relay(
            handles=handles,
            prepared=prepared,
            tokenizer=backend.tokenizer,
            context=context,
            record=record,
            metrics=self._metrics,
            config=self._config.server,
        )
        try:
            await relay.run()
        finally:
            self._submissions.forget(prepared.key, handles)
            self._account(handles, record)

    def _account(self, handles: Handles, record: RequestRecord) -> None:
        ends = [handle.finished for handle in handles if handle.finished is not None]
        for end in ends:
            self._metrics.finished(end.reason, end.usage)
        record.ends = tuple(end.reason for end in ends)
        if ends:
            record.usage = total([end.usage for end in ends])

    def _deadline(self, context: Context) -> float | None:
        remaining: float | None = context.time_remaining()
        return None if remaining is None else self._clock() + remaining

    def _record(self, request: pb.GenerateRequest, context: Context, method: str) -> RequestRecord:
        metadata: Any = context.invocation_metadata() or ()
        return RequestRecord(
            request_id=request.request_id if request.HasField("request_id") else uuid.uuid4().hex,
            peer=context.peer(),
            method=method,
            tenant=scope_of(context).tenant,
            trace=trace_context(metadata),
            received_at=self._clock(),
        )

    def _open(self, record: RequestRecord) -> None:
        self.ledger.open(record.tenant)
        self.active += 1
        self._idle.clear()

    def _close(self, record: RequestRecord, error: ServiceError | None) -> None:
        if error is not None:
            record.status, record.reason = error.code.name, error.reason
            record.detail = error.for_log
        if len(record.request_id) > self._config.limits.max_request_id_chars:
            record.request_id = "(refused)"
        now = self._clock()
        if self._tracing is not None:
            self._tracing.record(record, now)
        record.emit(self._logger, now)
        self.ledger.close(record.tenant, record.usage, failed=error is not None)
        self.active -= 1
        if not self.active:
            self._idle.set()

    # --- the small ones --------------------------------------------------------------------------

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Ends a live request."""

        async def answer() -> pb.AbortResponse:
            complain = Violations()
            check_known(request, complain)
            check_id("request_id", request.request_id, complain, self._config.limits)
            complain.raise_found()
            self._door.look()
            key = scope_of(context).inside(request.request_id)
            return pb.AbortResponse(aborted=self._submissions.abort(key))

        return await self.answer(context, answer)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text or chat to ids."""

        async def answer() -> pb.TokenizeResponse:
            backend = self._door.look()
            ids = await encode_input(request, backend.tokenizer, limits=self._config.limits)
            length = backend.scheduler.info.context_length
            return pb.TokenizeResponse(token_ids=ids, context_length=length)

        return await self.answer(context, answer)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """Ids to text."""

        async def answer() -> pb.DetokenizeResponse:
            backend = self._door.look()
            text = await decode_ids(request, backend.tokenizer, info=backend.scheduler.info)
            return pb.DetokenizeResponse(text=text)

        return await self.answer(context, answer)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Facts about the model."""

        async def answer() -> pb.GetModelInfoResponse:
            complain = Violations()
            check_known(request, complain)
            complain.raise_found()
            return model_info(self._door.look(), self._config.limits)

        return await self.answer(context, answer)

    async def ReleaseSession(  # noqa: N802
        self, request: pb.ReleaseSessionRequest, context: Context
    ) -> pb.ReleaseSessionResponse:
        """Forgets what is kept for a session of the caller's tenant."""

        async def answer() -> pb.ReleaseSessionResponse:
            backend, limits = self._door.look(), self._config.limits
            return release_session(request, backend, limits, scope_of(context))

        return await self.answer(context, answer)

    async def ListSessions(  # noqa: N802
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        """Sessions of the caller's tenant for which something is kept."""

        async def answer() -> pb.ListSessionsResponse:
            backend = self._door.look()
            return list_sessions(request, backend, self._clock(), scope_of(context))

        return await self.answer(context, answer)

    async def GetLoads(  # noqa: N802
        self, request: pb.GetLoadsRequest, context: Context
    ) -> pb.GetLoadsResponse:
        """How busy the server is."""

        async def answer() -> pb.GetLoadsResponse:
            complain = Violations()
            check_known(request, complain)
            complain.raise_found()
            return loads(self._door.look().scheduler.statistics())

        return await self.answer(context, answer)

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """What the server is."""

        async def answer() -> pb.GetServerInfoResponse:
            complain = Violations()
            check_known(request, complain)
            complain.raise_found()
            return server_info(
                self._door.look(),
                self._config,
                state=self._door.state,
                active=self.active,
                uptime_s=self.uptime_s,
                services=self.services,
            )

        return await self.answer(context, answer)

    async def answer(self, context: Context, answer: Callable[[], Awaitable[T]]) -> T:
        """What `answer` returns; ends the call with the error it raises instead."""
        try:
            return await answer()
        except ServiceError as refusal:
            error = refusal
        except Exception as defect:
            error = self._defect(defect)
        return await abort(context, error)

    def _defect(self, defect: Exception) -> ServiceError:
        """What the client hears of a bug of ours; the log hears the rest."""
        self._logger.error("unexpected error", exc_info=defect)
        return ServiceError(Reason.INTERNAL, "internal error; the server's log has the cause")
