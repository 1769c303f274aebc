"""A real gRPC server on loopback whose `Inference` answers as a test says: what the client makes of
answers that the real one gives only in bad moments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from selfdraft.v1 import selfdraft_pb2 as pb
from selfdraft.v1 import selfdraft_pb2_grpc

from service.errors import Reason, ServiceError


@dataclass(frozen=True, kw_only=True)
class Act:
    """What becomes of one call."""

    chunks: Sequence[str] = ()
    """Sent first."""
    error: ServiceError | grpc.StatusCode | None = None
    """How it ends then; None: well."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One call as the server got it."""

    request: Any
    metadata: dict[str, str]
    left_s: float | None
    """Seconds until its deadline."""


@dataclass
class Script:
    """What happens to calls, one after the other; the last act goes on for ever."""

    acts: Sequence[Act]
    seen: list[Seen] = field(default_factory=list)
    target: str = ""

    @property
    def ids(self) -> set[str]:
        return {seen.request.request_id for seen in self.seen}


def refusal(reason: Reason, retry_after_s: float | None = None) -> Act:
    return Act(error=ServiceError(reason, "not now", retry_after_s=retry_after_s))


class _Servicer:
    def __init__(self, script: Script) -> None:
        self._script = script

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.unary

    async def unary(self, request: Any, context: Any) -> Any:
        act = self._act(request, context)
        await self._end(act, context)
        return pb.GetModelInfoResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: N802
        act = self._act(request, context)
        if act.chunks:
            await context.send_initial_metadata((("selfdraft-request-id", request.request_id),))
        for text in act.chunks:
            await context.write(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(text=text)))
        await self._end(act, context)
        await context.write(pb.GenerateResponse(complete=pb.GenerateComplete()))

    def _act(self, request: Any, context: Any) -> Act:
        script = self._script
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        left = context.time_remaining()
        script.seen.append(Seen(request=request, metadata=metadata, left_s=left))
        return script.acts[min(len(script.seen), len(script.acts)) - 1]

    async def _end(self, act: Act, context: Any) -> None:
        if isinstance(act.error, ServiceError):
            await context.abort_with_status(act.error.to_status())
        elif act.error is not None:
            await context.abort(act.error, "scripted")


@asynccontextmanager
async def scripted(*acts: Act, port: int = 0) -> AsyncIterator[Script]:
    """A server that plays `acts`, for the length of the block."""
    script = Script(acts)
    server = grpc.aio.server()
    selfdraft_pb2_grpc.add_InferenceServicer_to_server(_Servicer(script), server)  # type: ignore[no-untyped-call]
    script.target = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield script
    finally:
        await server.stop(None)
