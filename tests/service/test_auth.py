"""Bearer tokens: who gets in, what each tenant can see of the others, and what nobody is told."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from selfdraft import AdminClient, Client, InsecureTokenError, SelfdraftError, Tls
from selfdraft.channel import connect
from selfdraft.channel import is_loopback as is_local_target
from selfdraft.v1 import admin_pb2, selfdraft_pb2
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2

from scheduler.config import SchedulerConfig, TenantPolicy
from service.auth import Identity, Scope, identity_of
from service.config import SecurityConfig, ServiceConfig
from service.gate import NO_GATEWAY
from service.logs import make_logger
from service.reload import FileError
from service.tenant import TENANT_KEY
from service.tokens import Tokens, digest_of, entry_text, new_token
from tests.service.gateway.calls import ask, connected, read, refusal
from tests.service.harness import Running, running, service_config

pytestmark = pytest.mark.anyio

PAST = datetime(2020, 1, 1, tzinfo=UTC)


class Book:
    """A token file and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.toml"
        self.text = ""
        self.ada = self.add("ada")
        self.bob = self.add("bob")
        self.root = self.add("root", admin=True)

    def add(self, tenant: str, **options: Any) -> str:
        token = new_token()
        self.text += entry_text(token, tenant=tenant, **options)
        self.write(self.text)
        return token

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    def config(self, **security: Any) -> ServiceConfig:
        return service_config(security=SecurityConfig(tokens=self.path, **security))


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


# --- tokens -----------------------------------------------------------------------------------


def test_a_token_is_256_random_bits_and_the_file_holds_its_hash_only() -> None:
    token = new_token()
    assert token.startswith("sd_")
    assert len(token) == 3 + 43
    assert token != new_token()
    text = entry_text(token, tenant="ada", admin=True, expires=PAST)
    assert token not in text
    assert digest_of(token) in text
    with pytest.raises(FileError, match="tenant: must be 1 … 64"):
        entry_text(token, tenant='x"\nadmin = true')


def silent(log: io.StringIO | None = None) -> Any:
    return make_logger("json", log or io.StringIO())


def test_tokens_are_known_until_they_expire(book: Book) -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    short = book.add("ada", expires=end)
    now = [end - timedelta(seconds=1)]
    tokens = Tokens(book.path, silent(), clock=lambda: now[0])
    assert tokens.identify(book.ada) == Identity(tenant="ada", admin=False)
    assert tokens.identify(book.root) == Identity(tenant="root", admin=True)
    assert tokens.identify(short) == Identity(tenant="ada", admin=False)
    now[0] = end
    assert tokens.identify(short) is None
    assert [w for w in tokens.warnings() if "expired on 2030-01-01" in w]
    for wrong in ("", "x", book.ada[:-1], book.ada + "x", book.ada.upper(), "é", "x" * 600):
        assert tokens.identify(wrong) is None


def test_every_hash_is_compared_whole(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries, each with a comparison whose time does not depend on the bytes."""
    tokens = Tokens(book.path, silent())
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("service.tokens.hmac.compare_digest", compare)
    assert tokens.identify(book.ada) is not None
    everybody = (book.ada, book.bob, book.root)
    assert [other for _, other in compared] == [digest_of(token) for token in everybody]


def test_a_hash_with_the_right_beginning_is_another_hash(book: Book) -> None:
    digest = digest_of(book.ada)
    other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    book.write(book.text.replace(digest, other))
    assert Tokens(book.path, silent()).identify(book.ada) is None


BAD = {
    "not TOML": ("[[token", "is not TOML"),
    "a token itself": ('[[token]]\ntenant = "a"\nhash = "sd_secret"', r"token\[0\].hash: must be"),
    "no tenant": (f'[[token]]\nhash = "{digest_of("x")}"', r"token\[0\].tenant: must be"),
    "a tenant with a slash": (
        f'[[token]]\ntenant = "a/b"\nhash = "{digest_of("x")}"',
        r"token\[0\].tenant",
    ),
    "a typing error": (
        f'[[token]]\ntenant = "a"\nhash = "{digest_of("x")}"\nadmim = true',
        r"token\[0\].admim: must be one of admin, expires, hash, tenant",
    ),
    "admin is text": (
        f'[[token]]\ntenant = "a"\nhash = "{digest_of("x")}"\nadmin = "no"',
        r"token\[0\].admin: must be true or false",
    ),
    "no time zone": (
        f'[[token]]\ntenant = "a"\nhash = "{digest_of("x")}"\nexpires = 2030-01-01T00:00:00',
        r"token\[0\].expires: must be a time with its zone",
    ),
    "another table": ('[tokens]\na = "b"', "tokens: there is only"),
    "not tables": ('token = "x"', r"must be \[\[token\]\] tables"),
    "twice": (entry_text("x", tenant="a") + entry_text("x", tenant="b"), "the same hash"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_entry_named(name: str, book: Book) -> None:
    text, said = BAD[name]
    book.write(text)
    with pytest.raises(FileError, match=said) as caught:
        Tokens(book.path, silent())
    assert "secret" not in str(caught.value)


def test_a_file_that_others_may_write_is_told(book: Book) -> None:
    tokens = Tokens(book.path, silent())
    assert tokens.warnings() == []
    book.path.chmod(0o660)
    assert "others than its owner can write it" in tokens.warnings()[0]
    book.write("")
    assert "nobody can call" in Tokens(book.path, silent()).warnings()[0]


# --- calls ------------------------------------------------------------------------------------

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
        assert not up.log_lines("undecodable message")


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


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def rest(call: Any) -> None:
    while await call.read():
        pass


async def test_a_gateway_needs_a_token_and_acts_for_its_tenant(book: Book) -> None:
    config = replace(book.config(), scheduler=SchedulerConfig(prefill_chunk=16))
    async with running(config=config, boundaries=8, step_s=0.003) as up, connected(up) as gateway:
        for call in (
            gateway.HealthCheck(vllm.HealthCheckRequest()),
            gateway.Generate(ask()),
            gateway.Abort(vllm.AbortRequest(request_ids=["chatcmpl-1"])),
            gateway.GetLoads(vllm.GetLoadsRequest()),
        ):
            assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        endless = ask(max_tokens=3000, ignore_eos=True)
        hers, his = (gateway.Generate(endless, metadata=bearer(t)) for t in (book.ada, book.bob))
        await hers.read()
        await his.read()  # the same id is no clash
        abort = vllm.AbortRequest(request_ids=["chatcmpl-1", "ada/chatcmpl-1"])
        await gateway.Abort(abort, metadata=bearer(book.bob))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(his)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert up.statistics.running + up.statistics.queued_requests == 1
        hers.cancel()
        await up.idle()
        assert {line["tenant"] for line in up.log_lines()} == {"ada", "bob"}
        assert {line["request_id"] for line in up.log_lines()} == {"chatcmpl-1"}
        others = (*bearer(book.ada), (TENANT_KEY, "bob"))
        error = await refusal(gateway.Generate(ask(), metadata=others))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_gateways_tenants_share_no_prefixes_and_admins_see_all(book: Book) -> None:
    config = replace(book.config(), scheduler=SchedulerConfig(prefill_chunk=16))
    async with running(config=config, boundaries=8) as up, connected(up) as gateway:
        prompt = ask(ids=(7,) * 100, max_tokens=3, ignore_eos=True)
        cached = []
        for token in (book.ada, book.ada, book.bob):
            _, [complete] = await read(gateway.Generate(prompt, metadata=bearer(token)))
            cached.append(complete.cached_tokens > 0)
            await up.until_idle()
        assert cached == [False, True, False]
        subscription = common_pb2.SubscribeKvEventsRequest()
        for token in (book.ada, book.bob):
            call = gateway.SubscribeKvEvents(subscription, metadata=bearer(token))
            assert (await refusal(call)).code() is grpc.StatusCode.PERMISSION_DENIED
        events = gateway.SubscribeKvEvents(subscription, metadata=bearer(book.root))
        batch = await events.read()
        stored = [event.stored for event in batch.events if event.HasField("stored")]
        first = [chain for chain in stored if not chain.HasField("parent_block_hash")]
        assert len({chain.blocks[0].block_hash for chain in first}) == 2, "one of each tenant"
        assert {tuple(chain.blocks[0].token_ids) for chain in first} == {(7,) * 16}
        events.cancel()


async def test_what_a_gateway_needs_is_said_at_the_start(book: Book) -> None:
    for tokens, gateway in ((True, True), (True, False), (False, True)):
        config = book.config() if tokens else service_config()
        config = replace(config, server=replace(config.server, gateway=gateway))
        async with running(config=config) as up:
            notes = [line["note"] for line in up.log_lines("security")]
            assert notes == ([NO_GATEWAY] if tokens and gateway else [])


async def test_no_secret_is_in_what_a_server_says_of_itself(book: Book) -> None:
    async with running(config=book.config()) as up, connected(up) as gateway:
        async with (
            Client(up.target, token=book.ada) as client,
            AdminClient(up.target, token=book.root) as admin,
        ):
            asked = vllm.GetServerInfoRequest(), vllm.GetModelInfoRequest()
            told = [
                str(await client.server_info()),
                str(await client.loads()),
                str(await gateway.GetServerInfo(asked[0], metadata=bearer(book.ada))),
                str(await gateway.GetModelInfo(asked[1], metadata=bearer(book.ada))),
            ]
            everything = [*told, str(await admin.config())]
        tokens = (book.ada, book.bob, book.root)
        secrets = (*tokens, *(digest_of(token).removeprefix("sha256:") for token in tokens))
        for text in everything:
            assert not [secret for secret in secrets if secret in text]
        assert not [text for text in told if str(book.path.parent) in text]


def test_nobody_calls_outside_of_a_call() -> None:
    with pytest.raises(LookupError):
        identity_of(None)  # type: ignore[arg-type]


# --- tenants ----------------------------------------------------------------------------------


def test_scopes_do_not_meet() -> None:
    ada, bob = Scope("a"), Scope("a.b")
    for name in ("x", "b/x", "a/x", ".b/x", "/x"):
        assert ada.outside(ada.inside(name)) == name
        assert bob.outside(ada.inside(name)) is None
        assert ada.outside(bob.inside(name)) is None
    assert Scope("").inside("a/x") == "a/x"


async def test_requests_are_their_tenants_own(book: Book) -> None:
    async with running(config=book.config(), step_s=0.003) as up:
        async with (
            Client(up.target, token=book.ada) as ada,
            Client(up.target, token=book.bob) as bob,
        ):
            asked: dict[str, Any] = {"text": "x", "max_tokens": 3000, "request_id": "mine"}
            asked["ignore_eos"] = True
            hers, his = ada.generate(**asked), bob.generate(**asked)
            assert await hers.request_id() == "mine"
            assert await his.request_id() == "mine"  # the same id is no clash
            for guess in ("ada/mine", "/mine"):
                assert not await bob.abort(guess)
            assert await bob.abort("mine")
            with pytest.raises(SelfdraftError, match="ABORTED"):
                await his.text()
            assert up.statistics.running + up.statistics.queued_requests == 1
            with pytest.raises(SelfdraftError) as caught:
                await ada.generate(**asked).text()
            assert caught.value.reason == "DUPLICATE_REQUEST"
            assert "ada/" not in str(caught.value)
            assert await ada.abort("mine")
        await up.until_idle()
        assert {line["tenant"] for line in up.log_lines()} == {"ada", "bob"}
        assert {line["request_id"] for line in up.log_lines()} == {"mine"}


async def test_sessions_are_their_tenants_own(book: Book) -> None:
    async with (
        running(config=book.config(), boundaries=8) as up,
        Client(up.target, token=book.ada) as ada,
        Client(up.target, token=book.bob) as bob,
    ):
        said: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "session_id": "chat"}
        first = ada.generate(text="hello there, how are you", **said)
        ids = [token async for chunk in first for token in chunk.token_ids]
        await up.until_idle()
        prompt = [*await ada.tokenize(text="hello there, how are you"), *ids, 7]
        assert [s.session_id for s in await ada.sessions()] == ["chat"]
        assert await bob.sessions() == []
        assert not await bob.release_session("chat")
        assert not await bob.release_session("ada/chat")
        for client, goes_on in ((bob, False), (ada, True)):
            turn = client.generate(token_ids=prompt, **said)
            await turn.text()
            assert turn.complete is not None
            assert (turn.complete.cached_tokens == len(prompt) - 2) is goes_on
            assert (turn.complete.cached_tokens > 0) is goes_on
            await up.until_idle()
        assert await bob.release_session("chat")
        assert [s.session_id for s in await ada.sessions()] == ["chat"]


@pytest.mark.parametrize("shared", [False, True])
async def test_one_tenant_cannot_tell_what_another_has_sent(book: Book, shared: bool) -> None:
    security = book.config(share_prefixes_between_tenants=shared).security
    config = service_config(security=security, prefill_chunk=16)
    async with running(config=config, boundaries=8) as up:
        prompt: dict[str, Any] = {"token_ids": list(range(5, 85)), "max_tokens": 2}

        async def cached(token: str) -> int:
            async with Client(up.target, token=token) as client:
                generation = client.generate(**prompt)
                await generation.text()
                await up.until_idle()
                assert generation.complete is not None
                return generation.complete.cached_tokens

        assert await cached(book.ada) == 0
        assert await cached(book.ada) > 0
        assert (await cached(book.bob) > 0) is shared
        assert await cached(book.bob) > 0


# --- the client -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "local"),
    [
        *(("localhost:1", True), ("127.0.0.1:1", True), ("[::1]:1", True), ("unix:/run/x", True)),
        *(("dns:///localhost:1", True), ("ipv4:127.0.0.1:1", True), ("LOCALHOST.:1", True)),
        *(("example.com:1", False), ("10.0.0.1:1", False), ("127.0.0.1.example.com:1", False)),
        *(("localhost.example.com:1", False), ("ipv4:127.0.0.1:1,10.0.0.1:1", False)),
        *(("dns://10.0.0.1/example.com:1", False), ("[2001:db8::1]:1", False), ("", False)),
    ],
)
async def test_a_token_travels_in_plain_text_on_this_machine_only(target: str, local: bool) -> None:
    assert is_local_target(target) is local
    if not local:
        with pytest.raises(InsecureTokenError) as caught:
            Client(target, token="sd_secret")
        assert "secret" not in str(caught.value)
        connection = connect(target or "x", token="sd_secret", insecure_token=True)
    else:
        connection = connect(target, token="sd_secret")
    assert connection.metadata == (("authorization", "Bearer sd_secret"),)
    assert "secret" not in repr(connection)
    await connection.channel.close(None)


async def test_over_tls_the_token_is_sent_by_grpc(book: Book, tmp_path: Path) -> None:
    import trustme

    from service.config import TlsFiles

    ca = trustme.CA()
    leaf = ca.issue_cert("localhost", "127.0.0.1")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    files = TlsFiles(cert=tmp_path / "both.pem", key=tmp_path / "both.pem")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = Tls.of_files(ca=tmp_path / "ca.pem")
    options = {"tls": tls, "token": book.ada}
    async with running(config=book.config(tls=files), client=options) as up:
        assert await up.works()
        async with Client(up.target, tls=tls) as stranger:
            with pytest.raises(SelfdraftError, match="UNAUTHENTICATED"):
                await stranger.tokenize(text="x")
        async with Client(up.target, tls=tls, token="sd_x") as wrong:
            with pytest.raises(SelfdraftError, match="UNAUTHENTICATED"):
                await wrong.tokenize(text="x")
    with pytest.raises(ValueError, match="needs both"):
        Tls.of_files(cert=tmp_path / "both.pem")
    assert "PRIVATE" not in repr(Tls.of_files(cert=tmp_path / "ca.pem", key=files.key))


# --- fair share -------------------------------------------------------------------------------


async def test_tokens_go_on_the_account_of_who_holds_the_token(book: Book) -> None:
    config = replace(book.config(), scheduler=SchedulerConfig(tenants={"ada": TenantPolicy()}))
    ask: dict[str, Any] = {"token_ids": [5] * 7, "max_tokens": 3, "ignore_eos": True}
    async with running(config=config) as up, Client(up.target, token=book.ada) as ada:
        await ada.generate(**ask).text()
        await ada.generate(**ask, metadata=[(TENANT_KEY, "ada")]).text()
        with pytest.raises(SelfdraftError) as caught:
            await ada.generate(**ask, metadata=[(TENANT_KEY, "bob")]).text()
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
        assert up.statistics.served == {"ada": 20, "other": 0}
