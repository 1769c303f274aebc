"""From the scheduler's events to the messages of one `Generate` stream.

A request's sequences run side by side, each in a task of its own; a `Writer` makes one stream of
their messages. The first bad end is the call's, and ends the others.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import anyio
from selfdraft.v1 import selfdraft_pb2 as pb

from scheduler.loop import RequestHandle
from scheduler.request import Finished, FinishReason, Tokens
from service.aside import aside
from service.config import ServerConfig
from service.endings import Context, cause, complete_message
from service.errors import Reason, ServiceError, error_of
from service.logprobs import add_input, add_output
from service.logs import RequestRecord
from service.metrics import Metrics
from service.prompt import Prepared
from service.stream import TextStream
from service.submission import Handles
from service.text.tokenizer import Tokenizer
from service.writing import Writer

_MANY_POSITIONS: Final = 128
"""Log probabilities of longer prompts become messages on a thread: 20 alternatives at each position
take some 10 microseconds."""


class Relay:
    """Answers one admitted request."""

    def __init__(
        self,
        *,
        handles: Handles,
        prepared: Prepared,
        tokenizer: Tokenizer,
        context: Context,
        record: RequestRecord,
        metrics: Metrics,
        config: ServerConfig,
    ) -> None:
        self._handles = handles
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._context = context
        self._record = record
        self._metrics = metrics
        self._config = config
        self._writer = Writer(context, limit_s=config.write_timeout_s)
        self._error: Exception | None = None

    async def run(self) -> None:
        """Returns when every sequence ended well and was sent. Raises ServiceError for an end that
        is an error; whatever is raised, no sequence runs on afterwards."""
        try:
            metadata = (("selfdraft-request-id", self._prepared.request_id),)
            await self._context.send_initial_metadata(metadata)
            if len(self._handles) == 1:
                await self._sequence(0)
            else:
                await self._side_by_side()
        except BaseException as error:
            self._cancel_all(error)
            raise
        finally:
            self._writer.close()

    async def _side_by_side(self) -> None:
        async with anyio.create_task_group() as tasks:

            async def one(index: int) -> None:
                try:
                    await self._sequence(index)
                except Exception as error:
                    self._error = self._error or error
                    # Before their tasks are, or they would all end as if the client had left.
                    self._cancel_all(self._error)
                    tasks.cancel_scope.cancel()

            for index in range(len(self._handles)):
                tasks.start_soon(one, index)
        if self._error is not None:
            raise self._error

    def _cancel_all(self, error: BaseException) -> None:
        reason = cause(error, self._context)
        for handle in self._handles:
            handle.cancel(reason)

    async def _sequence(self, index: int) -> None:
        """One sequence from its first event to its `complete`. Raises ServiceError."""
        handle, options = self._handles[index], self._prepared.options
        request = self._prepared.requests[index]
        stream = TextStream(
            self._tokenizer,
            prompt_ids=request.prompt_ids,
            stop_ids=request.stop_ids,
            stop_strings=options.stop_strings,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
        )
        previous_at: float | None = None
        async for event in handle:
            if isinstance(event, Finished):
                await self._finish(index, event, stream)
                return
            self._metrics.burst(
                event, previous_at=previous_at, submitted_at=self._record.admitted_at
            )
            previous_at = event.at
            if not stream.ended:  # else it is what a cycle in flight still brought
                await self._burst(index, event, stream, handle)

    async def _burst(
        self, index: int, event: Tokens, stream: TextStream, handle: RequestHandle
    ) -> None:
        delta = stream.feed(event.ids)
        if stream.stop_string is not None:  # first of all, spare the device
            handle.cancel(FinishReason.STOP_STRING)
        # Filled in place: what is given to a constructor is copied.
        message = pb.GenerateResponse(request_id=self._prepared.request_id)
        chunk = message.chunk
        chunk.token_ids.extend(delta.ids)
        chunk.text = delta.text
        chunk.completion_tokens = stream.completion_tokens
        chunk.spec_draft_tokens = event.drafted
        chunk.spec_accepted_tokens = event.accepted
        chunk.index = index
        if event.logprobs is not None and delta.ids:
            add_output(chunk.output_logprobs, event.logprobs, delta.ids)
        if event.prompt_logprobs is not None:
            prompt_ids = self._prepared.requests[index].prompt_ids
            add = partial(add_input, chunk.input_logprobs, event.prompt_logprobs, prompt_ids)
            await aside(add, len(prompt_ids) > _MANY_POSITIONS)
        await self._writer.write(message)
        self._record.delivered_tokens += len(delta.ids)

    async def _finish(self, index: int, end: Finished, stream: TextStream) -> None:
        """Sends the rest of the text and `complete`. Raises ServiceError for a bad end."""
        error = error_of(end.reason, end.detail, retry_after_s=self._config.retry_after_s)
        if error is not None and not stream.ended:
            raise error
        request_id = self._prepared.request_id
        if rest := stream.finish():
            chunk = pb.GenerateStreamChunk(
                index=index, text=rest, completion_tokens=stream.completion_tokens
            )
            await self._writer.write(pb.GenerateResponse(request_id=request_id, chunk=chunk))
        self._check_form(index, stream)
        complete = complete_message(end, stream, self._prepared, index)
        reasons = {*filter(None, self._record.reason.split(",")), complete.finish_reason}
        self._record.reason = ",".join(sorted(reasons))
        await self._writer.write(pb.GenerateResponse(request_id=request_id, complete=complete))

    def _check_form(self, index: int, stream: TextStream) -> None:
        """Raises ServiceError for a text that its grammar could not finish."""
        constraint = self._prepared.constraints[index]
        if constraint is not None and constraint.failure and stream.stop_string is None:
            raise ServiceError(
                Reason.GRAMMAR_LIMIT,
                f"sampling_params.{self._prepared.options.form}: {constraint.failure}",
            )
