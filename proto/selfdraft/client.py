"""A thin async client of `selfdraft.v1.Inference`.

    async with Client("localhost:50051") as client:
        async with client.generate(text="def fib(n):", max_tokens=64) as generation:
            async for chunk in generation:
                print(chunk.text, end="")
        print(generation.complete.finish_reason)

        async with client.generate(text="A point: ", json_schema={"type": "object"}) as generation:
            print(json.loads(await generation.text()))

    tls = Tls.of_files(ca="ca.pem")
    async with Client("inference.example:50051", tls=tls, token=token) as client:
        ...

    async with Client("localhost:50051", retry=Retry(attempts=8)) as client:
        ...  # or retry=None: every failure is raised at once

A call made inside of an OpenTelemetry span carries it along (`traceparent`), unless `metadata` has
a `traceparent` of the caller's own.

Messages are those of `selfdraft.v1.selfdraft_pb2`, where every field is documented. Errors are
`SelfdraftError`s. Runs on asyncio; one `Client` serves any number of calls at once.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

import grpc
import grpc.aio

from selfdraft.channel import DEFAULT_OPTIONS, Tls, connect
from selfdraft.errors import SelfdraftError
from selfdraft.messages import (
    MODES,
    PRIORITIES,
    Messages,
    Priority,
    Sampling,
    SpeculationMode,
    Tools,
    chat_input,
    sampling_params,
)
from selfdraft.propagation import trace_metadata
from selfdraft.retry import DEFAULT_RETRY, Attempts, Retry, until_answered
from selfdraft.v1 import selfdraft_pb2 as pb
from selfdraft.v1 import selfdraft_pb2_grpc

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]

SESSION_HEADER: Final = "selfdraft-session"
"""Metadata with the `session_id`, for a load balancer to send a session's turns to one server."""

_METADATA_VALUE: Final = re.compile(r"[\x21-\x7e]+")


class Generation:
    """One running `Generate` call: iterate over its chunks, once. With n > 1 each chunk's `index`
    says which sequence it belongs to.

    Iterating raises SelfdraftError when the call fails; after `cancel` it just ends. Leaving the
    `async with` block cancels, and so ends the generation on the server. Until the first message
    has arrived a failure may lead to another attempt, as the client's `Retry` says.
    """

    def __init__(self, open_call: Callable[[float | None], Call], attempts: Attempts) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._call = open_call(attempts.remaining())
        self._cancelled = asyncio.Event()
        self._retrying = asyncio.Lock()
        self.completes: dict[int, pb.GenerateComplete] = {}
        """By index: why a sequence ended and what it cost, once its last chunk was read."""

    @property
    def complete(self) -> pb.GenerateComplete | None:
        """That of index 0, which is the only one unless n > 1; None until it has ended."""
        return self.completes.get(0)

    @property
    def attempts(self) -> int:
        """Attempts made so far, 1 or more."""
        return self._attempts.made

    async def request_id(self) -> str:
        """The request's id, once the server admitted it. Raises SelfdraftError when it did not."""
        while True:
            call = self._call
            for key, value in await call.initial_metadata() or ():
                if key == "selfdraft-request-id":
                    return str(value)
            error = await _status_of(call)
            if error.code() is grpc.StatusCode.OK:
                raise RuntimeError("the server sent no request id")
            await self._again(call, error)
            if self._cancelled.is_set():
                raise SelfdraftError(grpc.StatusCode.CANCELLED, "cancelled by its caller")

    async def text(self) -> str:
        """The whole text of index 0. Raises SelfdraftError."""
        return (await self.texts())[0]

    async def texts(self) -> list[str]:
        """The whole texts, by index. Raises SelfdraftError."""
        parts: dict[int, list[str]] = {0: []}
        async for chunk in self:
            parts.setdefault(chunk.index, []).append(chunk.text)
        for index in self.completes:
            parts.setdefault(index, [])
        return ["".join(parts[index]) for index in sorted(parts)]

    def cancel(self) -> None:
        """End the generation; idempotent."""
        self._cancelled.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[pb.GenerateStreamChunk]:
        try:
            while not self._cancelled.is_set():
                call = self._call
                try:
                    async for response in call:
                        self._attempts.begun = True
                        if response.HasField("complete"):
                            self.completes[response.complete.index] = response.complete
                        else:
                            yield response.chunk
                    return
                except grpc.aio.AioRpcError as error:
                    await self._again(call, error)
        except asyncio.CancelledError:
            # gRPC raises this for a call that was cancelled, as if the task had been.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not self._cancelled.is_set():
                raise _closed() from None
        finally:
            self.cancel()

    async def _again(self, call: Call, error: grpc.aio.AioRpcError) -> None:
        """Waits and opens the call that follows `call`, if one does. Raises SelfdraftError when
        the error stands. Returns at once when another reader was first, early after `cancel`."""
        async with self._retrying:
            if self._call is not call or self._cancelled.is_set():
                return
            failure = SelfdraftError.of(error)
            delay = self._attempts.delay_after(failure)
            if delay is None:
                raise failure from error
            try:
                async with asyncio.timeout(delay):
                    await self._cancelled.wait()
            except TimeoutError:
                self._call = self._open_call(self._attempts.remaining())


class Client:
    """A connection to one server; an async context manager."""

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        insecure_token: bool = False,
        retry: Retry | None = DEFAULT_RETRY,
        options: Sequence[tuple[str, Any]] = DEFAULT_OPTIONS,
    ) -> None:
        """`target` is host:port. Without `tls` (or gRPC's own `credentials`) the connection is
        plain text, on which a `token` is sent to this machine only, unless `insecure_token`.
        `retry` says which calls are made again, and how; None makes each once.

        Raises InsecureTokenError, and ValueError for both `tls` and `credentials`.
        """
        connection = connect(
            target,
            tls=tls,
            token=token,
            credentials=credentials,
            insecure_token=insecure_token,
            options=options,
        )
        self._channel, self._metadata = connection.channel, connection.metadata
        self._retry = retry
        self._closed = False
        # The generated stub has no annotations; the messages have.
        self._stub: Any = selfdraft_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what still runs and closes the connection; idempotent."""
        self._closed = True
        await self._channel.close(grace=None)

    def generate(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        tools: Tools = (),
        documents: Tools = (),
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
        reuse_prefix: bool | None = None,
        priority: Priority | None = None,
        speculation: SpeculationMode = "auto",
        max_depth: int | None = None,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Starts a generation from exactly one of `text`, `token_ids` and `messages`; `tools`,
        `documents` and `template_variables` go with `messages`.

        `max_depth` caps speculation (0 turns it off); `timeout` is the deadline in seconds, of all
        attempts together. Of what the server answers nothing is raised here: errors come from the
        `Generation`. Raises ValueError for an unknown `speculation` or `priority`, a message with
        a field there is none of, and `tools` without `messages`; SelfdraftError (CANCELLED) when
        the client is closed.
        """
        request = pb.GenerateRequest(
            request_id=request_id, session_id=session_id, reuse_prefix=reuse_prefix
        )
        if text is not None:
            request.text = text
        if token_ids is not None:
            request.tokenized.input_ids.extend(token_ids)
        if messages is not None:
            request.chat.CopyFrom(
                chat_input(messages, template_variables, tools=tools, documents=documents)
            )
        elif tools or documents:
            raise ValueError("tools, documents: need messages")
        if sampling:
            request.sampling_params.CopyFrom(sampling_params(**sampling))
        if speculation not in MODES:
            raise ValueError(f"speculation: must be one of {', '.join(MODES)}")
        if speculation != "auto":
            request.speculation.mode = MODES[speculation]
        if priority is not None:
            if priority not in PRIORITIES:
                raise ValueError(f"priority: must be one of {', '.join(PRIORITIES)}")
            request.priority = PRIORITIES[priority]
        if max_depth is not None:
            request.speculation.max_depth = max_depth
        return self.start(request, timeout=timeout, metadata=metadata)

    def start(
        self,
        request: pb.GenerateRequest,
        *,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Generation:
        """Starts a generation from a message of your own making.

        A request without an id gets one where it may be sent again: the server then tells a second
        attempt from a second request, and never runs both.
        """
        if self._retry is not None and not request.HasField("request_id"):
            named = pb.GenerateRequest()
            named.CopyFrom(request)
            named.request_id = uuid.uuid4().hex
            request = named
        along = (
            *self._metadata,
            *metadata,
            *_affinity(request.session_id, metadata),
            *trace_metadata(metadata),
        )

        def open_call(left: float | None) -> Call:
            if self._closed:
                raise _closed()
            call: Call = self._stub.Generate(request, timeout=left, metadata=along)
            return call

        return Generation(open_call, Attempts(self._retry, timeout))

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Ends a live request; False when there is none of this id. Raises SelfdraftError."""
        request = pb.AbortRequest(request_id=request_id)
        response: pb.AbortResponse = await self._unary("Abort", request, timeout)
        return response.aborted

    async def tokenize(
        self,
        *,
        text: str | None = None,
        messages: Messages | None = None,
        tools: Tools = (),
        documents: Tools = (),
        template_variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of exactly one of `text` and `messages`. Raises SelfdraftError."""
        request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
        if text is not None:
            request.text = text
        if messages is not None:
            request.chat.CopyFrom(
                chat_input(messages, template_variables, tools=tools, documents=documents)
            )
        response: pb.TokenizeResponse = await self._unary("Tokenize", request, timeout)
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """Text of `token_ids`. Raises SelfdraftError."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response: pb.DetokenizeResponse = await self._unary("Detokenize", request, timeout)
        return response.text

    async def model_info(self, *, timeout: float | None = None) -> pb.GetModelInfoResponse:
        """Facts about the served model. Raises SelfdraftError."""
        response: pb.GetModelInfoResponse = await self._unary(
            "GetModelInfo", pb.GetModelInfoRequest(), timeout
        )
        return response

    async def release_session(self, session_id: str, *, timeout: float | None = None) -> bool:
        """Forgets what is kept for a session; False when nothing was. Raises SelfdraftError."""
        request = pb.ReleaseSessionRequest(session_id=session_id)
        response: pb.ReleaseSessionResponse = await self._unary(
            "ReleaseSession", request, timeout, _affinity(session_id)
        )
        return response.released

    async def sessions(self, *, timeout: float | None = None) -> list[pb.Session]:
        """Sessions for which something is kept. Raises SelfdraftError."""
        response: pb.ListSessionsResponse = await self._unary(
            "ListSessions", pb.ListSessionsRequest(), timeout
        )
        return list(response.sessions)

    async def loads(self, *, timeout: float | None = None) -> pb.GetLoadsResponse:
        """How busy the server is. Raises SelfdraftError."""
        response: pb.GetLoadsResponse = await self._unary("GetLoads", pb.GetLoadsRequest(), timeout)
        return response

    async def server_info(self, *, timeout: float | None = None) -> pb.GetServerInfoResponse:
        """What the server is and what it holds requests to. Raises SelfdraftError."""
        response: pb.GetServerInfoResponse = await self._unary(
            "GetServerInfo", pb.GetServerInfoRequest(), timeout
        )
        return response

    async def _unary(
        self,
        method: str,
        request: Any,
        timeout: float | None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Any:
        along = (*self._metadata, *metadata, *trace_metadata(metadata))

        def attempt(remaining: float | None) -> Awaitable[Any]:
            if self._closed:
                raise _closed()
            call = getattr(self._stub, method)
            opened: Awaitable[Any] = call(request, timeout=remaining, metadata=along)
            return opened

        return await until_answered(attempt, self._retry, timeout)


def _affinity(
    session_id: str, given: Sequence[tuple[str, str]] = ()
) -> tuple[tuple[str, str], ...]:
    """The session's metadata, unless the caller gave his own. An id that no header can carry is
    left to the server, which says what is wrong with it."""
    if not _METADATA_VALUE.fullmatch(session_id) or any(key == SESSION_HEADER for key, _ in given):
        return ()
    return ((SESSION_HEADER, session_id),)


async def _status_of(call: Call) -> grpc.aio.AioRpcError:
    """How a call ended, once it has."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details(),
        debug_error_string=None,
    )


def _closed() -> SelfdraftError:
    return SelfdraftError(grpc.StatusCode.CANCELLED, "the connection was closed")
