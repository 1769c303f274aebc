"""One call at a time, as a well-behaved client makes it and writes it down."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from selfdraft import SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb
from selfdraft.v1 import selfdraft_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from tests.benchmarks.soak.ledger import Call

CHANNELS = 8


@dataclass(slots=True)
class Book:
    """What the clients of one process have seen."""

    calls: list[Call] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    """Of calls that were neither cancelled nor had to wait for others on purpose."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def call(self, kind: str, request_id: str | None = None) -> Call:
        call = Call(request_id=request_id or f"{kind}-{next(self._numbers)}", kind=kind)
        self.calls.append(call)
        return call


def inference_stub(channel: grpc.aio.Channel) -> Any:
    """Methods of `selfdraft.v1.Inference`."""
    stub: Any = selfdraft_pb2_grpc.InferenceStub
    return stub(channel)


class Clients:
    """Stubs on a few connections, taken in turn. An async context manager."""

    def __init__(self, target: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self.channels = [grpc.aio.insecure_channel(target, options) for _ in range(CHANNELS)]
        self._inference = itertools.cycle([inference_stub(channel) for channel in self.channels])
        self._gateway = itertools.cycle(
            [vllm_engine_pb2_grpc.VllmEngineStub(channel) for channel in self.channels]
        )

    @property
    def inference(self) -> Any:
        return next(self._inference)

    @property
    def gateway(self) -> Any:
        return next(self._gateway)

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close(None)


async def generate(
    clients: Clients,
    book: Book,
    call: Call,
    request: pb.GenerateRequest,
    *,
    leave_after: int | None = None,
    timeout: float | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
    timed: bool = False,
) -> None:
    """Makes the call and writes down how it went. `leave_after`: cancel once so many tokens have
    come; 0 cancels when the server has admitted it, -1 at once."""
    request.request_id = call.request_id
    stream = clients.inference.Generate(request, timeout=timeout, metadata=metadata)
    began = time.monotonic()
    try:
        if leave_after == -1:
            await asyncio.sleep(0)
            stream.cancel()
        elif leave_after == 0:
            call.admitted = bool(await stream.initial_metadata())
            stream.cancel()
        async for message in stream:
            if timed and not call.tokens:
                book.first_token_s.append(time.monotonic() - began)
            call.admitted = True
            if message.HasField("complete"):
                call.told += message.complete.completion_tokens
            else:
                call.tokens += len(message.chunk.token_ids)
            if leave_after is not None and call.tokens >= leave_after:
                stream.cancel()
        call.status = "OK"
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        _note(call, error)


async def generate_at_gateway(
    clients: Clients, call: Call, request: vllm.GenerateRequest, *, abort: bool = False
) -> None:
    """The same in the gateway's protocol; `abort` ends it by an `Abort` after its first message."""
    request.request_id = call.request_id
    stub = clients.gateway
    stream = stub.Generate(request)
    try:
        async for message in stream:
            call.admitted = True
            kind = message.WhichOneof("response")
            if kind == "chunk":
                call.tokens += len(message.chunk.token_ids)
            else:
                call.tokens += len(message.complete.output_ids)
                call.told += message.complete.completion_tokens
            if abort:
                abort = False
                await stub.Abort(vllm.AbortRequest(request_ids=[call.request_id]))
        call.status = "OK"
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        _note(call, error)


def _note(call: Call, error: BaseException) -> None:
    if isinstance(error, grpc.aio.AioRpcError):
        told = SelfdraftError.of(error)
        call.status, call.reason = told.code.name, told.reason
        return
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    call.status = "CANCELLED"
