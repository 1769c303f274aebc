"""Messages far above the server's limit."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import grpc
import grpc.aio
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.benchmarks.soak.calls import inference_stub
from tests.benchmarks.soak.hostile.wire import Deeds


async def attack(target: str, deeds: Deeds, until: float, round_s: float, size: int) -> None:
    """One such message each round, to one method or the other."""
    text = "x" * size
    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    for turn in itertools.count():
        if time.monotonic() >= until:
            return
        async with grpc.aio.insecure_channel(target, options) as channel:
            stub: Any = inference_stub(channel)
            try:
                if turn % 2:
                    await stub.Tokenize(pb.TokenizeRequest(text=text), timeout=60)
                else:
                    async for _ in stub.Generate(pb.GenerateRequest(text=text), timeout=60):
                        pass
                deeds.count("taken")
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    # All connections are taken, by another attack: this one was closed as it came.
                    deeds.count("no connection")
                    continue
                clear = "larger than max" in (error.details() or "")
                deeds.count(f"{error.code().name}{', clear' if clear else ''}")
        await asyncio.sleep(min(round_s / 2, max(until - time.monotonic(), 0)))
