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

Messages are those of `selfdraft.v1.selfdraft_pb2`, where every field is documented. Errors are
`SelfdraftError`s. Runs on asyncio; one `Client` serves any number of calls at once.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, TypedDict, Unpack

import grpc
import grpc.aio
from google.protobuf import struct_pb2

from selfdraft.channel import DEFAULT_OPTIONS, Tls, connect
from selfdraft.errors import SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb
from selfdraft.v1 import selfdraft_pb2_grpc

Messages = Sequence[tuple[str, str]]
"""(role, content) pairs, in order."""

SpeculationMode = Literal["auto", "coupled", "rejection", "off"]
"""How drafts are verified, as in the .proto file; auto leaves it to the server."""

_MODES: Final = {
    "auto": pb.SPECULATION_MODE_UNSPECIFIED,
    "coupled": pb.SPECULATION_MODE_COUPLED,
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "off": pb.SPECULATION_MODE_OFF,
}


Priority = Literal["batch", "default", "interactive"]
"""Who goes first when requests wait, as in the .proto file."""

_PRIORITIES: Final = {
    "batch": pb.PRIORITY_BATCH,
    "default": pb.PRIORITY_DEFAULT,
    "interactive": pb.PRIORITY_INTERACTIVE,
}


class Sampling(TypedDict, total=False):
    """Fields of `SamplingParams`; see there. At most one of json_schema, regex and grammar."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    max_tokens: int
    min_tokens: int
    n: int
    logprobs: int
    prompt_logprobs: int
    json_schema: str | Mapping[str, Any]
    """JSON text, or what it would be parsed to."""
    regex: str
    grammar: str
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    ignore_eos: bool
    include_stop_str_in_output: bool
    seed: int


SESSION_HEADER: Final = "selfdraft-session"
"""Metadata with the `session_id`, for a load balancer to send a session's turns to one server."""

_METADATA_VALUE: Final = re.compile(r"[\x21-\x7e]+")


class Generation:
    """One running `Generate` call: iterate over its chunks, once. With n > 1 each chunk's `index`
    says which sequence it belongs to.

    Iterating raises SelfdraftError when the call fails; after `cancel` it just ends. Leaving the
    `async with` block cancels, and so ends the generation on the server.
    """

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        self._call = call
        self._cancelled = False
        self.completes: dict[int, pb.GenerateComplete] = {}
        """By index: why a sequence ended and what it cost, once its last chunk was read."""

    @property
    def complete(self) -> pb.GenerateComplete | None:
        """That of index 0, which is the only one unless n > 1; None until it has ended."""
        return self.completes.get(0)

    async def request_id(self) -> str:
        """The request's id, once the server admitted it. Raises SelfdraftError when it did not."""
        metadata = await self._call.initial_metadata()
        for key, value in metadata or ():
            if key == "selfdraft-request-id":
                return str(value)
        return await self._raise_status()

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
        self._cancelled = True
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
            async for response in self._call:
                if response.HasField("complete"):
                    self.completes[response.complete.index] = response.complete
                else:
                    yield response.chunk
        except grpc.aio.AioRpcError as error:
            raise SelfdraftError.of(error) from error
        except asyncio.CancelledError:
            # gRPC raises this for a call that was cancelled, as if the task had been.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not self._cancelled:
                raise SelfdraftError(
                    grpc.StatusCode.CANCELLED, "the connection was closed"
                ) from None
        finally:
            self.cancel()

    async def _raise_status(self) -> NoReturn:
        try:
            async for _ in self._call:
                pass
        except grpc.aio.AioRpcError as error:
            raise SelfdraftError.of(error) from error
        raise RuntimeError("the server sent no request id")


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
        options: Sequence[tuple[str, Any]] = DEFAULT_OPTIONS,
    ) -> None:
        """`target` is host:port. Without `tls` (or gRPC's own `credentials`) the connection is
        plain text, on which a `token` is sent to this machine only, unless `insecure_token`.

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
        await self._channel.close(grace=None)

    def generate(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
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
        """Starts a generation from exactly one of `text`, `token_ids` and `messages`.

        `max_depth` caps speculation (0 turns it off); `timeout` is the deadline in seconds. Of what
        the server answers nothing is raised here: errors come from the `Generation`. Raises
        ValueError for an unknown `speculation` or `priority`.
        """
        request = pb.GenerateRequest(
            request_id=request_id, session_id=session_id, reuse_prefix=reuse_prefix
        )
        if text is not None:
            request.text = text
        if token_ids is not None:
            request.tokenized.input_ids.extend(token_ids)
        if messages is not None:
            request.chat.CopyFrom(chat_input(messages, template_variables))
        if sampling:
            request.sampling_params.CopyFrom(sampling_params(**sampling))
        if speculation not in _MODES:
            raise ValueError(f"speculation: must be one of {', '.join(_MODES)}")
        if speculation != "auto":
            request.speculation.mode = _MODES[speculation]
        if priority is not None:
            if priority not in _PRIORITIES:
                raise ValueError(f"priority: must be one of {', '.join(_PRIORITIES)}")
            request.priority = _PRIORITIES[priority]
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
        """Starts a generation from a message of your own making."""
        along = (*self._metadata, *metadata, *_affinity(request.session_id, metadata))
        return Generation(self._stub.Generate(request, timeout=timeout, metadata=along))

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
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of exactly one of `text` and `messages`. Raises SelfdraftError."""
        request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
        if text is not None:
            request.text = text
        if messages is not None:
            request.chat.CopyFrom(chat_input(messages))
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

    async def _unary(
        self,
        method: str,
        request: Any,
        timeout: float | None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Any:
        try:
            call = getattr(self._stub, method)
            return await call(request, timeout=timeout, metadata=(*self._metadata, *metadata))
        except grpc.aio.AioRpcError as error:
            raise SelfdraftError.of(error) from error


def _affinity(
    session_id: str, given: Sequence[tuple[str, str]] = ()
) -> tuple[tuple[str, str], ...]:
    """The session's metadata, unless the caller gave his own. An id that no header can carry is
    left to the server, which says what is wrong with it."""
    if not _METADATA_VALUE.fullmatch(session_id) or any(key == SESSION_HEADER for key, _ in given):
        return ()
    return ((SESSION_HEADER, session_id),)


def sampling_params(**sampling: Unpack[Sampling]) -> pb.SamplingParams:
    """The message of these fields; a JSON schema may be given as what its text parses to."""
    schema = sampling.get("json_schema")
    if schema is not None and not isinstance(schema, str):
        sampling["json_schema"] = json.dumps(schema)
    return pb.SamplingParams(**sampling)  # type: ignore[arg-type]


def chat_input(messages: Messages, variables: Mapping[str, Any] | None = None) -> pb.ChatInput:
    """(role, content) pairs as a message, with further variables for the template."""
    chat = pb.ChatInput(
        messages=[pb.ChatMessage(role=role, content=content) for role, content in messages]
    )
    if variables:
        kwargs = struct_pb2.Struct()
        kwargs.update(variables)
        chat.chat_template_kwargs.CopyFrom(kwargs)
    return chat
