"""A client that asks small things all the time: how long does the server take to say anything?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.benchmarks.soak.calls import inference_stub

INTERVAL_S = 0.5
LIMIT_S = 30.0


@dataclass(slots=True)
class Probe:
    """Latencies in seconds."""

    health_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)
    """Of `GetLoads`: a call through every interceptor, answered on the event loop."""
    reconnect_s: list[float] = field(default_factory=list)
    """Of a health check on a connection made for it; only of those that succeeded."""
    failures: list[str] = field(default_factory=list)
    """Of the first two kinds."""
    turned_away: int = 0
    """New connections that were not had within a second, as while others took all places."""

    async def run(self, target: str) -> None:
        """Asks until cancelled."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(target, options) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            loads: Any = inference_stub(channel)
            while True:
                await self._ask(
                    self.health_s, health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
                )
                await self._ask(self.loads_s, loads.GetLoads(pb.GetLoadsRequest(), timeout=LIMIT_S))
                await self.newcomer(target)
                await asyncio.sleep(INTERVAL_S)

    async def _ask(self, into: list[float], call: grpc.aio.UnaryUnaryCall) -> None:  # type: ignore[type-arg]
        began = time.monotonic()
        try:
            await call
        except grpc.aio.AioRpcError as error:
            self.failures.append(f"{error.code().name}: {error.details()}")
        into.append(time.monotonic() - began)

    async def newcomer(self, target: str, timeout: float = 1.0) -> bool:
        """Whether a client that comes now is let in."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(target, options) as channel:
            began = time.monotonic()
            try:
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True
                )
            except grpc.aio.AioRpcError:
                self.turned_away += 1
                return False
            self.reconnect_s.append(time.monotonic() - began)
            return True
