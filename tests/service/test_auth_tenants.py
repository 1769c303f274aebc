"""What each tenant can see of the others, and where a client sends its token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from selfdraft import Client, InsecureTokenError, SelfdraftError, Tls
from selfdraft.channel import connect
from selfdraft.channel import is_loopback as is_local_target

from scheduler.config import SchedulerConfig, TenantPolicy
from service.auth import Scope
from service.tenant import TENANT_KEY
from tests.service.books import Book
from tests.service.harness import running, service_config

pytestmark = pytest.mark.anyio


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
