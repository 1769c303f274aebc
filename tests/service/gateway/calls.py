"""Calls as the gateway makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from tests.service.harness import Running

PROMPT = (65, 66, 67)


@asynccontextmanager
async def connected(up: Running) -> AsyncIterator[Any]:
    """A stub of the gateway's protocol."""
    async with grpc.aio.insecure_channel(up.target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def neutral(**sampling: Any) -> vllm.SamplingParams:
    """Sampling parameters with everything that a gateway fills in for its clients."""
    params = {
        "temperature": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "n": 1,
        "max_tokens": 20,
    }
    return vllm.SamplingParams(**(params | sampling))


def ask(*, stream: bool = True, ids: tuple[int, ...] = PROMPT, **sampling: Any) -> Any:
    """A request as the gateway makes one of a chat."""
    return vllm.GenerateRequest(
        request_id="chatcmpl-1",
        tokenized=vllm.TokenizedInput(original_text="what it was", input_ids=ids),
        sampling_params=neutral(**sampling),
        stream=stream,
    )


async def read(call: Any) -> tuple[list[Any], list[Any]]:
    """Chunks and completes, in order."""
    chunks: list[Any] = []
    completes: list[Any] = []
    async for message in call:
        kind = message.WhichOneof("response")
        (chunks if kind == "chunk" else completes).append(getattr(message, kind))
    return chunks, completes


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with, within seconds."""
    try:
        with anyio.fail_after(3):
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call went well")
