"""The closed set of errors: each one produced by a real server and seen by a client, whole."""

from __future__ import annotations

import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from selfdraft import AdminClient, Client, SelfdraftError
from smg_grpc_proto.generated import common_pb2

from engine.plan import Engine
from scheduler.config import TenantPolicy
from scheduler.kv_events import KvEventLog
from scheduler.request import FinishReason
from scheduler.sessions import NoRoomError
from service import errors
from service.config import SecurityConfig, ServerConfig, ServiceConfig
from service.errors import CATALOGUE, DOMAIN, Reason, ServiceError, error_of
from service.tokens import entry_text, new_token
from tests.scheduler.fake_engine import FakeEngine
from tests.service.gateway.calls import connected, refusal
from tests.service.harness import VOCAB, Running, running, saying, service_config

pytestmark = pytest.mark.anyio

PROTO = Path(__file__).resolve().parents[2] / "proto"

ENDLESS: dict[str, Any] = {"text": "x", "max_tokens": 3000, "ignore_eos": True}

Scenario = Callable[[Path], Awaitable[SelfdraftError]]
SCENARIOS: dict[Reason, Scenario] = {}


def scenario(reason: Reason) -> Callable[[Scenario], Scenario]:
    def add(function: Scenario) -> Scenario:
        SCENARIOS[reason] = function
        return function

    return add


async def failing(call: Awaitable[object]) -> SelfdraftError:
    with pytest.raises(SelfdraftError) as caught:
        await call
    return caught.value


@scenario(Reason.INVALID_ARGUMENT)
async def _(folder: Path) -> SelfdraftError:
    async with running() as up:
        return await failing(up.client.generate(text="x", top_p=2).text())


@scenario(Reason.DUPLICATE_REQUEST)
async def _(folder: Path) -> SelfdraftError:
    async with running(step_s=0.003) as up:
        first = up.client.generate(**ENDLESS, request_id="a")
        await first.request_id()
        return await failing(up.client.generate(**ENDLESS, request_id="a").text())


def _tokens(folder: Path) -> tuple[SecurityConfig, str]:
    token = new_token()
    (folder / "tokens.toml").write_text(entry_text(token, tenant="ada"))
    return SecurityConfig(tokens=folder / "tokens.toml"), token


@scenario(Reason.UNAUTHENTICATED)
async def _(folder: Path) -> SelfdraftError:
    async with running(config=service_config(security=_tokens(folder)[0])) as up:
        return await failing(up.client.tokenize(text="x"))


@scenario(Reason.PERMISSION_DENIED)
async def _(folder: Path) -> SelfdraftError:
    security, token = _tokens(folder)
    async with (
        running(config=service_config(security=security)) as up,
        AdminClient(up.target, token=token) as admin,
    ):
        return await failing(admin.config())


async def one_too_many(config: ServiceConfig) -> SelfdraftError:
    """One runs, one waits, and one more comes."""
    async with running(config=config, step_s=0.003, max_rows=1) as up:
        kept = [up.client.generate(**ENDLESS)]
        with anyio.fail_after(5):
            while not up.statistics.running:
                await anyio.sleep(0.005)
        kept.append(up.client.generate(**ENDLESS))
        await kept[1].request_id()
        return await failing(up.client.generate(**ENDLESS).text())


@scenario(Reason.QUEUE_FULL)
async def _(folder: Path) -> SelfdraftError:
    return await one_too_many(service_config(max_queue=1))


@scenario(Reason.TENANT_LIMIT)
async def _(folder: Path) -> SelfdraftError:
    return await one_too_many(service_config(default_tenant=TenantPolicy(max_queued_tokens=1)))


@scenario(Reason.DEADLINE_UNREACHABLE)
async def _(folder: Path) -> SelfdraftError:
    async with running(step_s=0.003, max_rows=1) as up:
        short: dict[str, Any] = {**ENDLESS, "max_tokens": 30}
        async with anyio.create_task_group() as tasks:  # what is measured says how long others take
            for _ in range(12):
                tasks.start_soon(up.client.generate(**short).text)
        kept = [up.client.generate(**ENDLESS) for _ in range(8)]
        for stream in kept:
            await stream.request_id()
        return await failing(up.client.generate(**ENDLESS, timeout=0.02).text())


@scenario(Reason.TOO_MANY_CALLS)
async def _(folder: Path) -> SelfdraftError:
    config = service_config(server=ServerConfig(max_open_calls=2))
    async with running(config=config) as up, grpc.aio.insecure_channel(up.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _watched(stub)
        await stub.Check(health_pb2.HealthCheckRequest())  # probes are answered all the same
        assert await up.works()
        watches[0].cancel()
        with anyio.fail_after(5):
            while not await _can_watch(stub):
                await anyio.sleep(0.01)
        return SelfdraftError.of(caught.value)


async def _watched(stub: Any) -> None:
    async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
        return


async def _can_watch(stub: Any) -> bool:
    try:
        await _watched(stub)
    except grpc.aio.AioRpcError:
        return False
    return True


@scenario(Reason.SLOW_READER)
async def _(folder: Path) -> SelfdraftError:
    config = service_config(slow_reader_timeout_s=0.2, stream_buffer=64)
    config = replace(config, server=replace(config.server, write_timeout_s=1.0))
    window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
    much: dict[str, Any] = {"context_length": 200_000, "pages": 20_000, "token": saying("x" * 50)}
    async with running(config=config, client={"options": window}, **much) as up:
        slow = up.client.generate(text="x", max_tokens=150_000)
        await slow.request_id()
        with anyio.fail_after(10):
            while not up.finished("slow_reader"):
                await anyio.sleep(0.02)
        return await failing(slow.text())


@scenario(Reason.SLOW_SENDER)
async def _(folder: Path) -> SelfdraftError:
    config = service_config(server=ServerConfig(message_timeout_s=0.1))
    async with running(config=config) as up, grpc.aio.insecure_channel(up.target) as channel:
        method: Any = channel.stream_stream
        return SelfdraftError.of(await refusal(method("/selfdraft.v1.Inference/Generate")()))


@scenario(Reason.DEADLINE_EXCEEDED)
async def _(folder: Path) -> SelfdraftError:
    """As the server says it: the client's own clock usually speaks first."""
    async with running(step_s=0.003) as up:
        stream = up.client.generate(**ENDLESS, request_id="a")
        await stream.request_id()
        up.server.door.look().scheduler.cancel("a", FinishReason.DEADLINE)
        return await failing(stream.text())


@scenario(Reason.ABORTED)
async def _(folder: Path) -> SelfdraftError:
    async with running(step_s=0.003) as up:
        stream = up.client.generate(**ENDLESS, request_id="a")
        await stream.request_id()
        await up.client.abort("a")
        return await failing(stream.text())


@scenario(Reason.CANCELLED)
async def _(folder: Path) -> SelfdraftError:
    """A client that has left hears nothing; here the scheduler cancels in its name."""
    async with running(step_s=0.003) as up:
        stream = up.client.generate(**ENDLESS, request_id="a")
        await stream.request_id()
        up.server.door.look().scheduler.cancel("a")
        return await failing(stream.text())


@scenario(Reason.LOADING)
async def _(folder: Path) -> SelfdraftError:
    go = threading.Event()

    def slow() -> Engine:
        assert go.wait(10)
        return FakeEngine(vocab_size=VOCAB)

    async with running(engine=slow, ready=False) as up:
        error = await failing(up.client.tokenize(text="x"))
        go.set()
        return error


@scenario(Reason.DRAINING)
async def _(folder: Path) -> SelfdraftError:
    async with running(step_s=0.005) as up:
        last = up.client.generate(**{**ENDLESS, "max_tokens": 60})
        await last.request_id()
        up.server.stop.request()
        with anyio.fail_after(5):
            while up.server.door.state != "draining":
                await anyio.sleep(0.005)
        error = await failing(up.client.generate(text="x").text())
        await last.text()
        return error


@scenario(Reason.ENGINE_FAILED)
async def _(folder: Path) -> SelfdraftError:
    async with running(step_s=0.002, dies_at=10) as up:
        return await failing(up.client.generate(**ENDLESS).text())


@scenario(Reason.GRAMMAR_LIMIT)
async def _(folder: Path) -> SelfdraftError:
    async with running() as up:
        dead_end = 'start: "a" x\nx: x "b"'
        return await failing(up.client.generate(text="x", grammar=dead_end, max_tokens=9).text())


@scenario(Reason.EVENTS_EXPIRED)
async def _(folder: Path) -> SelfdraftError:
    """`start` is a number from the life of another server."""
    async with running(boundaries=4) as up, connected(up) as gateway:
        start = common_pb2.SubscribeKvEventsRequest(start_sequence_number=17)
        return SelfdraftError.of(await refusal(gateway.SubscribeKvEvents(start)))


@scenario(Reason.EVENTS_MISSED)
async def _(folder: Path) -> SelfdraftError:
    """With a log of one event: more than that pass between two looks at it."""
    config = service_config(prefill_chunk=16)
    async with running(config=config, boundaries=8) as up, connected(up) as gateway:
        cache = up.server.door.look().scheduler._core.keeping.cache
        log = KvEventLog(max_events=1)
        log.newest = cache.events.newest
        cache.events = log
        call = gateway.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        async with anyio.create_task_group() as tasks:
            for number in range(2, 10):
                tasks.start_soon(partial(up.works, token_ids=[number] * 100))
        return SelfdraftError.of(await refusal(call))


@scenario(Reason.ROW_FAULT)
async def _(folder: Path) -> SelfdraftError:
    async with running(faults={(9, 9): 5}) as up:
        return await failing(
            up.client.generate(token_ids=[9, 9], max_tokens=60, ignore_eos=True).text()
        )


async def _kept(up: Running) -> None:
    ask: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "session_id": "chat"}
    await up.client.generate(text="hello", **ask).text()
    await up.until_idle()


async def _file(folder: Path, act: Callable[[Running, AdminClient], Awaitable[object]]) -> Any:
    """The error of an act of an admin, on a server that has a folder and a session."""
    config = service_config(security=SecurityConfig(session_dir=folder))
    async with running(config=config, boundaries=4) as up, AdminClient(up.target) as admin:
        await _kept(up)
        return await failing(act(up, admin))


@scenario(Reason.NOT_CONFIGURED)
async def _(folder: Path) -> SelfdraftError:
    async with running() as up, AdminClient(up.target) as admin:
        return await failing(admin.session_files())


@scenario(Reason.NOT_FOUND)
async def _(folder: Path) -> SelfdraftError:
    found: SelfdraftError = await _file(folder, lambda _, a: a.import_session("x", "y"))
    return found


@scenario(Reason.FILE_EXISTS)
async def _(folder: Path) -> SelfdraftError:
    async def twice(up: Running, admin: AdminClient) -> None:
        for _ in range(2):
            await admin.export_session("chat", "x")

    found: SelfdraftError = await _file(folder, twice)
    return found


@scenario(Reason.FOREIGN_FILE)
async def _(folder: Path) -> SelfdraftError:
    (folder / "x.safetensors").write_text("{}")
    found: SelfdraftError = await _file(folder, lambda _, a: a.import_session("x", "y"))
    return found


@scenario(Reason.NO_ROOM)
async def _(folder: Path) -> SelfdraftError:
    async def full(up: Running, admin: AdminClient) -> None:
        await admin.export_session("chat", "x")
        core: Any = up.server.door.look().scheduler._core

        def no_room(*_: object) -> None:
            raise NoRoomError("9 pages are needed; running requests leave 1 of 10")

        core.begin_import = no_room
        await admin.import_session("x", "y")

    found: SelfdraftError = await _file(folder, full)
    return found


@scenario(Reason.STORAGE_FAILED)
async def _(folder: Path) -> SelfdraftError:
    async def broken(up: Running, admin: AdminClient) -> None:
        (folder / "x.safetensors").mkdir()  # cannot be replaced by a file
        await admin.export_session("chat", "x", overwrite=True)

    found: SelfdraftError = await _file(folder, broken)
    return found


@scenario(Reason.INTERNAL)
async def _(folder: Path) -> SelfdraftError:
    async with running() as up:
        up.defects_expected = True

        def broken(text: str, **_: object) -> tuple[int, ...]:
            raise KeyError("a secret of the implementation")

        up.server.door.look().tokenizer.encode = broken  # type: ignore[method-assign]
        return await failing(up.client.tokenize(text="x"))


def test_the_set_is_closed() -> None:
    assert set(SCENARIOS) == set(Reason) == set(CATALOGUE)
    for reason in Reason:
        assert reason.name == reason.value


@pytest.mark.parametrize("reason", Reason)
async def test_a_client_sees_each_error_whole(reason: Reason, tmp_path: Path) -> None:
    error = await SCENARIOS[reason](tmp_path)
    kind = CATALOGUE[reason]
    assert error.reason == reason.value
    assert error.code is kind.code
    assert error.message
    assert bool(error.violations) is ("BadRequest" in kind.details)
    assert (error.retry_after_s is not None) is ("RetryInfo" in kind.details)
    assert "secret" not in str(error)


def test_ends_of_requests_are_among_them() -> None:
    for end in FinishReason:
        error = error_of(end, "", retry_after_s=1.0)
        assert error is None or error.reason in CATALOGUE


def test_statuses_carry_the_domain() -> None:
    status = ServiceError(Reason.ABORTED, "x").to_status()
    assert any(DOMAIN.encode() in value for _, value in status.trailing_metadata)


def test_the_documented_table_is_the_set() -> None:
    page = (PROTO / "README.md").read_text(encoding="utf-8")
    assert errors.table() in page, "proto/README.md: put service.errors.table() there"


def test_comments_of_the_api_name_errors_that_exist() -> None:
    known = {reason.value for reason in Reason} | {code.name for code in grpc.StatusCode}
    for path in (PROTO / "selfdraft" / "v1").glob("*.proto"):
        text = path.read_text(encoding="utf-8")
        listed = re.findall(r"^ *//   ([A-Z_]+) +([A-Z_, ]+)", text, re.M)
        named = {
            word for pair in listed for part in pair for word in re.findall("[A-Z_]{4,}", part)
        }
        assert named <= known


# --- gRPC's own, which carry no details -------------------------------------------------------


async def test_limits_of_the_transport_say_their_numbers() -> None:
    config = service_config(server=ServerConfig(max_message_bytes=2048))
    async with running(config=config) as up:
        error = await failing(up.client.generate(text="x" * 5000).text())
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in error.message
        assert "2048" in error.message
        assert error.reason == ""
        assert await up.works()
    config = service_config(server=ServerConfig(max_concurrent_rpcs=1))
    async with running(config=config, step_s=0.003) as up:
        stream = up.client.generate(**ENDLESS)
        await stream.request_id()
        async with Client(up.target) as other:
            error = await failing(other.tokenize(text="x"))
        assert error.reason == Reason.TOO_MANY_CALLS
        assert error.message.startswith("1 calls")


async def test_prompts_over_their_limits_are_told_the_numbers() -> None:
    config = service_config()
    config = replace(config, limits=replace(config.limits, max_text_chars=100))
    async with running(config=config) as up:
        error = await failing(up.client.generate(text="x" * 101).text())
        assert error.violations[0].description == "at most 100 characters, is 101"
