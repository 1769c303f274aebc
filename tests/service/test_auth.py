"""Bearer tokens: which calls need one, and what nobody is told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from selfdraft import Client, SelfdraftError
from selfdraft.v1 import admin_pb2, selfdraft_pb2

from service.auth import identity_of
from service.tokens import Tokens, digest_of, entry_text, new_token
from tests.service.books import PAST, Book, silent
from tests.service.harness import Running, running

pytestmark = pytest.mark.anyio


UNARY: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "Generate": lambda c: c.generate(text="x", max_tokens=1, ignore_eos=True).text(),
    "Abort": lambda c: c.abort("x"),
    "Tokenize": lambda c: c.tokenize(text="x"),
    "Detokenize": lambda c: c.detokenize([5]),
    "GetModelInfo": lambda c: c.model_info(),
    "ReleaseSession": lambda c: c.release_session("x"),
    "ListSessions": lambda c: c.sessions(),
    "GetLoads": lambda c: c.loads(),
    "GetServerInfo": lambda c: c.server_info(),
}


async def methods(up: Running) -> dict[str, list[str]]:
    """What the server says it offers, by service."""
    async with grpc.aio.insecure_channel(up.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(**what: Any) -> Any:
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**what)]))
            return await call.read()

        listed = await ask(list_services="")
        found = {}
        for service in listed.list_services_response.service:
            answer = await ask(file_containing_symbol=service.name)
            for raw in answer.file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(raw)
                for described in file.service:
                    if f"{file.package}.{described.name}" == service.name:
                        found[service.name] = [method.name for method in described.method]
    return found


async def bare(
    target: str, method: str, *metadata: tuple[str, str], data: bytes = b""
) -> grpc.aio.AioRpcError | None:
    """A call of any method by its bytes; its error."""
    async with grpc.aio.insecure_channel(target) as channel:
        make: Any = channel.unary_stream
        call = make(method)(data, metadata=metadata, timeout=5)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error
    return None


async def test_every_method_of_every_service_needs_a_token_unless_listed(book: Book) -> None:
    async with running(config=book.config()) as up:
        offered = await methods(up)
        assert {"selfdraft.v1.Inference", "selfdraft.v1.Admin"} <= offered.keys()
        closed = {s: m for s, m in offered.items() if not s.startswith("grpc.")}
        for service, names in (*closed.items(), ("no.such.Service", ["Nothing"])):
            for name in names:
                error = await bare(up.target, f"/{service}/{name}")
                assert error is not None, (service, name)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED, (service, name)
        async with grpc.aio.insecure_channel(up.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert set(UNARY) == set(offered["selfdraft.v1.Inference"]) & set(UNARY)
        async with Client(up.target, token=book.ada) as client:
            for call in UNARY.values():
                await call(client)
        async with Client(up.target) as stranger:
            for call in UNARY.values():
                with pytest.raises(SelfdraftError) as caught:
                    await call(stranger)
                assert caught.value.reason == "UNAUTHENTICATED"


async def test_reflection_can_be_closed(book: Book) -> None:
    async with running(config=book.config(open_reflection=False)) as up:
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        error = await bare(up.target, path)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_what_is_wrong_with_a_token_is_not_told(book: Book) -> None:
    expired = book.add("ada", expires=PAST)
    async with running(config=book.config()) as up:
        answers = set()
        for given in (
            (),
            (("authorization", ""),),
            (("authorization", "Bearer"),),
            (("authorization", f"Basic {book.ada}"),),
            (("authorization", f"Bearer {book.ada[:-1]}"),),
            (("authorization", f"Bearer {expired}"),),
            (("authorization", f"Bearer {'x' * 4000}"),),
            (("authorization", f"Bearer {book.ada}"), ("authorization", f"Bearer {book.bob}")),
            (("authorization-bin", book.ada.encode()),),
        ):
            error = await bare(up.target, "/selfdraft.v1.Inference/GetModelInfo", *given)
            assert error is not None
            answers.add((error.code(), error.details(), str(error.trailing_metadata())))
        assert len(answers) == 1
        right = ("authorization", f"bEaReR {book.ada}")
        assert await bare(up.target, "/selfdraft.v1.Inference/GetModelInfo", right) is None


async def test_strangers_are_refused_before_their_message_is_read(book: Book) -> None:
    async with running(config=book.config()) as up:
        error = await bare(up.target, "/selfdraft.v1.Inference/Generate", data=b"\xff" * 2_000_000)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not up.log_lines("call not taken")


async def test_secrets_are_in_no_log_and_no_error(book: Book) -> None:
    wrong = new_token()
    async with running(config=book.config()) as up:
        for token in (book.ada, book.root, wrong):
            async with Client(up.target, token=token) as client:
                for call in UNARY.values():
                    with contextlib.suppress(SelfdraftError):
                        await call(client)
                assert token not in repr(client)
        book.write(book.text.replace("sha256:", "sd_"))
        async with Client(up.target, token=book.ada) as client:
            await client.model_info()  # the last good file counts
        log = up.log.getvalue()
        assert "not reloaded" in log
        hashes = [digest_of(token).removeprefix("sha256:") for token in (book.ada, wrong)]
        for secret in (book.ada, book.bob, book.root, wrong, *hashes):
            assert secret not in log
    book.write(book.text)
    assert hashes[0] not in repr(Tokens(book.path, silent()).entries)


async def test_refusals_are_logged_at_most_once_a_second(book: Book) -> None:
    async with running(config=book.config(), metrics=True) as up:
        started = time.monotonic()
        for _ in range(30):
            await bare(up.target, "/selfdraft.v1.Inference/Generate")
        lines = up.log_lines("call refused")
        assert 1 <= len(lines) <= 1 + (time.monotonic() - started)
        assert sum(line["before"] + 1 for line in lines) <= 30
        name = 'selfdraft_requests_refused_total{reason="UNAUTHENTICATED"}'
        assert (await up.metrics())[name] == 30


async def test_the_file_is_read_again(book: Book) -> None:
    async with running(config=book.config()) as up:
        late = book.add("cyd")
        async with Client(up.target, token=late) as client:
            assert await client.tokenize(text="x")
        book.write(entry_text(late, tenant="cyd"))
        async with Client(up.target, token=book.ada) as client:
            with pytest.raises(SelfdraftError, match="UNAUTHENTICATED"):
                await client.tokenize(text="x")
        book.path.unlink()
        async with Client(up.target, token=late) as client:
            assert await client.tokenize(text="x")
        assert len(up.log_lines("not reloaded, the last good one stays")) == 1


async def test_only_admins_administer(book: Book) -> None:
    services = {
        file.services_by_name[name].full_name: file.services_by_name[name].methods
        for file, name in ((admin_pb2.DESCRIPTOR, "Admin"), (selfdraft_pb2.DESCRIPTOR, "Inference"))
    }
    async with running(config=book.config()) as up:
        for method in services["selfdraft.v1.Admin"]:
            path = f"/selfdraft.v1.Admin/{method.name}"
            error = await bare(up.target, path, ("authorization", f"Bearer {book.ada}"))
            assert error is not None
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        events = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"  # token ids of all tenants
        error = await bare(up.target, events, ("authorization", f"Bearer {book.ada}"))
        assert error is not None
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        path = "/selfdraft.v1.Admin/GetConfig"
        assert await bare(up.target, path, ("authorization", f"Bearer {book.root}")) is None


def test_nobody_calls_outside_of_a_call() -> None:
    with pytest.raises(LookupError):
        identity_of(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("open_reflection", [True, False])
async def test_reflection_streams_are_bounded_for_whoever_may(
    book: Book, open_reflection: bool
) -> None:
    """They do not count as calls, so nothing else bounds those of a tenant."""
    config = book.config(open_reflection=open_reflection)
    config = replace(config, server=replace(config.server, max_open_calls=2))
    async with running(config=config) as up, grpc.aio.insecure_channel(up.target) as channel:
        open_call: Any = channel.stream_stream
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        token = (("authorization", f"Bearer {book.ada}"),)
        held = [open_call(path)(metadata=token) for _ in range(2)]
        await anyio.sleep(0.1)
        error = await bare(up.target, path, *token)
        assert len(held) == 2
        assert error is not None
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
