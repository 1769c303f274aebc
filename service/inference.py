"""The `Inference` servicer: each RPC from its message to its last byte."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from selfdraft.v1 import selfdraft_pb2 as pb

from scheduler.loop import RequestHandle
from scheduler.request import (
    Finished,
    FinishReason,
    InvalidRequestError,
    NotRunningError,
    QueueFullError,
)
from service.backend import Backend, Door
from service.config import ServiceConfig
from service.endings import Context, abort, cause, complete_message, gone
from service.errors import Reason, ServiceError, Violation, error_of, invalid
from service.logs import Logger, RequestRecord, trace_context
from service.metrics import Metrics
from service.modelinfo import model_info
from service.prompt import Prepared, decode_ids, encode_input, prepare
from service.stream import TextStream
from service.validation import Violations, check_known, check_request_id

T = TypeVar("T")

_FIELDS = {
    "request_id": "request_id",
    "max_tokens": "sampling_params.max_tokens",
    "stop_ids": "sampling_params.stop_token_ids",
    "depth_cap": "speculation.max_depth",
}
"""Fields of GenerationRequest as the client knows them."""


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
    ) -> None:
        self._door = door
        self._metrics = metrics
        self._config = config
        self._logger = logger
        self._clock = clock
        self.active = 0
        """`Generate` calls being answered."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no `Generate` call is being answered."""
        await self._idle.wait()

    # --- Generate --------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams one generation; writes its log line whatever happens."""
        record = self._record(request, context)
        self._open()
        error: ServiceError | None = None
        try:
            await self._generate(request, context, record)
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
        self, request: pb.GenerateRequest, context: Context, record: RequestRecord
    ) -> None:
        try:
            backend = self._door.enter()
            prepared = await prepare(
                request,
                backend,
                limits=self._config.limits,
                request_id=record.request_id,
                deadline=self._deadline(context),
            )
            record.request, record.input = prepared.request, prepared.input
            handle = self._submit(backend, prepared)
        except ServiceError as refusal:
            self._metrics.refused(refusal.reason)
            raise
        record.admitted_at = self._clock()
        async with handle:
            try:
                await self._relay(handle, prepared, backend, context, record)
            except BaseException as error:
                handle.cancel(cause(error, context))
                raise
            finally:
                self._account(handle, record)

    def _account(self, handle: RequestHandle, record: RequestRecord) -> None:
        if handle.finished is not None:
            record.usage = handle.finished.usage
            self._metrics.finished(handle.finished.reason, handle.finished.usage)

    def _submit(self, backend: Backend, prepared: Prepared) -> RequestHandle:
        """Raises ServiceError when the scheduler refuses."""
        try:
            return backend.scheduler.submit(prepared.request)
        except QueueFullError as full:
            raise ServiceError(
                Reason.QUEUE_FULL,
                str(full),
                retry_after_s=full.retry_after_s,
                metadata={"limit": full.limit},
            ) from full
        except NotRunningError as stopped:
            if backend.scheduler.failed.is_set():
                raise ServiceError(Reason.ENGINE_FAILED, "the engine failed") from stopped
            raise ServiceError(
                Reason.DRAINING, str(stopped), retry_after_s=self._config.server.retry_after_s
            ) from stopped
        except InvalidRequestError as wrong:
            if wrong.field == "request_id":
                raise ServiceError(
                    Reason.DUPLICATE_REQUEST,
                    f"request_id: {wrong.message}",
                    violations=[Violation("request_id", wrong.message)],
                ) from wrong
            path = prepared.input if wrong.field == "prompt_ids" else _FIELDS.get(wrong.field)
            violation = Violation(path or f"sampling_params.{wrong.field}", wrong.message)
            raise invalid([violation]) from wrong

    async def _relay(
        self,
        handle: RequestHandle,
        prepared: Prepared,
        backend: Backend,
        context: Context,
        record: RequestRecord,
    ) -> None:
        """Turns events into messages. Raises ServiceError for an end that is an error."""
        request, options = prepared.request, prepared.options
        stream = TextStream(
            backend.tokenizer,
            prompt_ids=request.prompt_ids,
            stop_ids=request.stop_ids,
            stop_strings=options.stop_strings,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
        )
        await context.send_initial_metadata((("selfdraft-request-id", request.request_id),))
        previous_at: float | None = None
        async for event in handle:
            if isinstance(event, Finished):
                await self._finish(event, stream, prepared, context, record)
                return
            self._metrics.burst(event, previous_at=previous_at, submitted_at=record.admitted_at)
            previous_at = event.at
            if stream.ended:  # what a cycle in flight still brought
                continue
            delta = stream.feed(event.ids)
            if stream.stop_string is not None:  # first of all, spare the device
                handle.cancel(FinishReason.STOP_STRING)
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.ids,
                text=delta.text,
                completion_tokens=stream.completion_tokens,
                spec_draft_tokens=event.drafted,
                spec_accepted_tokens=event.accepted,
            )
            await self._write(
                context, pb.GenerateResponse(request_id=handle.request_id, chunk=chunk)
            )
            record.delivered_tokens = stream.completion_tokens

    async def _finish(
        self,
        end: Finished,
        stream: TextStream,
        prepared: Prepared,
        context: Context,
        record: RequestRecord,
    ) -> None:
        """Sends the rest of the text and `complete`. Raises ServiceError for a bad end."""
        error = error_of(end.reason, end.detail, retry_after_s=self._config.server.retry_after_s)
        if error is not None and not stream.ended:
            raise error
        request_id = prepared.request.request_id
        if rest := stream.finish():
            chunk = pb.GenerateStreamChunk(text=rest, completion_tokens=stream.completion_tokens)
            await self._write(context, pb.GenerateResponse(request_id=request_id, chunk=chunk))
        complete = complete_message(end, stream, prepared)
        record.reason = complete.finish_reason
        await self._write(context, pb.GenerateResponse(request_id=request_id, complete=complete))

    async def _write(self, context: Context, message: pb.GenerateResponse) -> None:
        """Raises ServiceError when the client does not take the message in time."""
        try:
            async with asyncio.timeout(self._config.server.write_timeout_s):
                await context.write(message)
        except TimeoutError:
            raise ServiceError(
                Reason.SLOW_READER, "the stream was left unread for too long"
            ) from None

    def _deadline(self, context: Context) -> float | None:
        remaining: float | None = context.time_remaining()
        return None if remaining is None else self._clock() + remaining

    def _record(self, request: pb.GenerateRequest, context: Context) -> RequestRecord:
        metadata: Any = context.invocation_metadata() or ()
        return RequestRecord(
            request_id=request.request_id if request.HasField("request_id") else uuid.uuid4().hex,
            peer=context.peer(),
            trace=trace_context(metadata),
            received_at=self._clock(),
        )

    def _open(self) -> None:
        self.active += 1
        self._idle.clear()

    def _close(self, record: RequestRecord, error: ServiceError | None) -> None:
        if error is not None:
            record.status, record.reason = error.code.name, error.reason
            record.detail = error.message
        if len(record.request_id) > self._config.limits.max_request_id_chars:
            record.request_id = "(refused)"
        record.emit(self._logger, self._clock())
        self.active -= 1
        if not self.active:
            self._idle.set()

    # --- the small ones --------------------------------------------------------------------------

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Ends a live request."""

        async def answer() -> pb.AbortResponse:
            complain = Violations()
            check_known(request, complain)
            check_request_id(request.request_id, complain, self._config.limits)
            if complain.found:
                raise invalid(complain.found)
            found = self._door.look().scheduler.abort(request.request_id)
            return pb.AbortResponse(aborted=found)

        return await self._answer(context, answer)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text or chat to ids."""

        async def answer() -> pb.TokenizeResponse:
            backend = self._door.look()
            ids = await encode_input(request, backend.tokenizer, limits=self._config.limits)
            length = backend.scheduler.info.context_length
            return pb.TokenizeResponse(token_ids=ids, context_length=length)

        return await self._answer(context, answer)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """Ids to text."""

        async def answer() -> pb.DetokenizeResponse:
            backend = self._door.look()
            text = await decode_ids(request, backend.tokenizer, info=backend.scheduler.info)
            return pb.DetokenizeResponse(text=text)

        return await self._answer(context, answer)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Facts about the model."""

        async def answer() -> pb.GetModelInfoResponse:
            complain = Violations()
            check_known(request, complain)
            if complain.found:
                raise invalid(complain.found)
            return model_info(self._door.look(), self._config.limits)

        return await self._answer(context, answer)

    async def _answer(self, context: Context, answer: Callable[[], Awaitable[T]]) -> T:
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
