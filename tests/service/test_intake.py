"""Calls before their handler has them: bounded, told why, counted and logged."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from selfdraft import Client, SelfdraftError

from service.config import ServerConfig
from service.guard import HEALTH
from service.intake import IntakeInterceptor
from tests.service.harness import Running, running, service_config

pytestmark = pytest.mark.anyio

METHOD = "/selfdraft.v1.Inference/Generate"
ENDLESS: dict[str, Any] = {"text": "x", "max_tokens": 3000, "ignore_eos": True}


def bare(channel: grpc.aio.Channel) -> Any:
    """A `Generate` call that sends what it is told to."""
    method: Any = channel.stream_stream
    return method(METHOD)()


def not_taken(up: Running, reason: str) -> int:
    """`Generate` calls that the log says ended for `reason` before they were taken."""
    first = [line for line in up.log_lines("call not taken") if line["reason"] == reason]
    more = [line for line in up.log_lines("calls not taken") if line["reason"] == reason]
    return len(first) + sum(int(line["calls"]) for line in more)


async def refused(up: Running, reason: str) -> int:
    return int((await up.metrics())[f'selfdraft_requests_refused_total{{reason="{reason}"}}'])


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.sleep(0.01)


def served(**server: Any) -> Any:
    return service_config(server=ServerConfig(**server))


async def test_calls_without_a_message_do_not_hold_their_places() -> None:
    config = served(max_concurrent_rpcs=3, message_timeout_s=1.0)
    async with (
        running(config=config, metrics=True) as up,
        grpc.aio.insecure_channel(up.target) as channel,
    ):
        held = [bare(channel) for _ in range(3)]
        await anyio.sleep(0.1)
        with pytest.raises(SelfdraftError) as caught:
            await up.works()
        assert len(held) == 3
        assert caught.value.reason == "TOO_MANY_CALLS"
        await until(lambda: not_taken(up, "SLOW_SENDER") >= 3)
        await up.idle()
        assert await up.works()
        assert await refused(up, "SLOW_SENDER") == not_taken(up, "SLOW_SENDER")


async def check_health_without_messages(up: Running) -> None:
    """Calls of a service that needs no token and has no bound of its own, from a stranger: they do
    not add up to where gRPC itself refuses everybody. Raises AssertionError."""
    async with grpc.aio.insecure_channel(up.target) as channel:
        open_call: Any = channel.stream_stream
        held = [open_call(f"/{HEALTH}/{name}")() for name in ("Check", "Watch") for _ in range(20)]
        await anyio.sleep(0.2)
        assert len(held) == 40
        async with grpc.aio.insecure_channel(up.target) as probing:
            health = health_pb2_grpc.HealthStub(probing)
            try:
                await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert await up.works()
            except (grpc.aio.AioRpcError, SelfdraftError) as error:
                raise AssertionError(error) from error


STRANGERS: dict[str, Any] = {"max_concurrent_rpcs": 3, "max_open_calls": 2}


async def test_health_checks_without_a_message_give_way() -> None:
    async with running(config=served(**STRANGERS)) as up:
        await check_health_without_messages(up)
        await until(lambda: len(up.log_lines("call not taken")) >= 1)
        line = up.log_lines("call not taken")[0]
        assert line["reason"] == "SLOW_SENDER"
        assert "another call" in line["detail"]


async def test_health_checks_that_stay_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation."""
    monkeypatch.setattr(IntakeInterceptor, "_make_way", lambda self, timer: None)
    async with running(config=served(**STRANGERS)) as up:
        with pytest.raises(AssertionError):
            await check_health_without_messages(up)


async def test_above_the_bound_on_calls() -> None:
    config = served(max_concurrent_rpcs=1)
    async with (
        running(config=config, metrics=True, step_s=0.003) as up,
        grpc.aio.insecure_channel(up.target) as channel,
    ):
        stream = up.client.generate(**ENDLESS)
        await stream.request_id()
        async with Client(up.target, retry=None) as other:
            with pytest.raises(SelfdraftError) as caught:
                await other.generate(text="x").text()
        assert caught.value.reason == "TOO_MANY_CALLS"
        assert caught.value.retry_after_s
        assert await refused(up, "TOO_MANY_CALLS") == not_taken(up, "TOO_MANY_CALLS") == 1
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        stream.cancel()
        await up.idle()
        assert await up.works()


@pytest.mark.parametrize(
    ("body", "reason", "why"),
    [
        (b"\xff" * 30, "INVALID_ARGUMENT", "parsing"),
        (None, "INVALID_ARGUMENT", "none was sent"),
        (b"x" * 5000, "CANCELLED", "larger than 2048 bytes"),
    ],
)
async def test_messages_that_cannot_be_read(body: bytes | None, reason: str, why: str) -> None:
    config = served(max_message_bytes=2048)
    async with (
        running(config=config, metrics=True) as up,
        grpc.aio.insecure_channel(up.target) as channel,
    ):
        call = bare(channel)
        with suppress(grpc.aio.AioRpcError):
            if body is not None:
                await call.write(body)
            await call.done_writing()
            await call.read()
        assert await call.code() is not grpc.StatusCode.OK
        await until(lambda: not_taken(up, reason) == 1)
        assert why in up.log_lines("call not taken")[0]["detail"]
        assert await refused(up, reason) == 1
        assert up.log_lines() == []


async def test_clients_that_leave_before_their_message() -> None:
    """Many of them make few lines, which count them all."""
    many = 40
    async with (
        running(config=served(), metrics=True) as up,
        grpc.aio.insecure_channel(up.target) as channel,
    ):
        calls = [bare(channel) for _ in range(many)]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
        await until(lambda: not_taken(up, "CANCELLED") == many)
        lines = up.log_lines("call not taken") + up.log_lines("calls not taken")
        assert len(lines) <= 3
        assert await refused(up, "CANCELLED") == many


async def test_a_client_that_leaves_while_its_prompt_is_encoded() -> None:
    go = threading.Event()
    async with running(metrics=True) as up:
        tokenizer = up.server.door.look().tokenizer
        encode = tokenizer.encode

        def slow(text: str, **how: Any) -> Any:
            go.wait(5)
            return encode(text, **how)

        tokenizer.encode = slow  # type: ignore[method-assign]
        stream = up.client.generate(text="x" * 100_000, max_tokens=3)
        servicer = up.server.servicer
        assert servicer is not None
        await until(lambda: servicer.active == 1)
        stream.cancel()
        await asyncio.sleep(0.1)
        go.set()
        await until(lambda: len(up.log_lines()) == 1)
        [line] = up.log_lines()
        assert line["status"] == "CANCELLED"
        assert "ends" not in line
        assert await refused(up, "CANCELLED") == 1
        assert up.statistics.submitted == 0


def opened(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    found = socket.create_connection((host, int(port)), timeout=5)
    found.settimeout(5)
    return found


async def test_connections_are_bounded_and_idle_ones_give_way() -> None:
    config = served(max_connections=4, handshake_timeout_s=0.5, max_connection_idle_s=0.5)
    async with running(config=config) as up:
        held = [opened(up.target) for _ in range(8)]
        gone = 0
        for one in held[4:]:
            with suppress(OSError):
                gone += await asyncio.to_thread(one.recv, 1) == b""
        async with Client(up.target) as late:  # once those held are closed for their silence
            with anyio.fail_after(10):
                assert await late.generate(text="x", max_tokens=2, ignore_eos=True).text()
        for one in held:
            one.close()
        assert gone
