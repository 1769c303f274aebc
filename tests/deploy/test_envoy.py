"""A real Envoy with deploy/'s configuration in front of real servers, as a client sees them.

Where a guarantee is a function of its own, `test_envoy_config.py` plants a fault that it must see.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from selfdraft import AdminClient, Generation, SelfdraftError

from engine.plan import Engine, EngineFailedError, StepResult
from service.config import ServerConfig
from tests.checkout import ROOT
from tests.deploy.envoy import Change, fleet
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import VOCAB, Running, service_config

pytestmark = pytest.mark.anyio

ENDLESS: dict[str, Any] = {"text": "x", "max_tokens": 3000, "ignore_eos": True}
SHORT: dict[str, Any] = {"text": "x", "max_tokens": 4, "ignore_eos": True}
PATIENT = ServerConfig(port=0, metrics_port=0, drain_s=20.0)
SMALL: dict[str, Any] = {"config": service_config(max_queue=1), "max_rows": 1}
"""Options of a worker that two requests fill."""


class Gate:
    """Holds an engine while it is closed."""

    def __init__(self, *, closes_at: float = math.inf) -> None:
        self._open = threading.Event()
        self._open.set()
        self._closes_at = closes_at

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._closes_at = math.inf
        self._open.set()

    def __call__(self, result: StepResult) -> None:
        if result.step >= self._closes_at:
            self.close()
        assert self._open.wait(20)


class Doom:
    """Ends an engine a number of steps after it was told to."""

    def __init__(self) -> None:
        self.steps: float = math.inf

    def __call__(self, result: StepResult) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise EngineFailedError("scripted death")


async def seconds(limit: float, wait: Awaitable[Any]) -> Any:
    with anyio.fail_after(limit):
        return await wait


def reasons(worker: Running) -> list[str]:
    """Why each of a worker's calls ended, oldest first."""
    return [line["reason"] for line in worker.log_lines()]


@asynccontextmanager
async def filled(worker: Running) -> AsyncIterator[None]:
    """A `SMALL` worker runs one request and queues another."""
    async with worker.client.generate(**ENDLESS) as one:
        await one.request_id()
        while not worker.statistics.running:
            await anyio.sleep(0.005)
        async with worker.client.generate(**ENDLESS) as other:
            await other.request_id()
            yield


async def drained(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


async def failure(generation: Generation) -> SelfdraftError:
    with pytest.raises(SelfdraftError) as caught:
        await seconds(5, generation.texts())
    return caught.value


# --- streams -------------------------------------------------------------------------------------


async def test_tokens_arrive_as_they_are_made(tmp_path: Path) -> None:
    gate = Gate(closes_at=4)
    async with fleet(tmp_path, each=[{}], before_collect=gate) as up:
        stream = aiter(up.client.generate(text="x", max_tokens=60, ignore_eos=True))
        chunk = await seconds(5, anext(stream))  # else the engine waits for ever
        ids = list(chunk.token_ids)
        gate.open()
        ids += [token async for chunk in stream for token in chunk.token_ids]
        assert len(ids) == 60


async def deadline_travels(folder: Path, change: Change | None = None) -> None:
    async with fleet(folder, change=change, each=[{}], step_s=0.01) as up:
        error = await failure(up.client.generate(**ENDLESS, timeout=0.5))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        (worker,) = up.workers
        await worker.until_idle()
        await worker.idle()
        assert reasons(worker) == ["DEADLINE_EXCEEDED"]


async def test_a_deadline_reaches_the_worker(tmp_path: Path) -> None:
    await deadline_travels(tmp_path)


async def test_a_client_that_leaves_ends_its_generation(tmp_path: Path) -> None:
    async with fleet(tmp_path, each=[{}], step_s=0.01) as up:
        async with up.client.generate(**ENDLESS) as generation:
            await seconds(5, anext(aiter(generation)))
        (worker,) = up.workers
        await worker.until_idle()
        await worker.idle()
        assert reasons(worker) == ["CANCELLED"]


# --- another worker ------------------------------------------------------------------------------


async def full_worker_is_passed_over(folder: Path, change: Change | None = None) -> None:
    async with fleet(folder, change=change, each=[SMALL, SMALL], step_s=0.002) as up:
        first, second = up.workers
        session = await up.session_of(first)
        async with filled(first):
            calls = len(second.log_lines())
            for _ in range(3):
                generation = up.client.generate(**SHORT, session_id=session)
                await seconds(5, generation.texts())
            assert reasons(first)[-3:] == ["QUEUE_FULL"] * 3
            assert reasons(second)[calls:] == ["length"] * 3


async def test_a_full_worker_is_passed_over(tmp_path: Path) -> None:
    await full_worker_is_passed_over(tmp_path)


async def policy_is_not_the_callers(folder: Path, change: Change | None = None) -> None:
    async with fleet(folder, change=change, each=[SMALL, SMALL], step_s=0.002) as up:
        session = await up.session_of(up.workers[0])
        async with filled(up.workers[0]):
            metadata = [("x-envoy-max-retries", "0"), ("x-envoy-upstream-rq-timeout-ms", "1")]
            generation = up.client.generate(**SHORT, session_id=session, metadata=metadata)
            await seconds(5, generation.texts())


async def test_a_caller_cannot_set_the_policy(tmp_path: Path) -> None:
    await policy_is_not_the_callers(tmp_path)


async def long_request_is_passed_on(folder: Path, change: Change | None = None) -> None:
    async with fleet(folder, change=change) as up:
        first, second = up.workers
        session = await up.session_of(first)
        first.server.door.drain()  # and health does not say so yet
        calls = len(second.log_lines())
        text = "x" * 8 * 2**20  # which the second worker finds too long
        error = await failure(up.client.generate(text=text, session_id=session))
        assert reasons(first)[-1] == "DRAINING"
        assert reasons(second)[calls:] == ["INVALID_ARGUMENT"]
        assert error.reason == "INVALID_ARGUMENT"


async def test_a_long_request_is_passed_on_too(tmp_path: Path) -> None:
    await long_request_is_passed_on(tmp_path)


@pytest.mark.parametrize("steps", [0, 6])
async def test_nothing_is_repeated_once_admitted(tmp_path: Path, steps: int) -> None:
    """Neither after the first token nor before it: what killed one engine is kept from others."""
    doom = Doom()
    async with fleet(tmp_path, each=[{"before_collect": doom}, {}]) as up:
        first, second = up.workers
        session = await up.session_of(first)
        doom.steps = steps
        calls = len(second.log_lines())
        error = await failure(up.client.generate(**ENDLESS, session_id=session))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED")
        assert len(second.log_lines()) == calls
        await seconds(5, up.client.generate(**SHORT, session_id=session).texts())
        assert reasons(second)[calls:] == ["length"]


# --- sessions ------------------------------------------------------------------------------------


async def sessions_stay(folder: Path, change: Change | None = None) -> None:
    async with fleet(folder, change=change, boundaries=32) as up:
        homes = {}
        for n in range(16):
            homes[f"s{n}"] = await up.worker_of(f"s{n}")
        for session, home in homes.items():
            assert await up.worker_of(session) is home
        assert len(set(map(id, homes.values()))) == 2
        for session in homes:
            assert await up.client.release_session(session)


async def test_a_session_stays_where_it_is_kept(tmp_path: Path) -> None:
    await sessions_stay(tmp_path)


# --- health --------------------------------------------------------------------------------------


async def draining_worker_is_left_alone(folder: Path, change: Change | None = None) -> None:
    config, gate = service_config(server=PATIENT), Gate()
    each = [{"before_collect": gate}, {}]
    async with fleet(folder, change=change, each=each, config=config, step_s=0.002) as up:
        first, second = up.workers
        session = await up.session_of(first)
        lasting = up.client.generate(**ENDLESS | {"max_tokens": 200}, session_id=session)
        stream = aiter(lasting)
        count = len((await seconds(5, anext(stream))).token_ids)
        gate.close()
        try:
            first.server.stop.request()
            await up.envoy.until_healthy({second.target})
            calls = len(first.log_lines())
            for name in (session, "a", "b", "c", "d"):
                await seconds(5, up.client.generate(**SHORT, session_id=name).texts())
            assert len(first.log_lines()) == calls, "it got new calls"
        finally:
            gate.open()
        count += sum([len(chunk.token_ids) async for chunk in stream])
        assert count == 200
        assert lasting.complete is not None


async def test_a_draining_worker_finishes_its_streams_and_gets_no_more(tmp_path: Path) -> None:
    await draining_worker_is_left_alone(tmp_path)


async def test_a_worker_that_stops_costs_no_call(tmp_path: Path) -> None:
    async with fleet(tmp_path, step_s=0.002) as up:
        first, second = up.workers
        served = [0]

        async def call_after_call() -> None:
            while not stopped.is_set():
                await up.client.generate(**SHORT, session_id=f"s{served[0]}").texts()
                served[0] += 1

        stopped = anyio.Event()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(call_after_call)
                while not first.log_lines():
                    await anyio.sleep(0.01)
                first.server.stop.request()
                await up.envoy.until_healthy({second.target})
                while not first.codes:
                    await anyio.sleep(0.01)
                stopped.set()
        assert served[0] == sum(reasons(w).count("length") for w in up.workers)


async def loading_workers_get_no_calls(folder: Path, change: Change | None = None) -> None:
    loaded = threading.Event()

    def slow() -> Engine:
        assert loaded.wait(20)
        return FakeEngine(vocab_size=VOCAB)

    async with fleet(folder, change=change, engine=slow, ready=False) as up:
        try:
            error = await failure(up.client.generate(**SHORT))
            assert error.code is grpc.StatusCode.UNAVAILABLE
            assert error.reason == "", "a worker was asked"
        finally:
            loaded.set()
        await up.envoy.until_healthy({worker.target for worker in up.workers})
        await seconds(5, up.client.generate(**SHORT).texts())


async def test_workers_that_load_get_no_calls(tmp_path: Path) -> None:
    await loading_workers_get_no_calls(tmp_path)


async def test_health_of_the_fleet(tmp_path: Path) -> None:
    async with fleet(tmp_path) as up, grpc.aio.insecure_channel(up.envoy.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="selfdraft.v1.Inference")
        assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING


# --- a worker that is killed ---------------------------------------------------------------------


@contextmanager
def process_worker() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker in a process of its own, and its address."""
    command = [sys.executable, "-m", "tests.deploy.worker"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def test_a_killed_worker_costs_its_own_streams_only(tmp_path: Path) -> None:
    with process_worker() as (process, target):
        async with fleet(tmp_path, each=[{}], more=[target], step_s=0.01) as up:
            (left,) = up.workers
            sessions = await up.session_of(left), await up.session_of(None)
            lasting, lost = (up.client.generate(**ENDLESS, session_id=name) for name in sessions)
            streams = [aiter(lasting), aiter(lost)]
            for stream in streams:
                await seconds(5, anext(stream))
            calls = len(left.log_lines())
            process.kill()
            with pytest.raises(SelfdraftError) as caught:
                await seconds(5, drained(streams[1]))
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert len(left.log_lines()) == calls, "it was begun again elsewhere"
            for _ in range(4):
                await seconds(5, up.client.generate(**SHORT, session_id=sessions[1]).texts())
            assert (await seconds(5, anext(streams[0]))).token_ids
            lasting.cancel()


# --- errors --------------------------------------------------------------------------------------


def told(error: SelfdraftError) -> tuple[Any, ...]:
    return (error.code, error.reason, error.message, error.violations, error.retry_after_s)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"text": "x", "top_p": 7.0, "max_tokens": 0, "session_id": "\x07"}, "INVALID_ARGUMENT"),
        (
            {"text": "x", "logit_bias": dict.fromkeys(range(500, 540), 1000000000.0)},
            "INVALID_ARGUMENT",
        ),
        ({"text": "x", "request_id": "taken"}, "DUPLICATE_REQUEST"),
    ],
)
async def test_errors_arrive_as_the_worker_sends_them(
    tmp_path: Path, request_: dict[str, Any], reason: str
) -> None:
    async with fleet(tmp_path, each=[{}], step_s=0.01) as up:
        (worker,) = up.workers
        async with worker.client.generate(**ENDLESS, request_id="taken") as taken:
            await taken.request_id()
            direct, passed = [
                await failure(client.generate(**request_)) for client in (worker.client, up.client)
            ]
        assert told(passed) == told(direct)
        assert passed.reason == reason
        assert passed.violations


async def test_when_all_are_full_the_client_hears_when_to_come_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, each=[SMALL, SMALL], step_s=0.002) as up:
        first, second = up.workers
        async with filled(first), filled(second):
            error = await failure(up.client.generate(**SHORT))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry_after_s is not None
        assert {"QUEUE_FULL"} == set(reasons(first)[:1] + reasons(second)[:1])


async def test_when_all_drain_the_client_hears_when_to_come_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as up:
        for worker in up.workers:
            worker.server.door.drain()
        error = await failure(up.client.generate(**SHORT))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert error.retry_after_s == ServerConfig().retry_after_s


async def test_admin_is_not_for_clients_of_the_fleet(tmp_path: Path) -> None:
    async with fleet(tmp_path, each=[{}]) as up:
        async with AdminClient(up.workers[0].target) as admin:
            assert await admin.sessions() == []
        async with AdminClient(up.envoy.target) as admin:
            with pytest.raises(SelfdraftError) as caught:
                await admin.sessions()
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
