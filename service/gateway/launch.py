"""`selfdraft gateway`: the Shepherd Model Gateway (`smg`) in front of given workers.

The workers are waited for, and then this process becomes smg: signals, output and exit code are its
own, and no parent is left to outlive it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, NoReturn

import anyio
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from service.config import SettingError
from service.console import stderr
from service.gateway.servicer import SERVICE

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})")
_RETRY_S: Final = 0.5
_ANSWER_S: Final = 2.0
_PATIENCE_S: Final = 2.0
"""Seconds after which somebody who waits is told for what."""


class GatewayError(Exception):
    """The gateway cannot start; the text says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway."""

    workers: tuple[str, ...]
    """host:port of each server, at least one. They serve the same model."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default: it asks nobody for a key."""

    port: int = 30000
    """HTTP port for OpenAI and Anthropic clients."""

    metrics_port: int = 29000
    """Port of the gateway's own Prometheus endpoint, on the same host."""

    policy: str = "cache_aware"
    """How smg chooses a worker: by default where the prompt's prefix is kept, unless that one is
    much busier than the others."""

    wait_s: float = 300.0
    """Seconds in which every worker must be serving: a large model loads for minutes."""

    options: tuple[str, ...] = ()
    """Further options of `smg launch`, as they are."""

    def __post_init__(self) -> None:
        if not self.workers:
            raise SettingError("worker", "at least one host:port is required")
        for worker in self.workers:
            match = _ADDRESS.fullmatch(worker)
            if match is None or not 1 <= int(match[2]) <= 65535:
                raise SettingError("worker", f"{worker!r} is not host:port")
        if len(set(self.workers)) < len(self.workers):
            raise SettingError("worker", "one address is named twice")
        for name in ("port", "metrics_port"):
            if not 1 <= getattr(self, name) <= 65535:
                raise SettingError(name, "must be in 1 … 65535")
        if not self.wait_s > 0:
            raise SettingError("wait", "must be > 0 seconds")

    def command(self) -> list[str]:
        """The command line of smg."""
        return [
            *(sys.executable, "-m", "smg", "launch"),
            *("--host", self.host, "--port", str(self.port)),
            *("--prometheus-host", self.host, "--prometheus-port", str(self.metrics_port)),
            *("--policy", self.policy),
            # A worker that was restarted is back in seconds, not after smg's minute.
            *("--health-check-interval-secs", "5", "--worker-startup-check-interval", "2"),
            # One step of a large model's prompt can take seconds; smg's own limit is 3.
            *("--worker-wedge-secs", "15"),
            *("--worker-urls", *(f"grpc://{worker}" for worker in self.workers)),
            *self.options,
        ]


def launch(config: GatewayConfig) -> NoReturn:
    """Waits for the workers and becomes smg. Raises GatewayError when smg is not installed, or a
    worker does not serve in time."""
    if find_spec("smg") is None:
        raise GatewayError(
            "smg is not installed; install the extra: pip install 'selfdraft[gateway]'"
        )
    anyio.run(wait_for_workers, config.workers, config.wait_s, backend="asyncio")
    stderr.print(f"gateway: http://{config.host}:{config.port} for {', '.join(config.workers)}")
    command = config.command()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


async def wait_for_workers(workers: Sequence[str], wait_s: float) -> None:
    """Returns when all of them serve the gateway's protocol; says after a moment whom it waits for.
    Raises GatewayError."""
    problems: dict[str, str] = {}

    async def one(worker: str) -> None:
        problems[worker] = "no answer"
        with anyio.move_on_after(wait_s) as limit:
            problems[worker] = await _until_serving(worker, problems)
        if limit.cancelled_caught:
            problems[worker] += f"; gave up after {wait_s:g} s"

    async def tell() -> None:
        await anyio.sleep(_PATIENCE_S)
        stderr.print(f"gateway: waiting up to {wait_s:g} s: {_listed(problems)}")

    async with anyio.create_task_group() as telling:
        telling.start_soon(tell)
        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(one, worker)
        telling.cancel_scope.cancel()
    if listed := _listed(problems):
        raise GatewayError(listed)


def _listed(problems: Mapping[str, str]) -> str:
    return "; ".join(f"worker {worker}: {why}" for worker, why in problems.items() if why)


async def _until_serving(worker: str, problems: dict[str, str]) -> str:
    """Why it never will; empty when it does. Keeps what is the matter now in `problems`."""
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    async with grpc.aio.insecure_channel(worker) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(request, timeout=_ANSWER_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return "does not speak the gateway's protocol (serve --gateway)"
                problems[worker] = error.details() or error.code().name
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return await _refusal(channel)
                problems[worker] = "is not serving yet"
            await anyio.sleep(_RETRY_S)


async def _refusal(channel: grpc.aio.Channel) -> str:
    """Why a worker that is serving would not serve smg; empty when it would."""
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    try:
        await stub.HealthCheck(vllm.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return "asks for a token, and smg sends none (serve without --tokens)"
    return ""
