"""A server's life as its probes see it: loading, serving, draining, dying."""

from __future__ import annotations

import io
import threading

import anyio
import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from selfdraft import Client, SelfdraftError

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.plan import Engine
from service import launch
from service.config import ServerConfig, ServiceConfig
from service.health import SERVICE
from service.logs import Logger, make_logger
from service.server import BindError, Server
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import FIXTURES, VOCAB, Running, running, service_config, tokenizer

pytestmark = pytest.mark.anyio

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def silent() -> Logger:
    return make_logger("json", io.StringIO())


class Watcher:
    """A client of grpc.health.v1 on a connection of its own."""

    def __init__(self, up: Running) -> None:
        self._channel = grpc.aio.insecure_channel(up.target)
        self.stub = health_pb2_grpc.HealthStub(self._channel)
        self._watches = {
            name: self.stub.Watch(health_pb2.HealthCheckRequest(service=name))
            for name in ("", SERVICE, "nobody")
        }

    async def next(self, name: str = "") -> int:
        with anyio.fail_after(3):
            status: int = (await self._watches[name].read()).status
            return status

    async def check(self, name: str = "") -> int:
        answer = await self.stub.Check(health_pb2.HealthCheckRequest(service=name))
        status: int = answer.status
        return status

    async def close(self) -> None:
        await self._channel.close(None)


async def test_not_serving_until_the_model_is_loaded() -> None:
    go = threading.Event()

    def slow() -> Engine:
        assert go.wait(10)
        return FakeEngine(vocab_size=VOCAB)

    async with running(engine=slow, ready=False) as up:
        watcher = Watcher(up)
        for name in ("", SERVICE):
            assert await watcher.next(name) == NOT_SERVING
            assert await watcher.check(name) == NOT_SERVING
        assert await watcher.next("nobody") == UNKNOWN
        for call in (
            up.client.generate(text="x").text(),
            up.client.tokenize(text="x"),
            up.client.model_info(),
            up.client.sessions(),
            up.client.release_session("x"),
        ):
            with pytest.raises(SelfdraftError) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (
                grpc.StatusCode.UNAVAILABLE,
                "LOADING",
            )
            assert caught.value.retry_after_s == 2.0
        go.set()
        for name in ("", SERVICE):
            assert await watcher.next(name) == SERVING
        assert await up.works()
        await watcher.close()


async def test_stopping_while_the_model_loads_does_not_wait_for_it() -> None:
    go = threading.Event()

    def stuck() -> Engine:
        go.wait(10)
        return FakeEngine(vocab_size=VOCAB)

    async with running(engine=stuck, ready=False) as up:
        up.server.stop.request()
        with anyio.fail_after(3):
            while not up.codes:
                await anyio.sleep(0.01)
        assert up.codes == [0]
        go.set()


async def test_reflection_lists_and_describes_the_service() -> None:
    async with running() as up, grpc.aio.insecure_channel(up.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asks = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        call = stub.ServerReflectionInfo(iter(asks))
        listed, described = [answer async for answer in call]
        names = {service.name for service in listed.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        file = descriptor_pb2.FileDescriptorProto.FromString(
            described.file_descriptor_response.file_descriptor_proto[0]
        )
        methods = {method.name for method in file.service[0].method}
        assert methods == {
            *("Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo"),
            *("ReleaseSession", "ListSessions", "GetLoads", "GetServerInfo"),
        }


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async with running(step_s=0.005) as up:
        watcher = Watcher(up)
        assert await watcher.next() == SERVING
        running_one = up.client.generate(
            text="x", max_tokens=60, ignore_eos=True, request_id="last"
        )
        await running_one.request_id()
        up.server.stop.request()
        assert await watcher.next() == NOT_SERVING
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x").text()
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "DRAINING",
        )
        assert caught.value.retry_after_s is not None
        assert await running_one.text()
        assert running_one.complete is not None
        assert running_one.complete.completion_tokens == 60
        with anyio.fail_after(5):
            while not up.codes:
                await anyio.sleep(0.01)
        assert up.codes == [0]
        assert up.engines[0].closed
        await watcher.close()


async def test_drain_limit_ends_what_still_runs() -> None:
    config = service_config(server=ServerConfig(drain_s=0.2))
    async with running(config=config, step_s=0.005) as up:
        endless = up.client.generate(text="x", max_tokens=4000, ignore_eos=True)
        await endless.request_id()
        up.server.stop.request()
        with pytest.raises(SelfdraftError) as caught:
            await endless.text()
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "DRAINING",
        )
        with anyio.fail_after(3):
            while not up.codes:
                await anyio.sleep(0.01)
        assert up.codes == [0]


async def test_a_second_stop_drops_what_runs() -> None:
    async with running(step_s=0.005) as up:
        endless = up.client.generate(text="x", max_tokens=4000, ignore_eos=True)
        await endless.request_id()
        up.server.stop.request()
        await anyio.sleep(0.05)
        up.server.stop.request()
        with pytest.raises(SelfdraftError, match="UNAVAILABLE"):
            await endless.text()
        with anyio.fail_after(2):
            while not up.codes:
                await anyio.sleep(0.01)
        assert up.codes == [0]


async def test_a_dead_engine_is_told_to_streams_probes_and_the_operator() -> None:
    async with running(step_s=0.002, dies_at=30) as up:
        watcher = Watcher(up)
        assert await watcher.next() == SERVING
        errors: list[SelfdraftError] = []

        async def one() -> None:
            with pytest.raises(SelfdraftError) as caught:
                await up.client.generate(text="x", max_tokens=4000, ignore_eos=True).text()
            errors.append(caught.value)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
            assert await watcher.next() == NOT_SERVING
        for error in errors:
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED")
            assert "scripted death" in error.message
        with anyio.fail_after(3):
            while not up.codes:
                await anyio.sleep(0.01)
        assert up.codes == [1]
        assert up.log_lines("the engine failed")
        await watcher.close()


@pytest.mark.parametrize("works", [True, False])
async def test_ready_is_said_after_the_warm_up(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[Server] = []
    seen: list[bool] = []

    def warm_up(engine: Engine) -> None:
        seen.append(servers[0].ready.is_set())
        if not works:
            raise EngineError("warm-up at 1 rows and depth 0: NaN")

    class Loaded(FakeEngine):
        budget = None

    monkeypatch.setattr("engine.load.load_engine", lambda *_: Loaded(vocab_size=VOCAB))
    monkeypatch.setattr("engine.warmup.warm_up", warm_up)
    config = ServiceConfig(
        engine=EngineConfig(model=FIXTURES / "byte_level"),
        server=ServerConfig(port=0, metrics_port=None),
    )
    servers.append(launch.make_server(config, silent()))
    if works:
        async with launch.running(servers[0]):
            pass
    else:
        with pytest.raises(EngineError, match="NaN"):
            await servers[0].run()
    assert seen == [False]
    assert servers[0].ready.is_set() is works


async def test_load_errors_come_out_of_run() -> None:
    class BrokenError(Exception):
        pass

    def broken() -> Engine:
        raise BrokenError("no such weights")

    server = Server(
        config=service_config(server=ServerConfig(port=0, metrics_port=None)),
        engine_factory=broken,
        tokenizer_factory=tokenizer,
        logger=silent(),
    )
    with pytest.raises(BrokenError):
        await server.run()


async def test_a_taken_port_is_named() -> None:
    async with running(metrics=True) as up:
        assert up.server.addresses is not None
        assert up.server.addresses.metrics is not None
        taken = int(up.target.split(":")[1])
        taken_metrics = int(up.server.addresses.metrics.split(":")[1])
        for config, named in (
            (ServerConfig(port=taken, metrics_port=None), str(taken)),
            (ServerConfig(port=0, metrics_port=taken_metrics), str(taken_metrics)),
        ):
            server = Server(
                config=service_config(server=config),
                engine_factory=lambda: FakeEngine(),
                tokenizer_factory=tokenizer,
                logger=silent(),
            )
            with pytest.raises(BindError, match=named):
                await server.run()


async def test_pings_every_second_on_a_silent_stream_are_tolerated() -> None:
    """The same rule as for 30 s pings: none may be closer together than the configured limit."""
    config = service_config(server=ServerConfig(min_ping_interval_s=0.5))
    options = (
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_timeout_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with running(config=config, max_rows=1, step_s=0.01) as up:
        hog = up.client.generate(text="x", max_tokens=4000, ignore_eos=True, request_id="hog")
        await hog.request_id()
        async with Client(up.target, options=options) as pinging:
            waiting = pinging.generate(text="x", max_tokens=3, ignore_eos=True)
            await waiting.request_id()
            await anyio.sleep(3.5)
            assert await up.client.abort("hog")
            assert await waiting.text()


async def test_an_old_connection_is_renewed_and_its_stream_finishes() -> None:
    config = service_config(
        server=ServerConfig(max_connection_age_s=0.3, max_connection_age_grace_s=5.0)
    )
    async with running(config=config, step_s=0.01) as up:
        stream = up.client.generate(text="x", max_tokens=250, ignore_eos=True, max_depth=1)
        ids = [token async for chunk in stream for token in chunk.token_ids]
        assert len(ids) == 250
        assert stream.complete is not None
        assert stream.complete.e2e_seconds > 0.5
        assert await up.works()


def test_options_follow_the_config() -> None:
    options = dict(ServerConfig(min_ping_interval_s=10.0, max_message_bytes=4096).grpc_options())
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.max_receive_message_length"] == 4096
    assert options["grpc.max_connection_age_ms"] == 3_600_000
    forever = dict(ServerConfig(max_connection_age_s=None).grpc_options())
    assert "grpc.max_connection_age_ms" not in forever
