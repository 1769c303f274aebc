"""The measured process as seen from outside, and loads over loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

from service.gateway.servicer import SERVICE as GATEWAY
from service.health import SERVICE
from tests.benchmarks.service.load import Load, Outcome, Watch
from tests.checkout import ROOT

STREAMS_PER_CHANNEL = 32


class Measured:
    """A child process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._read()["address"]

    def ask(self, do: str, **what: Any) -> Any:
        """Gives an order; returns the answer, blocking."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def cpu(self) -> float:
        """Seconds it has used so far."""
        return float(self.ask("cpu"))

    def alone(self, load: Load) -> Outcome:
        """Has it run a load inside."""
        return Outcome(**self.ask("alone", load=asdict(load)))

    def served(self, load: Load) -> Outcome:
        """Runs a load over loopback."""
        return anyio.run(_served, self, load)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the measured process ended")
        return json.loads(line)


@contextmanager
def measured(
    *, model: Path, bursts: bool, depth: int, rows: int, checkout: Path | None = None
) -> Iterator[Measured]:
    """A child for the length of the block, of this checkout or of another one."""
    asked = {"model": str(model), "bursts": bursts, "depth": depth, "rows": rows}
    root = checkout or ROOT
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.service.child", json.dumps(asked)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'proto'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Measured(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


async def _served(child: Measured, load: Load) -> Outcome:
    """The client's own CPU time is not counted; on a machine of few cores it is still time that
    the server lacks, so it does little."""
    method = f"/{GATEWAY if load.gateway else SERVICE}/Generate"
    async with AsyncExitStack() as stack:
        calls = []
        for first in range(0, len(load.prompts), STREAMS_PER_CHANNEL):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(child.address, options=options)
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            call: Any = channel.unary_stream(
                method,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=None,
            )
            calls += [call] * len(load.prompts[first : first + STREAMS_PER_CHANNEL])
        watch = Watch(len(load.prompts), child.cpu)
        read = _gateway_tokens if load.gateway else _tokens

        async def stream(number: int, request: Any) -> None:
            async for data in calls[number](request):
                tokens = read(data)
                if tokens is None:
                    watch.end()
                elif tokens:
                    watch.burst(number, tokens)

        requests = [
            _gateway_request(load, n) if load.gateway else _request(load, n)
            for n in range(len(load.prompts))
        ]
        async with anyio.create_task_group() as tasks:
            for number, request in enumerate(requests):
                tasks.start_soon(stream, number, request)
        return watch.outcome()


def _tokens(data: bytes) -> int | None:
    """Tokens of a chunk; None for `complete`."""
    message = pb.GenerateResponse.FromString(data)
    return None if message.HasField("complete") else len(message.chunk.token_ids)


def _gateway_tokens(data: bytes) -> int | None:
    message = vllm.GenerateResponse.FromString(data)
    return None if message.HasField("complete") else len(message.chunk.token_ids)


def _request(load: Load, number: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=load.prompts[number]),
        sampling_params=pb.SamplingParams(
            temperature=load.temperature,
            seed=load.seed * 1000 + number,
            max_tokens=load.tokens,
            logprobs=load.logprobs,
            stop=load.stops,
            ignore_eos=True,
        ),
        reuse_prefix=False,
    )


def _gateway_request(load: Load, number: int) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=f"gateway-{load.seed}-{number}-{time.monotonic_ns()}",
        tokenized=vllm.TokenizedInput(original_text="", input_ids=load.prompts[number]),
        sampling_params=vllm.SamplingParams(
            temperature=load.temperature,
            seed=load.seed * 1000 + number,
            max_tokens=load.tokens,
            logprobs=load.logprobs,
            stop=load.stops,
            ignore_eos=True,
        ),
        stream=True,
    )
